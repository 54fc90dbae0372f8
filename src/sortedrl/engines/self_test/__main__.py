"""The process of a self-test: starts an engine, tests it, prints a verdict as one line of JSON.

    python -m sortedrl.engines.self_test native
    python -m sortedrl.engines.self_test server http://localhost:8000

Only that line goes to standard output. What engines print goes to standard error.

The scenario covers what a run relies on, in a few seconds:

    8 answers in 4 slots -> interrupt -> new weights -> the same answers to their end -> greedy

Nothing is lost or counted twice, cached tokens are kept, every token has the version that sampled
it and the log-probability of a plain forward pass of that version. The laws of
`sortedrl.engines.conformance` are more thorough, and need an engine created for them.

The weights of the tiny model are larger than usual initial ones, with which all tokens are about
equally likely and wrong weights or a wrong temperature would not show.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from sortedrl.engines.conformance import NonConforming, RolloutDriver, expect, logprob_gap
from sortedrl.engines.generation import RolloutEngine, fresh_trajectories
from sortedrl.engines.installed import KINDS, Kind
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.self_test import STAGE, Verdict, to_line
from sortedrl.engines.servers import connect_server, served_vocabulary
from sortedrl.engines.streaming.backend import Backend, ServerRequirements
from sortedrl.errors import SortedRLError
from sortedrl.models.attention_interface import best_logprobs, plain_logprobs
from sortedrl.models.loading import without_bars
from sortedrl.models.tiny import tiny_model, tiny_settings, tiny_tokenizer
from sortedrl.types import Trajectory, Weights

# A head dimension of 32: the smallest of vLLM's attention on a CPU.
SPEC = "tiny:hidden=64,heads=2,layers=2"
_SPREAD = 0.1
SLOTS = 4
MAX_TOKENS = 64
CONTEXT = 128
# Neither 1 nor 0, so that log-probabilities before temperature do not pass.
SAMPLING = Sampling(temperature=0.8)
_PROMPTS = 8
_PROMPT_TOKENS = (3, 20)
_TOKENS_BEFORE_INTERRUPTION = 16
_INTERRUPTIONS = 5
_GREEDY_PROMPTS = 4
_GREEDY_TOKENS = 16
_MOST_NATS = {torch.float32: 0.01, torch.bfloat16: 0.25}
"""Kernels differ by less; other weights or another temperature differ by far more."""
_CACHE_BYTES = 64 << 20

Stage = Callable[[str], None]


def main(arguments: Sequence[str]) -> int:
    """Test the engine that the arguments name."""
    # A model this small is slower on several threads.
    torch.set_num_threads(1)
    with _own_output() as output:
        try:
            verdict = (
                _server(arguments[1]) if arguments[0] == "server" else _engine(_kind(arguments[0]))
            )
        except SortedRLError as error:
            verdict = Verdict(reason=str(error))
        os.write(output, f"{to_line(verdict)}\n".encode())
    return 0


def _engine(kind: Kind) -> Verdict:
    device = default_device()
    dtype = default_dtype(device)
    with TemporaryDirectory() as folder:
        _stage("creating a tiny model")
        models = made_pair(device=device, dtype=dtype)
        write_model(models.before, Path(folder))
        _stage("starting the engine")
        engine = start_engine(kind, Path(folder), device=device, dtype=dtype)
        try:
            return _verdict(engine, check(engine, models, stage=_stage))
        finally:
            _stage("closing the engine")
            engine.close()


def _server(url: str) -> Verdict:
    _stage("inspecting the server")
    vocabulary = asyncio.run(served_vocabulary(url))
    with TemporaryDirectory() as folder:
        engine = connected_engine(url, vocabulary=vocabulary, weights_folder=Path(folder))
        try:
            return _verdict(engine, check_as_it_is(engine, vocabulary=vocabulary, stage=_stage))
        finally:
            engine.close()


def _verdict(engine: RolloutEngine, figures: Measurements) -> Verdict:
    return Verdict(
        reason=None,
        name=engine.name,
        slots=engine.slots,
        largest_gap=figures.largest_gap,
        tokens_per_second=figures.tokens_per_second,
    )


def _kind(name: str) -> Kind:
    (kind,) = [kind for kind in KINDS if kind == name]
    return kind


def _stage(what: str) -> None:
    sys.stderr.write(f"{STAGE}{what}\n")
    sys.stderr.flush()


@contextmanager
def _own_output() -> Iterator[int]:
    """Reserve standard output for the verdict: other output goes to standard error."""
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield output
    finally:
        os.close(output)


def default_device() -> torch.device:
    """The default device of engines."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """The default precision on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def start_engine(
    kind: Kind, model: Path, *, device: torch.device, dtype: torch.dtype
) -> RolloutEngine:
    """An engine of this kind with the model in a folder; it has no stop tokens."""
    if kind == "native":
        return _native(model, device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    if kind == "vllm":
        from sortedrl.engines.vllm.vllm_process import VllmProcess

        return _streamed(
            lambda: VllmProcess.start(
                model=str(model),
                slots=SLOTS,
                context=CONTEXT,
                dtype=name,
                options={"kv_cache_memory_bytes": _CACHE_BYTES, "enforce_eager": True},
            )
        )
    from sortedrl.engines.sglang.sglang_process import SglangProcess

    return _streamed(
        lambda: SglangProcess.start(
            model=str(model),
            slots=SLOTS,
            context=CONTEXT,
            dtype=name,
            seed=0,
            memory_share=None,
            device=device.type,
            options={"max_total_tokens": 2 * SLOTS * CONTEXT, "disable_cuda_graph": True},
        )
    )


def connected_engine(url: str, *, vocabulary: int, weights_folder: Path) -> RolloutEngine:
    """A running server; nothing is written to the weights folder."""
    required = ServerRequirements(
        vocabulary=vocabulary, context=CONTEXT, temperature=SAMPLING.temperature
    )
    return _streamed(lambda: connect_server(url, required, weights_folder=weights_folder))


def _native(model: Path, *, device: torch.device, dtype: torch.dtype) -> RolloutEngine:
    from sortedrl.engines.native import NativeEngine
    from sortedrl.models.loading import load_model

    return NativeEngine(
        load_model(model, dtype=dtype, device=device),
        slots=SLOTS,
        max_tokens=MAX_TOKENS,
        sampling=SAMPLING,
        stop_tokens=(),
        cache_bytes=_CACHE_BYTES,
    )


def _streamed(opening: Callable[[], Coroutine[Any, Any, Backend]]) -> RolloutEngine:
    from sortedrl.engines.streaming.streamed_engine import StreamedEngine

    return StreamedEngine(opening, max_tokens=MAX_TOKENS, stop_tokens=(), sampling=SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The model under two versions of its weights."""

    before: PreTrainedModel
    after: PreTrainedModel

    @property
    def vocabulary(self) -> int:
        """Token ids lie below."""
        vocabulary: int = self.before.config.vocab_size
        return vocabulary


def made_pair(*, device: torch.device, dtype: torch.dtype) -> Pair:
    """The two models, on the default device and in the default precision of engines."""
    return Pair(
        before=_made(0, device=device, dtype=dtype), after=_made(1, device=device, dtype=dtype)
    )


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that every engine can load."""
    with without_bars():
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)


def _made(seed: int, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    model = tiny_model(tiny_settings(SPEC))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, _SPREAD, generator=generator)
    torch.nn.Module.to(model, device, dtype)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of a self-test."""

    tokens_per_second: float
    largest_gap: float | None


def check(engine: RolloutEngine, models: Pair, *, stage: Stage) -> Measurements:
    """Test an engine that has the model before the update."""
    stage("generating answers")
    first, new = engine.version, engine.version + 1
    rollout = RolloutDriver(engine)

    def hand_over() -> None:
        stage("loading new weights")
        engine.load_weights(Weights(new, models.after.state_dict()))
        expect(engine.version == new, f"it must report version {new}, got {engine.version}")

    answers = _written(
        engine, rollout, vocabulary=models.vocabulary, between=hand_over, versions=(first, new)
    )
    stage("greedy decoding")
    greedy = _written_greedily(engine, models)
    stage("comparing with a plain forward pass")
    most = _MOST_NATS[models.before.dtype]
    gap = _gap(answers, models.before, version=first)
    expect(
        gap <= most,
        f"its log-probabilities are {gap:.2g} nats off a plain forward pass at temperature "
        f"{SAMPLING.temperature:g} (at most {most:g})",
    )
    gap_after = _gap(answers, models.after, version=new)
    expect(
        gap_after <= most,
        f"after new weights its log-probabilities are {gap_after:.2g} nats off a plain forward "
        f"pass with them (at most {most:g}): it uses other weights, or a stale cache",
    )
    gap_greedy = _check_greedy(greedy, models.after, most=most)
    return Measurements(
        tokens_per_second=rollout.decoded_tokens / rollout.seconds,
        largest_gap=max(gap, gap_after, gap_greedy),
    )


def check_as_it_is(engine: RolloutEngine, *, vocabulary: int, stage: Stage) -> Measurements:
    """Test an engine whose weights are unknown and must not change."""
    stage("generating answers")
    rollout = RolloutDriver(engine)
    versions = (engine.version, engine.version)
    _written(engine, rollout, vocabulary=vocabulary, between=lambda: None, versions=versions)
    return Measurements(
        tokens_per_second=rollout.decoded_tokens / rollout.seconds, largest_gap=None
    )


def _written(
    engine: RolloutEngine,
    rollout: RolloutDriver,
    *,
    vocabulary: int,
    between: Callable[[], None],
    versions: tuple[int, int],
) -> list[Trajectory]:
    """Generate complete answers with interruptions, and check everything that needs no model."""
    answers: list[Trajectory] = []
    for attempt in range(_INTERRUPTIONS):
        finished, stopped = _interrupted(engine, rollout, vocabulary=vocabulary, attempt=attempt)
        # A fast engine may complete all of them before the interrupt.
        is_in_the_middle = any(0 < t.num_tokens < MAX_TOKENS for t in stopped)
        if is_in_the_middle:
            between()
        rollout.submit(stopped)
        resumed = {trajectory.key: trajectory for trajectory in rollout.to_end()}
        for before in stopped:
            now = versions[1] if is_in_the_middle else versions[0]
            _check_resumed(before, resumed[before.key], versions=(versions[0], now))
        answers += [*finished, *resumed.values()]
        if is_in_the_middle:
            break
    else:
        raise NonConforming(
            f"it was interrupted {_INTERRUPTIONS} times, but never returned an answer that was "
            "started and incomplete"
        )
    for answer in answers:
        _check_complete(answer, vocabulary=vocabulary)
    written = sum(answer.num_tokens for answer in answers)
    expect(
        written == rollout.decoded_tokens,
        f"it reported {rollout.decoded_tokens} tokens, but its answers have {written}",
    )
    return answers


def _interrupted(
    engine: RolloutEngine, rollout: RolloutDriver, *, vocabulary: int, attempt: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Answers that were complete when the engine was stopped, and those that were not."""
    prompts = _prompts(_PROMPTS, vocabulary)
    asked = fresh_trajectories(prompts, samples_per_prompt=1, seed=attempt)
    rollout.submit(asked)
    finished = rollout.until(_TOKENS_BEFORE_INTERRUPTION >> attempt)
    return finished, rollout.interrupt()


def _written_greedily(engine: RolloutEngine, models: Pair) -> list[Trajectory]:
    greedy = RolloutDriver(engine)
    prompts = _prompts(_GREEDY_PROMPTS, models.vocabulary)
    greedy.submit(
        fresh_trajectories(prompts, samples_per_prompt=1, seed=1),
        Sampling(temperature=0, max_tokens=_GREEDY_TOKENS),
    )
    return greedy.to_end()


def _check_resumed(before: Trajectory, after: Trajectory, *, versions: tuple[int, int]) -> None:
    kept = before.num_tokens
    expect(
        after.tokens[:kept] == before.tokens and after.logprobs[:kept] == before.logprobs,
        f"answer {before.key} lost some of its {kept} tokens when it was resumed",
    )
    stamped = [segment.version for segment in after.segments for _ in segment.tokens]
    old, new = versions
    expect(
        stamped == [old] * kept + [new] * (after.num_tokens - kept),
        f"answer {before.key} has tokens with the version of other weights",
    )


def _check_complete(answer: Trajectory, *, vocabulary: int) -> None:
    expect(
        answer.num_tokens == MAX_TOKENS and answer.finish_reason == "length",
        f"answer {answer.key} must end at {MAX_TOKENS} tokens, it ended at {answer.num_tokens} "
        f"({answer.finish_reason})",
    )
    expect(
        all(0 <= token < vocabulary for token in answer.tokens),
        f"answer {answer.key} has token ids outside the vocabulary of {vocabulary}",
    )
    worst = max(answer.logprobs)
    expect(
        worst <= 1e-3 and all(math.isfinite(logprob) for logprob in answer.logprobs),
        f"answer {answer.key} has impossible log-probabilities, up to {worst:.2g}",
    )


def _gap(answers: Sequence[Trajectory], model: PreTrainedModel, *, version: int) -> float:
    """The largest difference to the model over the tokens of a version."""
    models = {version: model}
    gaps = [logprob_gap(a, models, temperature=SAMPLING.temperature) for a in answers]
    return max(gaps, default=0.0)


def _check_greedy(answers: Sequence[Trajectory], model: PreTrainedModel, *, most: float) -> float:
    """Each token must be the model's best one; returns the largest gap of log-probabilities."""
    gap = 0.0
    for answer in answers:
        text = [*answer.prompt.tokens, *answer.tokens]
        after = len(answer.prompt.tokens)
        plain_T = plain_logprobs(model, text, after=after)
        # Rounding may decide between two almost equal tokens.
        short_T = best_logprobs(model, text, after=after) - plain_T
        expect(
            short_T.max().item() <= most,
            "with greedy decoding it must write the most likely token under the new weights, but "
            f"token {int(short_T.argmax())} of answer {answer.key} is {short_T.max():.2g} nats "
            "worse",
        )
        gap = max(gap, (plain_T - torch.tensor(answer.logprobs)).abs().max().item())
    expect(
        gap <= most,
        f"with greedy decoding its log-probabilities are {gap:.2g} nats off those of temperature 1 "
        f"(at most {most:g})",
    )
    return gap


def _prompts(count: int, vocabulary: int) -> list[list[int]]:
    random = Random(count)
    return [
        [random.randrange(vocabulary) for _ in range(random.randint(*_PROMPT_TOKENS))]
        for _ in range(count)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
