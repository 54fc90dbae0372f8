"""Schedules on real engines: bubble, goodput, ledger.

    python benchmarks/strategies.py                                    native, on the CPU, minutes
    python benchmarks/strategies.py --engines native vllm --shape smollm2-135m --device cuda \
        --slots 128 --group 512 --batch 128 --groups 3 --median 600 --max-tokens 4096

The loop, buffer, controller and weight sync are those of a training run; only the update itself is
left out, as it is the same for all. Answers have forced long-tailed lengths, the same for every
schedule and engine (unless a schedule resamples an answer). Weights are really synced after every
update. Engines alternate for each schedule, so that noise affects all.

An engine may have its own options, and a queue: vllm:stream_interval=16,queue=32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_peers.models import SHAPES, load, token_bytes
from sortedrl.config.parsing import options_from
from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import WallClock
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.core.meter import Meter, Metrics
from sortedrl.core.randomness import mix
from sortedrl.core.recorder import Journal
from sortedrl.simulate.engine import SimulatedScorer
from sortedrl.simulate.lengths import Lengths, LengthSettings
from sortedrl.types import Prompt, TrainBatch, Trajectory, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sortedrl.engines.generation import RolloutEngine

_CONTEXT_SPARE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The workload shared by all schedules and engines."""

    shape: str
    device: str
    dtype: str
    slots: int
    group: int
    batch: int
    groups: int
    median: float
    sigma: float
    max_tokens: int
    prompt_tokens: int
    seed: int

    def lengths(self) -> Lengths:
        """The forced lengths of the answers."""
        settings = LengthSettings(median=self.median, sigma=self.sigma)
        return Lengths(settings, seed=self.seed, max_tokens=self.max_tokens, samples_per_prompt=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    engine: str
    schedule: str
    bubble: float
    steady_bubble: float | None
    goodput: float
    throughput: float
    rollout_seconds: float
    weight_sync_seconds: float
    decoded: int
    trained: int
    discarded: int
    prefilled_again: int
    staleness: float
    mean_length: float


class RandomPrompts:
    """Prompts of random tokens."""

    def __init__(self, world: World, *, vocabulary: int) -> None:
        """Enough prompts for all groups."""
        self._left = world.group * world.groups
        self._world = world
        self._vocabulary = vocabulary
        self._next = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return not self._left

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts."""
        count = min(count, self._left)
        first = self._next
        self._left -= count
        self._next += count
        return [
            Prompt(
                id=number,
                tokens=[
                    mix(self._world.seed, number, place) % self._vocabulary
                    for place in range(self._world.prompt_tokens)
                ],
            )
            for number in range(first, self._next)
        ]


class SyncingTrainer:
    """Does not learn, but syncs its weights after every update."""

    def __init__(self, version: int, *, tensors: Callable[[], dict[str, object]] | None) -> None:
        """`tensors` is `None` if the engine shares the parameters."""
        self.version = version
        self._tensors = tensors

    def update(self, batch: TrainBatch) -> None:
        """A new version of the same weights."""
        self.version += 1

    def weights(self) -> Weights:
        """The current weights."""
        return Weights(self.version, None if self._tensors is None else self._tensors())


def schedules(world: World) -> list[Schedule]:
    """The schedules to compare."""
    base = Schedule(group_prompts=world.group, update_batch=world.batch)
    return [
        replace(base, strategy="sync", mode="on_policy"),
        replace(base, mode="on_policy"),
        replace(base, mode="partial"),
        replace(base, mode="partial", lookahead=1),
        replace(base, strategy="april", mode="partial"),
    ]


@contextlib.contextmanager
def opened_engine(
    name: str, model: PreTrainedModel, world: World, *, limit: Callable[[Trajectory], int]
) -> Iterator[RolloutEngine]:
    """An engine with the model, closed on exit."""
    from sortedrl.engines.native import NativeEngine
    from sortedrl.engines.streaming.streamed_engine import StreamedEngine

    context = world.prompt_tokens + world.max_tokens
    cache = (world.slots + 1) * (context + _CONTEXT_SPARE) * token_bytes(model)
    if name == "native":
        yield NativeEngine(
            model, slots=world.slots, max_tokens=limit, stop_tokens=(), cache_bytes=cache
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = StreamedEngine(
            lambda: opened_backend(name, folder, world, context=context, cache=cache),
            max_tokens=limit,
            stop_tokens=(),
        )
        with contextlib.closing(engine):
            yield engine


async def opened_backend(spec: str, folder: str, world: World, *, context: int, cache: int) -> Any:  # noqa: ANN401
    """An external engine with the model of a folder."""
    name, given = parts(spec)
    options: dict[str, object] = {key: value for key, value in given.items() if key != "queue"}
    if name == "vllm":
        from sortedrl.engines.vllm.vllm_process import VllmProcess

        options["kv_cache_memory_bytes"] = cache
        if world.device == "cuda":
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        return await VllmProcess.start(
            model=folder,
            slots=world.slots,
            context=context,
            dtype=world.dtype,
            # The cache size is set above; vLLM only checks that this much is free.
            memory_share=0.05,
            options=options,
        )
    from sortedrl.engines.sglang.sglang_process import SglangProcess

    return await SglangProcess.start(
        model=folder,
        slots=world.slots,
        context=context,
        dtype=world.dtype,
        seed=world.seed,
        memory_share=None,
        device=world.device,
        options=options,
    )


def parts(spec: str) -> tuple[str, dict[str, Any]]:
    """The name of an engine, and its options."""
    name, _, options = spec.partition(":")
    return name, dict(options_from(options.split(",") if options else ()))


def run(
    name: str, engine: RolloutEngine, model: PreTrainedModel, world: World, schedule: Schedule
) -> Row:
    """One schedule on one engine, from the first group to the last."""
    meter, clock = Meter(), WallClock()
    weight_syncs: list[float] = []

    def record(event: Any) -> None:  # noqa: ANN401
        meter(event)
        if event.kind == "hand_over":
            weight_syncs.append(event.took_seconds)

    shares = name == "native"
    tensors = None if shares else (lambda: dict(model.state_dict()))
    vocabulary = model.config.vocab_size
    loop = Loop(
        prompts=RandomPrompts(world, vocabulary=vocabulary),
        buffer=Buffer(unit_size=1),
        controller=Controller(schedule),
        engine=engine,
        scorer=SimulatedScorer(),
        trainer=SyncingTrainer(engine.version, tensors=tensors),
        journal=Journal(record, clock=clock),
        seed=world.seed,
        queue=parts(name)[1].get("queue", 0),
    )
    for _ in loop.run():
        pass
    return row(name, schedule, meter.metrics(), weight_sync_seconds=sum(weight_syncs))


def row(name: str, schedule: Schedule, metrics: Metrics, *, weight_sync_seconds: float) -> Row:
    """The numbers of a run."""
    figures, ledger = metrics.run, metrics.run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded, "the ledger does not balance"
    lengths = [tokens for _, _, tokens in metrics.trained_lengths]
    return Row(
        engine=name,
        schedule=schedule.name,
        bubble=figures.bubble,
        steady_bubble=None if metrics.steady is None else metrics.steady.bubble,
        goodput=figures.goodput,
        throughput=figures.throughput,
        rollout_seconds=figures.rollout_seconds,
        weight_sync_seconds=weight_sync_seconds,
        decoded=ledger.decoded,
        trained=ledger.trained,
        discarded=ledger.discarded,
        prefilled_again=ledger.prefilled_again,
        staleness=figures.mean_staleness,
        mean_length=sum(lengths) / len(lengths),
    )


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for heading in ("engine", "schedule"):
        table.add_column(heading)
    columns = "bubble,steady,goodput,x sync,rollout s,sync s,decoded,discarded,stale,length"
    for heading in columns.split(","):
        table.add_column(heading, justify="right")
    base = {r.engine: r.goodput for r in reversed(rows) if r.schedule == "sync"}
    for r in rows:
        table.add_row(
            r.engine,
            r.schedule,
            f"{r.bubble:.1%}",
            "-" if r.steady_bubble is None else f"{r.steady_bubble:.1%}",
            f"{r.goodput:,.0f}",
            f"{r.goodput / base[r.engine]:.2f}" if r.engine in base else "-",
            f"{r.rollout_seconds:.1f}",
            f"{r.weight_sync_seconds:.2f}",
            f"{r.decoded:,}",
            f"{r.discarded:,}",
            f"{r.staleness:.2f}",
            f"{r.mean_length:.0f}",
        )
    Console(width=140).print(table)


def parsed() -> argparse.Namespace:
    """The command line."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--engines", nargs="+", default=["native"])
    parser.add_argument("--shape", default="llama-5m", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--median", type=float, default=40.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="schedules by name, such as sync sorted/partial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    given = parsed()
    import torch

    names = {f.name for f in fields(World)} - {"dtype"}
    world = World(
        **{name: value for name, value in vars(given).items() if name in names},
        dtype="bfloat16" if given.device == "cuda" else "float32",
    )
    model = load(world.shape, device=world.device, dtype=world.dtype, seed=world.seed)
    lengths = world.lengths()

    def limit(trajectory: Trajectory) -> int:
        return lengths.length(trajectory, version=0, divergence=None)

    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        engines = {}
        for name in given.engines:
            began = time.perf_counter()
            engines[name] = stack.enter_context(opened_engine(name, model, world, limit=limit))
            print(f"{name}: open after {time.perf_counter() - began:.1f} s", file=sys.stderr)
        warm = Schedule(strategy="sync", group_prompts=world.group, update_batch=world.batch)
        for name, engine in engines.items():
            run(name, engine, model, world, warm)
        for _ in range(given.repeats):
            for schedule in schedules(world):
                if given.only and schedule.name not in given.only:
                    continue
                for name, engine in engines.items():
                    rows.append(run(name, engine, model, world, schedule))
                    print(rows[-1], file=sys.stderr, flush=True)
        show(rows)
    if given.json is not None:
        about = {
            "world": asdict(world),
            "gpu": torch.cuda.get_device_name() if world.device == "cuda" else None,
            "python": platform.python_version(),
            "command": sys.argv,
        }
        given.json.write_text(json.dumps(about | {"rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    main()
