"""Tokens per second with and without our noise; seconds and bytes of a verified token."""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outside_study.answers import ANSWER_TOKENS, token_share
from outside_study.engine import (
    ALL,
    OUR_NOISE,
    SAMPLER,
    SEEDED_SAMPLER,
    Setting,
    prompt_pass,
    vllm_engine,
    write,
)
from outside_study.finding import Finding
from outside_study.verdict import verdicts
from outside_study.worker import kept_in_worker, watch_prompt_pass
from sortedrl.engines.generation import fresh_trajectories
from sortedrl.types import Trajectory

if TYPE_CHECKING:
    from vllm import LLM

WAYS = {
    "decoding, vLLM's sampler": SAMPLER,
    "decoding, vLLM's sampler with a seed per answer": SEEDED_SAMPLER,
    "decoding, our noise in a logits processor": OUR_NOISE,
}
ROUNDS = 3
LARGE_VOCABULARY = 10_000


def study_costs(folder: Path, prompts: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """What decoding and verifying cost, with the model in `folder` and one answer per prompt."""
    vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    fresh = fresh_trajectories(prompts, samples_per_prompt=1, seed=0)
    note = f"vocabulary {vocabulary:,}"
    with vllm_engine(folder, Setting(slots=len(fresh))) as llm:
        # Once unmeasured, here and below: the first call pays for what is done only once.
        write(llm, fresh)
        for name, way in WAYS.items():
            seconds = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                cached = write(llm, fresh, way=way)
                seconds.append(time.perf_counter() - began)
            yield Finding(name, len(fresh) * ANSWER_TOKENS / min(seconds), "tokens/s", note)
        # The last way was our noise, so these answers can be verified.
        prompt_pass(llm, cached, k=0)
        yield from _worker_costs(llm, cached, note=note)
        for k in (0, 20, 256, 2048, ALL):
            if k <= vocabulary:
                yield from _host_costs(llm, cached, k=k, vocabulary=vocabulary)


def _worker_costs(llm: LLM, cached: Sequence[Trajectory], *, note: str) -> Iterator[Finding]:
    llm.collective_rpc(watch_prompt_pass)
    began = time.perf_counter()
    prompt_pass(llm, cached, k=0)
    each = 1e3 * (time.perf_counter() - began) / _rows(cached)
    yield Finding("prompt pass with the verdict in the worker", each, "ms/token", note)
    share = token_share([kept_in_worker(t) for t in cached])
    yield Finding("cached tokens kept, unchanged weights", share, "share", f"{note}, in the worker")
    llm.collective_rpc(watch_prompt_pass, kwargs={"is_on": False})


def _host_costs(
    llm: LLM, cached: Sequence[Trajectory], *, k: int, vocabulary: int
) -> Iterator[Finding]:
    few = cached[:2] if k == ALL and vocabulary > LARGE_VOCABULARY else cached
    note = f"vocabulary {vocabulary:,}, k = {'all' if k == ALL else k}"
    before = _peak_bytes()
    began = time.perf_counter()
    outputs = prompt_pass(llm, few, k=k)
    each = 1e3 * (time.perf_counter() - began) / _rows(few)
    yield Finding("prompt pass", each, "ms/token", note)
    if k == ALL:
        raised = (_peak_bytes() - before) / _rows(few)
        yield Finding("memory peak raised on the host by", raised, "bytes/token", note)
        yield Finding("sent by the worker", 8.0 * (vocabulary + 1), "bytes/token", note)
    if k:
        began = time.perf_counter()
        found = verdicts(few, outputs, vocabulary=vocabulary)
        each = 1e3 * (time.perf_counter() - began) / (len(few) * ANSWER_TOKENS)
        yield Finding("noise and verdict on the host", each, "ms/token", note)
        share = token_share([verdict.kept for verdict in found])
        yield Finding("cached tokens kept, unchanged weights", share, "share", note)
        still_open = sum(not verdict.is_known for verdict in found) / len(few)
        yield Finding("answers cut where the verdict was open", still_open, "share", note)
    del outputs
    gc.collect()


def _rows(cached: Sequence[Trajectory]) -> int:
    return sum(len(t.prompt.tokens) + t.num_tokens for t in cached)


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
