"""Whether coupled mode can be had in vLLM: what comes out exactly, and what it costs.

    python benchmarks/coupled_outside.py                          minutes on two cores
    python benchmarks/coupled_outside.py --model FOLDER --json result.json

Run it with a Python that has vLLM (its CPU build will do) and with `src` on PYTHONPATH. A tiny
random Llama in fp32 writes answers in our engine and in vLLM, where a logits processor brings our
noise into greedy decoding. Then the weights change, and the cached tokens are verified: by our
engine, and from vLLM's prompt log-probabilities with the noise added on the host. Costs are
measured on the tiny model and on FOLDER, a model with a real vocabulary.

With only the k largest log-probabilities, a token outside them can still win by its noise. Where
some noise is large enough for that the verdict is open, and the answer is cut there: this stays
exact, because what follows is written again with the same noise.

Axes: P cached positions of one answer, V tokens of the vocabulary, R rows of a batch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.engines.generation import fresh_trajectories, run_to_end
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.engines.native.noise import exponential, gumbel, row_keys, stream, words
from sortedrl.engines.native.sampling import Draw, choose
from sortedrl.models.loading import load_tokenizer
from sortedrl.types import Segment, Trajectory

ANSWER_TOKENS = 64
PROMPT_TOKENS = 16
ALL = -1
QUESTIONS = (
    "A farmer has 17 sheep and buys 25 more. How many sheep has he now?",
    "What is the sum of the first ten odd numbers?",
    "A train goes 60 miles in an hour. How far does it go in 90 minutes?",
    "Which is larger, three quarters or five sevenths?",
    "Anna is twice as old as Ben, and together they are 36. How old is Ben?",
    "How many prime numbers lie between 10 and 30?",
    "A shirt costs 40 dollars after a discount of 20 percent. What was its price?",
    "If it takes 5 machines 5 minutes to make 5 parts, how long do 100 machines need for 100?",
)
SEEN: dict[tuple[int, int], float] = {}
"""Log-probabilities at the sampling temperature by (stream, position), from inside the processor:
vLLM itself reports them before the temperature, or with the noise in them."""
GAPS: dict[tuple[int, int], float] = {}
"""By how many nats a cached token fell short, by (stream, position), from inside the worker."""


@dataclass(slots=True)
class Row:
    """What the processor knows of a request: its noise, and how much of its answer is cached."""

    stream: int
    cached: int
    inverse_temperature: float
    output: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a vLLM engine batches."""

    with_noise: bool = True
    slots: int = 64
    batched_tokens: int | None = None
    prefix_caching: bool = True
    policy: str = "fcfs"
    logprobs_mode: str = "raw_logprobs"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    what: str
    value: float
    unit: str
    note: str = ""


@cache
def processor_class() -> Any:  # noqa: ANN401
    """A logits processor of vLLM's that makes greedy decoding our exact sampling."""
    interface: Any = importlib.import_module("vllm.v1.sample.logits_processor")
    builtin: Any = importlib.import_module("vllm.v1.sample.logits_processor.builtin")

    class KeyedNoise(interface.LogitsProcessor):  # type: ignore[misc]
        """Turns logits into the race our engine runs; the largest number wins."""

        def __init__(self, vllm_config: object, device: object, is_pin_memory: bool) -> None:
            """No request yet."""
            self._rows: dict[int, Row] = {}

        def is_argmax_invariant(self) -> bool:
            """It changes what greedy decoding takes; that is its purpose."""
            return False

        def update_state(self, batch_update: object) -> None:
            """Follow the requests as they come, move and go."""
            builtin.process_dict_updates(self._rows, batch_update, self._row)

        def apply(self, logits: Tensor) -> Tensor:
            """The race in place of the logits, for the rows that brought a stream."""
            index = sorted(self._rows)
            if index:
                logits[index] = _race([self._rows[i] for i in index], logits[index])
            return logits

        @staticmethod
        def _row(rules: Any, prompt: object, output: list[int]) -> Row | None:  # noqa: ANN401
            return Row(**rules.extra_args, output=output) if rules.extra_args else None

    return KeyedNoise


def _race(rows: Sequence[Row], logits_RV: Tensor) -> Tensor:
    """`exp(logit / temperature) / exponential noise`, step for step as our engine has it."""
    positions = [row.cached + len(row.output) for row in rows]
    scaled_RV = logits_RV * torch.tensor([row.inverse_temperature for row in rows])[:, None]
    best_R1 = scaled_RV.amax(-1, keepdim=True)
    race_RV = (scaled_RV - best_R1).exp_()
    totals_R = race_RV.sum(-1)
    keys_R = row_keys(torch.tensor([row.stream for row in rows]), torch.tensor(positions))
    race_RV /= exponential(words(keys_R, torch.arange(logits_RV.shape[1])))
    chosen_R1 = race_RV.argmax(-1, keepdim=True)
    logprobs_R = (scaled_RV.gather(-1, chosen_R1) - best_R1)[:, 0] - totals_R.log()
    for row, position, logprob in zip(rows, positions, logprobs_R.tolist(), strict=True):
        SEEN[row.stream, position] = logprob
    return race_RV


@contextmanager
def vllm_engine(folder: Path, setting: Setting, *, draft: str | None = None) -> Iterator[Any]:
    """A vLLM engine in this process, gone at the end."""
    vllm: Any = importlib.import_module("vllm")
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    llm = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=setting.slots,
        max_num_batched_tokens=setting.batched_tokens,
        enable_prefix_caching=setting.prefix_caching,
        scheduling_policy=setting.policy,
        logprobs_mode=setting.logprobs_mode,
        max_logprobs=ALL,
        enforce_eager=True,
        distributed_executor_backend="uni",
        logits_processors=[processor_class()] if setting.with_noise else None,
        speculative_config={"method": draft, "num_speculative_tokens": 4} if draft else None,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        state.cleanup_dist_env_and_memory()
        gc.collect()


def ask(
    llm: Any,  # noqa: ANN401
    trajectories: Sequence[Trajectory],
    *,
    temperature: float = 1.0,
    with_noise: bool = True,
    is_seeded: bool = False,
    prompt_logprobs: int | None = None,
    new_tokens: int | None = None,
) -> list[Any]:
    """Outputs of vLLM, in order; cached tokens travel as part of the prompt.

    With our noise decoding is greedy; without it vLLM samples, with a seed of the answer's own if
    `is_seeded`.
    """
    vllm: Any = importlib.import_module("vllm")
    prompts = [{"prompt_token_ids": [*t.prompt.tokens, *t.tokens]} for t in trajectories]
    rules = [
        vllm.SamplingParams(
            max_tokens=new_tokens or ANSWER_TOKENS - t.num_tokens,
            temperature=0.0 if with_noise else temperature,
            seed=stream(t.seed, t.attempt) & 0x7FFFFFFF if is_seeded else None,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            prompt_logprobs=prompt_logprobs,
            extra_args={
                "stream": stream(t.seed, t.attempt),
                "cached": t.num_tokens,
                "inverse_temperature": 1 / temperature,
            }
            if with_noise
            else None,
        )
        for t in trajectories
    ]
    outputs: list[Any] = llm.generate(prompts, rules, use_tqdm=False)
    return outputs


def written(trajectory: Trajectory, output: Any, *, version: int = 0) -> Trajectory:  # noqa: ANN401
    """The trajectory with what vLLM wrote to it."""
    tokens = tuple(output.outputs[0].token_ids)
    logprobs = tuple(output.outputs[0].logprobs.logprobs)
    segment = Segment(tokens, logprobs[: len(tokens)], version)
    return replace(trajectory, segments=(*trajectory.segments, segment))


def kept_tokens(
    trajectory: Trajectory,
    output: Any,  # noqa: ANN401
    *,
    vocabulary: int,
) -> tuple[int, bool]:
    """How many cached tokens stand under the new log-probabilities, and whether all were known.

    The bound: a token outside the candidates has at most the least log-probability among them.
    """
    flat = output.prompt_logprobs
    tokens = trajectory.tokens
    first = len(trajectory.prompt.tokens)
    keys_P = row_keys(
        torch.full((len(tokens),), stream(trajectory.seed, trajectory.attempt)),
        torch.arange(len(tokens)),
    )
    noise_PV = gumbel(keys_P, torch.arange(vocabulary))
    for index, token in enumerate(tokens):
        span = slice(flat.start_indices[first + index], flat.end_indices[first + index])
        ids_K = torch.tensor(flat.token_ids[span])
        logprobs_K = torch.tensor(flat.logprobs[span])
        bounds_V = torch.full((vocabulary,), logprobs_K[1:].min().item())
        bounds_V[ids_K] = logprobs_K
        perturbed_V = bounds_V + noise_PV[index]
        winner = int(perturbed_V.argmax())
        if winner != token:
            return index, winner in ids_K
    return len(tokens), True


def watch_prompt_pass(worker: Any, *, is_on: bool = True) -> None:  # noqa: ANN401
    """Compare cached tokens with the choice inside the worker.

    It replaces a private method of vLLM's model runner, which other versions may not have.
    """
    runner = worker.model_runner
    original = type(runner)._get_prompt_logprobs_dict

    def hooked(hidden: Tensor, scheduled: dict[str, int]) -> object:
        for request_id in runner.num_prompt_logprobs:
            if request_id in scheduled:
                _compare(runner, runner.requests[request_id], hidden, scheduled[request_id])
        return original(runner, hidden, scheduled)

    runner._get_prompt_logprobs_dict = hooked if is_on else original.__get__(runner)


def _compare(runner: Any, request: Any, hidden: Tensor, scheduled: int) -> None:  # noqa: ANN401
    tokens = request.prompt_token_ids
    facts = request.sampling_params.extra_args
    answer_start = len(tokens) - facts["cached"]
    start = request.num_computed_tokens
    after = range(max(start + 1, answer_start), min(start + scheduled, len(tokens) - 1) + 1)
    if not after:
        return
    index = runner.input_batch.req_id_to_index[request.req_id]
    offset = int(runner.query_start_loc.np[index]) - start - 1
    logits_PV = runner.model.compute_logits(hidden[offset + after.start : offset + after.stop])
    positions = [place - answer_start for place in after]
    draw = Draw(
        streams_Q=torch.full((len(after),), facts["stream"]),
        positions_Q=torch.tensor(positions),
        inverse_temperatures_Q=torch.full((len(after),), facts["inverse_temperature"]),
        expected_Q=torch.tensor(tokens[after.start : after.stop]),
    )
    gaps = choose(logits_PV.float(), draw).gaps_Q.tolist()
    GAPS.update({(facts["stream"], p): gap for p, gap in zip(positions, gaps, strict=True)})


def kept_in_worker(trajectory: Trajectory) -> int:
    """How many cached tokens stand by the gaps the worker found."""
    key = stream(trajectory.seed, trajectory.attempt)
    gaps = [GAPS[key, position] for position in range(trajectory.num_tokens)]
    return next((p for p, gap in enumerate(gaps) if gap > 0), len(gaps))


def native_answers(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    *,
    temperature: float = 1.0,
    version: int = 0,
) -> list[Trajectory]:
    """What our own engine writes, or makes of cached tokens."""
    engine = NativeEngine(
        model,
        slots=64,
        max_tokens=ANSWER_TOKENS,
        sampling=Sampling(temperature=temperature),
        stop_tokens=(),
        version=version,
        cache_bytes=1 << 28,
    )
    engine.submit(trajectories, tolerance=0.0)
    return run_to_end(engine, [t.key for t in trajectories], show_progress=False)


def tiny_model(vocabulary: int, *, update: float = 0.0) -> PreTrainedModel:
    """A random Llama with opinions; `update` moves every weight a little, as training would."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(update * torch.randn_like(weight))
    return model


def same_answers(ones: Sequence[Trajectory], others: Sequence[Trajectory]) -> int:
    """How many answers are equal, token for token."""
    return sum(one.tokens == other.tokens for one, other in zip(ones, others, strict=True))


def logprob_difference(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The largest difference, in nats."""
    return max(
        abs(a - b)
        for one, other in zip(ones, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The tiny model before and after an update, and the answers to be written."""

    old: PreTrainedModel
    new: PreTrainedModel
    old_folder: Path
    new_folder: Path
    trajectories: Sequence[Trajectory]


def make_world(folder: Path, *, answers: int, vocabulary: int = 128) -> World:
    """Models on disk and prompts."""
    old, new = tiny_model(vocabulary), tiny_model(vocabulary, update=1e-4)
    old.save_pretrained(folder / "old")
    new.save_pretrained(folder / "new")
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(vocabulary, (answers // 4, PROMPT_TOKENS), generator=generator)
    return World(
        old=old,
        new=new,
        old_folder=folder / "old",
        new_folder=folder / "new",
        trajectories=fresh_trajectories(prompts.tolist(), samples_per_prompt=4, seed=0),
    )


def study_decode(world: World) -> Iterator[Finding]:
    """Whether vLLM writes our engine's answers, at two temperatures and in two batchings."""
    fresh = world.trajectories
    with vllm_engine(world.old_folder, Setting()) as llm:
        for temperature in (1.0, 0.7):
            ours = native_answers(world.old, fresh, temperature=temperature)
            SEEN.clear()
            outputs = ask(llm, fresh, temperature=temperature)
            theirs = [written(t, o) for t, o in zip(fresh, outputs, strict=True)]
            note = f"temperature {temperature}"
            yield Finding("answers equal to native", same_answers(ours, theirs), "answers", note)
            equal = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.tokens == b.tokens]
            seen = [[SEEN[stream(a.seed, 0), p] for p in range(a.num_tokens)] for a, _ in equal]
            native = [a.logprobs for a, _ in equal]
            reported = logprob_difference(native, [b.logprobs for _, b in equal])
            yield Finding("log-probability as vLLM reports it", reported, "nats off", note)
            inside = logprob_difference(native, seen)
            yield Finding("log-probability from the processor", inside, "nats off", note)
        base = [written(t, o) for t, o in zip(fresh, ask(llm, fresh), strict=True)]
    other = Setting(slots=7, batched_tokens=32, prefix_caching=False)
    with vllm_engine(world.old_folder, other) as llm:
        outputs = ask(llm, fresh[::-1])[::-1]
    again = [written(t, o) for t, o in zip(fresh, outputs, strict=True)]
    note = "7 slots, chunks of 32, reversed order"
    yield Finding("answers equal in another batching", same_answers(base, again), "answers", note)
    pairs = [
        a == b
        for one, two in zip(base, again, strict=True)
        if one.tokens == two.tokens
        for a, b in zip(one.logprobs, two.logprobs, strict=True)
    ]
    yield Finding("log-probabilities equal to the bit", sum(pairs) / len(pairs), "share", note)


def study_verification(world: World) -> Iterator[Finding]:
    """Whether the prompt pass gives our verdict, and the resumed answer is the true one."""
    fresh = world.trajectories
    with vllm_engine(world.old_folder, Setting()) as llm:
        cached = [written(t, o) for t, o in zip(fresh, ask(llm, fresh), strict=True)]
        for k in (ALL, 20):
            yield from _verdicts(llm, cached, k=k, note=f"unchanged weights, k = {k}")
    native = native_answers(world.new, cached, version=1)
    tokens = ANSWER_TOKENS * len(cached)
    fell = [n.decoded_tokens - c.decoded_tokens for n, c in zip(native, cached, strict=True)]
    share = 1 - sum(fell) / tokens
    yield Finding("cached tokens kept", share, "share", "changed weights, native engine")
    native_kept = [ANSWER_TOKENS - count for count in fell]
    settings = {
        "": Setting(),
        ", priority, chunks of 32, no prefix cache": Setting(
            slots=7, batched_tokens=32, prefix_caching=False, policy="priority"
        ),
    }
    for words_of_setting, setting in settings.items():
        with vllm_engine(world.new_folder, setting) as llm:
            truth = [written(t, o) for t, o in zip(fresh, ask(llm, fresh), strict=True)]
            for k in (ALL, 20):
                note = f"changed weights, k = {k}{words_of_setting}"
                yield from _verdicts(llm, cached, k=k, note=note, truth=truth, native=native_kept)
            llm.collective_rpc(watch_prompt_pass)
            ask(llm, cached, prompt_logprobs=0, new_tokens=1)
            same = sum(kept_in_worker(t) == n for t, n in zip(cached, native_kept, strict=True))
            note = f"changed weights, in the worker{words_of_setting}"
            yield Finding("same verdict as native", same, "answers", note)
    yield Finding("redecoded answers equal to native's", same_answers(truth, native), "answers")


def study_seeds(world: World) -> Iterator[Finding]:
    """What vLLM's own seeds give: an answer that is redrawn with the randomness it had."""
    fresh = world.trajectories
    # Not in chunks: a seeded request whose prompt is cut ends the CPU engine of vLLM 0.32.
    other = Setting(with_noise=False, slots=7, prefix_caching=False)
    with vllm_engine(world.old_folder, Setting(with_noise=False)) as llm:
        old = _seeded(llm, fresh)
        redrawn = _seeded(llm, [replace(t, attempt=1) for t in fresh])
    with vllm_engine(world.old_folder, other) as llm:
        again = _seeded(llm, fresh[::-1])[::-1]
    with vllm_engine(world.new_folder, Setting(with_noise=False)) as llm:
        new = _seeded(llm, fresh)
    yield Finding("answers equal in another batching", same_answers(old, again), "answers", "seeds")
    for note, answers in (("same seed, changed weights", new), ("another seed", redrawn)):
        yield Finding("common beginning with the old answer", _common(old, answers), "share", note)


def _seeded(llm: Any, trajectories: Sequence[Trajectory]) -> list[Trajectory]:  # noqa: ANN401
    outputs = ask(llm, trajectories, with_noise=False, is_seeded=True)
    return [written(t, o) for t, o in zip(trajectories, outputs, strict=True)]


def _common(ones: Sequence[Trajectory], others: Sequence[Trajectory]) -> float:
    """The share of the tokens before the first that differs."""
    both = [zip(a.tokens, b.tokens, strict=True) for a, b in zip(ones, others, strict=True)]
    count = sum(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], one)) for one in both)
    return count / (ANSWER_TOKENS * len(ones))


def _verdicts(
    llm: Any,  # noqa: ANN401
    cached: Sequence[Trajectory],
    *,
    k: int,
    note: str,
    truth: Sequence[Trajectory] | None = None,
    native: Sequence[int] | None = None,
) -> Iterator[Finding]:
    outputs = ask(llm, cached, prompt_logprobs=k, new_tokens=1)
    verdicts = [kept_tokens(t, o, vocabulary=128) for t, o in zip(cached, outputs, strict=True)]
    kept = sum(count for count, _ in verdicts)
    yield Finding("cached tokens kept", kept / (len(cached) * ANSWER_TOKENS), "share", note)
    still_open = sum(not is_known for _, is_known in verdicts)
    yield Finding("answers cut where the verdict was open", still_open, "answers", note)
    if native is not None:
        same = sum(count == n for (count, _), n in zip(verdicts, native, strict=True))
        yield Finding("same verdict as native", same, "answers", note)
    if truth is not None:
        cut = [_cut(t, count) for t, (count, _) in zip(cached, verdicts, strict=True)]
        unfinished = [t for t in cut if t.num_tokens < ANSWER_TOKENS]
        resumed = {
            t.key: written(t, o, version=1)
            for t, o in zip(unfinished, ask(llm, unfinished), strict=True)
        }
        result = [resumed.get(t.key, t) for t in cut]
        yield Finding("resumed equals written anew", same_answers(result, truth), "answers", note)


def _cut(trajectory: Trajectory, count: int) -> Trajectory:
    segment = Segment(tuple(trajectory.tokens[:count]), tuple(trajectory.logprobs[:count]), 0)
    return replace(trajectory, segments=(segment,) if count else ())


def study_costs(folder: Path, prompts: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """Tokens per second with and without noise; seconds and bytes of a verified token."""
    vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    answers = len(prompts)
    fresh = fresh_trajectories(prompts, samples_per_prompt=1, seed=0)
    note = f"vocabulary {vocabulary:,}"
    ways = {
        "decoding, vLLM's sampler": {"with_noise": False},
        "decoding, vLLM's sampler with a seed per answer": {"with_noise": False, "is_seeded": True},
        "decoding, our noise in a logits processor": {"with_noise": True},
    }
    with vllm_engine(folder, Setting(slots=answers)) as llm:
        ask(llm, fresh)
        for name, way in ways.items():
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                outputs = ask(llm, fresh, **way)
                seconds.append(time.perf_counter() - began)
            yield Finding(name, answers * ANSWER_TOKENS / min(seconds), "tokens/s", note)
        cached = [written(t, o) for t, o in zip(fresh, outputs, strict=True)]
        ask(llm, cached, prompt_logprobs=0, new_tokens=1)
        yield from _worker_costs(llm, cached, note=note)
        yield from _verification_costs(llm, cached, vocabulary=vocabulary)


def _verification_costs(
    llm: Any,  # noqa: ANN401
    cached: Sequence[Trajectory],
    *,
    vocabulary: int,
) -> Iterator[Finding]:
    for k in (0, 20, 256, 2048, ALL):
        if k > vocabulary:
            continue
        few = cached[:2] if k == ALL and vocabulary > 10_000 else cached
        rows = sum(len(t.prompt.tokens) + t.num_tokens for t in few)
        note = f"vocabulary {vocabulary:,}, k = {'all' if k == ALL else k}"
        before = _resident_bytes()
        began = time.perf_counter()
        outputs = ask(llm, few, prompt_logprobs=k, new_tokens=1)
        seconds = time.perf_counter() - began
        yield Finding("prompt pass", 1e3 * seconds / rows, "ms/token", note)
        if k == ALL:
            held = (_resident_bytes() - before) / rows
            yield Finding("memory peak raised on the host by", held, "bytes/token", note)
            yield Finding("sent by the worker", 8.0 * (vocabulary + 1), "bytes/token", note)
        if k:
            began = time.perf_counter()
            verdicts = [
                kept_tokens(t, o, vocabulary=vocabulary) for t, o in zip(few, outputs, strict=True)
            ]
            each = 1e3 * (time.perf_counter() - began) / (len(few) * ANSWER_TOKENS)
            yield Finding("noise and verdict on the host", each, "ms/token", note)
            share = sum(count for count, _ in verdicts) / (len(few) * ANSWER_TOKENS)
            yield Finding("cached tokens kept, unchanged weights", share, "share", note)
            still_open = sum(not is_known for _, is_known in verdicts) / len(few)
            yield Finding("answers cut where the verdict was open", still_open, "share", note)
        del outputs
        gc.collect()


def _worker_costs(
    llm: Any,  # noqa: ANN401
    cached: Sequence[Trajectory],
    *,
    note: str,
) -> Iterator[Finding]:
    llm.collective_rpc(watch_prompt_pass)
    began = time.perf_counter()
    ask(llm, cached, prompt_logprobs=0, new_tokens=1)
    seconds = time.perf_counter() - began
    rows = sum(len(t.prompt.tokens) + t.num_tokens for t in cached)
    what = "prompt pass with the verdict in the worker"
    yield Finding(what, 1e3 * seconds / rows, "ms/token", note)
    share = sum(map(kept_in_worker, cached)) / (len(cached) * ANSWER_TOKENS)
    yield Finding("cached tokens kept, unchanged weights", share, "share", f"{note}, in the worker")
    llm.collective_rpc(watch_prompt_pass, kwargs={"is_on": False})


def _resident_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def study_drafts(world: World) -> Iterator[Finding]:
    """Whether vLLM takes a logits processor together with speculative decoding."""
    try:
        with vllm_engine(world.old_folder, Setting(), draft="ngram"):
            yield Finding("logits processor with speculative decoding", 1, "accepted")
    except ValueError as refusal:
        reason = str(refusal).strip().splitlines()[-1]
        yield Finding("logits processor with speculative decoding", 0, "accepted", reason)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--model", type=Path, help="a model for the costs of a real vocabulary")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder), answers=settings.answers)
        studies = [
            study_decode(world),
            study_verification(world),
            study_seeds(world),
            study_costs(world.old_folder, [t.prompt.tokens for t in world.trajectories[:64]]),
        ]
        if settings.model is not None:
            tokenizer = load_tokenizer(settings.model)
            texts = [
                f"Question: {question}\nAnswer: Let us think step by step."
                for question in QUESTIONS
            ]
            studies.append(
                study_costs(settings.model, [tokenizer(text)["input_ids"] for text in texts])
            )
        # Last, because a refused engine leaves vLLM unable to start another in this process.
        studies.append(study_drafts(world))
        for study in studies:
            for finding in study:
                findings.append(finding)
                print(
                    f"{finding.what:44} {finding.value:>14,.6g} {finding.unit:11} {finding.note}",
                    flush=True,
                )
    if settings.json is not None:
        settings.json.write_text(json.dumps([asdict(f) for f in findings], indent=2) + "\n")


if __name__ == "__main__":
    main()
