"""Throughput of the native engine compared with transformers and vLLM, in useful tokens per second.

    python benchmarks/engine.py --vllm-python VENV/bin/python       the CPU preset, ten minutes
    python benchmarks/engine.py --peers native generate             without vLLM
    python benchmarks/engine.py --preset h200-tail --json tail.json
    python benchmarks/engine.py --preset h200-small --peers native vllm generate --repeats 1

All engines get the same model, prompts and forced answer lengths. Runs of the native engine and of
the peer alternate, so that noise affects both; each is warmed up first.

    h200-small   SmolLM2-135M shape, bf16, 256 slots, 256 answers of 512 tokens
    h200-tail    the same with 512 long-tailed answers, 891 tokens on average, at most 4,096
    h200-qwen    Qwen2.5-1.5B shape, bf16, 256 slots, 256 answers of 2,048 tokens
    h200-8b      LLaMA-3.1-8B shape, bf16, 128 slots, 128 answers of 1,024 tokens
    h200-8b-64   the same with 64 slots; h200-8b-256: with 256 slots and answers of 512 tokens
    h200-32b     Qwen2.5-32B shape, bf16, 64 slots, 64 answers of 256 tokens, native engine only
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal, get_args

from engine_peers.peer import Peer, Sample, Workload
from engine_peers.vllm import Remote, Vllm, VllmName, serve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine_peers.models import MemoryLimit
    from engine_peers.settings import PeerName, Settings


@dataclass(frozen=True, slots=True)
class Result:
    """The runs of one engine, and the native runs that alternated with them."""

    name: PeerName
    note: str
    samples: Sequence[Sample]
    beside: Sequence[Sample]

    @property
    def rate(self) -> float:
        """Useful tokens per second, the median of the runs."""
        return median(sample.tokens_per_second for sample in self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest run."""
        rates = [sample.tokens_per_second for sample in self.samples]
        return min(rates), max(rates)

    @property
    def ratio(self) -> float | None:
        """Its rate over that of the alternating native runs; `None` if there are none."""
        rates = [sample.tokens_per_second for sample in self.beside]
        return self.rate / median(rates) if rates else None


@contextlib.contextmanager
def saved(model: PreTrainedModel, settings: Settings) -> Iterator[Path]:
    """The model as a folder, for peers that need one; temporary if necessary."""
    if Path(settings.model).is_dir():
        yield Path(settings.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        if settings.with_vllm:
            model.save_pretrained(folder)
        yield Path(folder)


def open_peer(
    name: PeerName, model: PreTrainedModel, workload: Workload, *, folder: Path, settings: Settings
) -> Peer:
    """The engine of that name, with the model loaded."""
    if name == "native":
        from engine_peers.models import cache_bytes
        from engine_peers.native import Native

        return Native(model, workload, cache_bytes=cache_bytes(model, workload))
    if name == "generate":
        from engine_peers.hugging_face import Generate

        return Generate(model, workload)
    if name == "generate_batch":
        from engine_peers.hugging_face import GenerateBatch

        return GenerateBatch(model, workload)
    python = settings.vllm_python
    if python is None and name == "vllm-invariant":
        python = Path(sys.executable)
    if python is None:
        return Vllm(name, folder, workload)
    return Remote(name, folder, workload, python=python)


def compare(
    settings: Settings,
    model: PreTrainedModel,
    workload: Workload,
    *,
    keep: Callable[[Sequence[Result]], None],
) -> list[Result]:
    """Run every engine; the native one stays loaded and alternates with each of the others.

    `keep` gets all results so far after each engine.
    """
    others = [name for name in settings.peers if name != "native"]
    seeds = range(settings.seed, settings.seed + settings.repeats)
    results: list[Result] = []
    with saved(model, settings) as folder:

        def opened(name: PeerName) -> Peer:
            _say(f"{name}: loading and warming up")
            peer = open_peer(name, model, workload, folder=folder, settings=settings)
            peer.warm_up()
            return peer

        ours = opened("native") if "native" in settings.peers else None
        our_samples: list[Sample] = []
        for name in others:
            peer = opened(name)
            samples: list[Sample] = []
            for seed in seeds:
                our_samples += [] if ours is None else [_timed("native", ours, seed)]
                samples.append(_timed(name, peer, seed))
            beside = our_samples[-len(seeds) :]
            results.append(Result(name, peer.note, samples, beside))
            keep([*_ours(ours, our_samples), *results])
            peer.close()
        if ours is not None:
            if not others:
                our_samples += [_timed("native", ours, seed) for seed in seeds]
            results = [*_ours(ours, our_samples), *results]
            keep(results)
            ours.close()
    return results


def _ours(peer: Peer | None, samples: Sequence[Sample]) -> list[Result]:
    return [] if peer is None else [Result("native", peer.note, samples, samples)]


def memory_limit(
    result: Result, model: PreTrainedModel, workload: Workload, *, bandwidth: float
) -> MemoryLimit:
    """The memory-bandwidth limit for the steps of the native engine."""
    from engine_peers import models

    return models.MemoryLimit(
        bandwidth=bandwidth,
        weight_bytes=models.weight_bytes(model),
        token_bytes=models.token_bytes(model),
        steps=round(median(sample.steps or 0 for sample in result.samples)),
        tokens=workload.tokens,
        contexts_read=workload.contexts_read,
    )


def show(results: Sequence[Result], limit: MemoryLimit | None) -> None:
    """Print the table and the notes."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("engine", "tokens/s", "spread", "x native", "occupancy", "log-prob"):
        justify: Literal["left", "right"] = "left" if heading == "engine" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for result in results:
        last = result.samples[-1]
        slowest, fastest = result.spread
        table.add_row(
            result.name,
            f"{result.rate:,.0f}",
            f"{slowest:,.0f}-{fastest:,.0f}",
            "-" if result.ratio is None else f"{result.ratio:.2f}",
            "-" if last.occupancy is None else f"{last.occupancy:.0%}",
            "-" if last.mean_logprob is None else f"{last.mean_logprob:.3f}",
        )
    Console().print(table)
    for result in results:
        print(f"{result.name}: {result.note}")
    if limit is not None:
        share = results[0].rate / limit.tokens_per_second
        print(
            f"memory limit: {limit.tokens_per_second:,.0f} tokens/s at a copy bandwidth of "
            f"{limit.bandwidth / 1e9:,.1f} GB/s; native reaches {share:.0%} of it"
        )


def main() -> None:
    """Measure and print."""
    from engine_peers.settings import parse

    settings = parse(sys.argv[1:], description=__doc__)
    if settings.vllm_python is None and find_spec("vllm") is None and settings.with_vllm:
        raise SystemExit(
            "vllm cannot be imported here: set --vllm-python to an interpreter that has it, or "
            "leave it out of --peers"
        )
    import torch

    from engine_peers import models
    from engine_peers.drawing import described, draw
    from provenance import provenance

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model = models.load(
        settings.model, device=settings.device, dtype=settings.dtype, seed=settings.seed
    )
    workload = draw(settings, vocabulary=model.config.vocab_size)
    facts = provenance(settings.device) | {
        "settings": asdict(settings),
        "workload": described(workload),
    }
    _say(f"{settings.model}: {len(workload.lengths)} answers, {workload.tokens:,} tokens")
    bandwidth = models.copy_bandwidth(settings.device)

    def limit(results: Sequence[Result]) -> MemoryLimit | None:
        if results[0].name != "native":
            return None
        return memory_limit(results[0], model, workload, bandwidth=bandwidth)

    def keep(results: Sequence[Result]) -> None:
        """Write partial results, in case the machine is lost."""
        if settings.json is not None:
            found = _as_json(results, limit(results), bandwidth=bandwidth)
            settings.json.write_text(json.dumps(facts | found, indent=2, default=str) + "\n")

    results = compare(settings, model, workload, keep=keep)
    show(results, limit(results))


def _as_json(
    results: Sequence[Result], limit: MemoryLimit | None, *, bandwidth: float
) -> dict[str, object]:
    return {
        "copy_bandwidth": bandwidth,
        "memory_limit": limit and {**asdict(limit), "tokens_per_second": limit.tokens_per_second},
        "results": [
            asdict(result)
            | {"tokens_per_second": result.rate, "spread": result.spread, "ratio": result.ratio}
            for result in results
        ],
    }


def _timed(name: PeerName, peer: Peer, seed: int) -> Sample:
    sample = peer.run(seed)
    _say(f"{name}: {sample.tokens_per_second:,.0f} tokens/s, {sample.seconds:.1f} s")
    return sample


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(next(name for name in get_args(VllmName) if name == sys.argv[2]))
    else:
        main()
