"""The native engine as this study uses it: write answers, then look at all of them again.

The engine scores every cached token: by how much it falls short of the best one. So one pass tells
what every tolerance would keep.
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
    """One answer under other weights: for each token, how it compares."""

    gaps: Sequence[float]
    """Nats by which it falls short of the token that the weights would choose now."""
    logprobs: Sequence[float]
    """Its log-probability now."""
    old_logprobs: Sequence[float]
    """Its log-probability under the weights that wrote it."""


class Writer:
    """An engine of one precision, whose weights are exchanged as the study goes on."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int, context: int, max_tokens: int, compiled: bool
    ) -> None:
        """An engine with room for every slot to hold `context` tokens."""
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
        """Write with these weights."""
        self._engine.load_weights(Weights(version=version, tensors=tensors))

    def write(
        self, prompts: Sequence[Sequence[int]], *, samples: int, seed: int
    ) -> list[Trajectory]:
        """Complete answers at temperature 1."""
        return self._engine.generate(prompts, samples_per_prompt=samples, seed=seed, progress=False)

    def recheck(self, answers: Sequence[Trajectory]) -> list[Recheck]:
        """Every token of every answer under the present weights, given those before it."""
        return [
            Recheck(scores.gaps or [], scores.logprobs, answer.logprobs)
            for answer, scores in zip(answers, self._engine.score(answers), strict=True)
        ]

    def kept(self, answers: Sequence[Trajectory], *, tolerance: float) -> list[int]:
        """How many tokens of each answer the engine really keeps at a tolerance."""
        self._engine.submit(answers, tolerance=tolerance)
        again = run_to_end(self._engine, [a.key for a in answers], show_progress=False)
        return [
            new.num_tokens - (new.decoded_tokens - old.decoded_tokens)
            for old, new in zip(answers, again, strict=True)
        ]
