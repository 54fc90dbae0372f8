"""The native engine of this study: generates answers, then scores all of them again.

The engine scores every cached token: how far it falls short of the best one. One pass therefore
shows what every tolerance would keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.engines.generation import run_to_end
from sortedrl.engines.native import NativeEngine
from sortedrl.engines.native.hf_model import attention_shape
from sortedrl.types import Trajectory, Weights

_ROOM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Recheck:
    """One answer under other weights, token by token."""

    gaps: Sequence[float]
    """Nats by which each falls short of the token that the weights would choose now."""
    logprobs: Sequence[float]
    """Log-probabilities under the current weights."""
    old_logprobs: Sequence[float]
    """Log-probabilities under the weights that sampled them."""


class Writer:
    """An engine of one precision whose weights are replaced during the study."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int, context: int, max_tokens: int, compiled: bool
    ) -> None:
        """An engine whose slots can all hold `context` tokens."""
        layers, heads, dim = attention_shape(model.config)
        token_bytes = 2 * layers * heads * dim * model.dtype.itemsize
        self._engine = NativeEngine(
            model,
            slots=slots,
            max_tokens=max_tokens,
            cache_bytes=(slots + 1) * (context + _ROOM_TOKENS) * token_bytes,
            is_compiled=compiled,
        )

    def load(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Use these weights."""
        self._engine.load_weights(Weights(version=version, tensors=tensors))

    def write(
        self, prompts: Sequence[Sequence[int]], *, samples: int, seed: int
    ) -> list[Trajectory]:
        """Complete answers at temperature 1."""
        return self._engine.generate(prompts, samples_per_prompt=samples, seed=seed, progress=False)

    def recheck(self, answers: Sequence[Trajectory]) -> list[Recheck]:
        """Score every token of every answer under the current weights, given the previous ones."""
        return [
            Recheck(scores.gaps or [], scores.logprobs, answer.logprobs)
            for answer, scores in zip(answers, self._engine.score(answers), strict=True)
        ]

    def kept(self, answers: Sequence[Trajectory], *, tolerance: float) -> list[int]:
        """How many tokens of each answer the engine keeps at a tolerance."""
        self._engine.submit(answers, tolerance=tolerance)
        again = run_to_end(self._engine, [a.key for a in answers], show_progress=False)
        return [
            new.num_tokens - (new.decoded_tokens - old.decoded_tokens)
            for old, new in zip(answers, again, strict=True)
        ]
