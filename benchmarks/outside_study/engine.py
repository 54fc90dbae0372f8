"""A vLLM engine in this process: it writes answers, and looks at cached ones in a prompt pass.

Cached tokens travel as part of the prompt.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outside_study.answers import ANSWER_TOKENS
from outside_study.processor import processor_class
from sortedrl.engines.native.noise import stream
from sortedrl.types import Segment, Trajectory

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

ALL = -1
"""vLLM's word for the whole vocabulary, where it asks for a number of log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a vLLM engine batches."""

    with_noise: bool = True
    slots: int = 64
    batched_tokens: int | None = None
    prefix_caching: bool = True
    policy: str = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How tokens are chosen: greedily under our noise, or by vLLM's sampler."""

    temperature: float = 1.0
    with_noise: bool = True
    is_seeded: bool = False
    """Whether vLLM's sampler gets a seed of the answer's own."""


OUR_NOISE = Way()
SAMPLER = Way(with_noise=False)
SEEDED_SAMPLER = Way(with_noise=False, is_seeded=True)


@contextmanager
def vllm_engine(folder: Path, setting: Setting, *, draft: str | None = None) -> Iterator[LLM]:
    """A vLLM engine in this process, gone at the end."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=setting.slots,
        max_num_batched_tokens=setting.batched_tokens,
        enable_prefix_caching=setting.prefix_caching,
        scheduling_policy=setting.policy,
        logprobs_mode="raw_logprobs",
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
        cleanup_dist_env_and_memory()
        gc.collect()


def write(
    llm: LLM,
    trajectories: Sequence[Trajectory],
    *,
    way: Way = OUR_NOISE,
    version: int = 0,
) -> list[Trajectory]:
    """The trajectories, in order, written to their end."""
    rules = [
        _rules(t, way=way, new_tokens=ANSWER_TOKENS - t.num_tokens, prompt_logprobs=None)
        for t in trajectories
    ]
    outputs = _ask(llm, trajectories, rules=rules)
    return [_written(t, o, version=version) for t, o in zip(trajectories, outputs, strict=True)]


def prompt_pass(llm: LLM, cached: Sequence[Trajectory], *, k: int) -> list[RequestOutput]:
    """Outputs of vLLM with the `k` largest log-probabilities at each cached token."""
    rules = [_rules(t, way=OUR_NOISE, new_tokens=1, prompt_logprobs=k) for t in cached]
    return _ask(llm, cached, rules=rules)


def _rules(
    trajectory: Trajectory, *, way: Way, new_tokens: int, prompt_logprobs: int | None
) -> SamplingParams:
    from vllm import SamplingParams

    key = stream(trajectory.seed, trajectory.attempt)
    noise = {
        "stream": key,
        "cached": trajectory.num_tokens,
        "inverse_temperature": 1 / way.temperature,
    }
    return SamplingParams(
        max_tokens=new_tokens,
        temperature=0.0 if way.with_noise else way.temperature,
        seed=key & 0x7FFFFFFF if way.is_seeded else None,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        prompt_logprobs=prompt_logprobs,
        extra_args=noise if way.with_noise else None,
    )


def _ask(
    llm: LLM,
    trajectories: Sequence[Trajectory],
    *,
    rules: Sequence[SamplingParams],
) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": [*t.prompt.tokens, *t.tokens]} for t in trajectories]
    outputs: list[RequestOutput] = llm.generate(prompts, rules, use_tqdm=False)
    return outputs


def _written(trajectory: Trajectory, output: RequestOutput, *, version: int) -> Trajectory:
    tokens = tuple(output.outputs[0].token_ids)
    logprobs = tuple(output.outputs[0].logprobs.logprobs)
    segment = Segment(tokens, logprobs[: len(tokens)], version)
    return replace(trajectory, segments=(*trajectory.segments, segment))
