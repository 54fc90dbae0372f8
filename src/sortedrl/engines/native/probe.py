"""A model on trial: it must compute the same in the engine as on its own."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from sortedrl.errors import ModelError
from sortedrl.models.plain import plain_logprobs
from sortedrl.randomness import mix
from sortedrl.types import Prompt, Segment, Trajectory

_TOKENS = 24
_GAPS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


def probe(*, vocabulary: int, max_tokens: int) -> Trajectory:
    """A complete answer of arbitrary tokens, as if sampled by weights long gone."""
    count = min(_TOKENS, max_tokens)
    tokens = [mix(index) % vocabulary for index in range(count)]
    cached = Segment(tokens[1:], [0.0] * (count - 1), version=-1)
    prompt = Prompt(id=0, tokens=tokens[:1])
    return Trajectory(prompt=prompt, sample_index=0, group=0, seed=0, segments=(cached,))


def refuse_other_numbers(model: PreTrainedModel, read: Trajectory) -> None:
    """Refuse a model whose own log-probabilities of the probe are not those the engine read."""
    tokens = [*read.prompt.tokens, *read.tokens]
    plain_T = plain_logprobs(model, tokens, after=len(read.prompt.tokens))
    gap = (plain_T - torch.tensor(read.logprobs)).abs().mean().item()
    if not gap <= _GAPS[model.dtype]:
        raise ModelError(
            f"{type(model).__name__} computes something else in the native engine than on its "
            f"own (log-probabilities differ by {gap:.2g} on average): its attention has a part "
            "the engine does not know; use the vLLM or SGLang engine for this model"
        )
