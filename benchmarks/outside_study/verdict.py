"""How many cached tokens stand, from vLLM's prompt log-probabilities with the noise added here.

With only the k largest log-probabilities, a token outside them can still win by its noise: it has
at most the least log-probability among them. Where that bound wins the verdict is open, and the
answer is cut there. A token that the verdict keeps would be chosen again.

Axes: P cached positions of one answer, V tokens of the vocabulary, K candidates of one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sortedrl.engines.native.noise import gumbel, row_keys, stream
from sortedrl.types import Trajectory

if TYPE_CHECKING:
    from vllm import RequestOutput


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many cached tokens stand, and whether the token that ended them is known."""

    kept: int
    is_known: bool


def verdicts(
    cached: Sequence[Trajectory],
    outputs: Sequence[RequestOutput],
    *,
    vocabulary: int,
) -> list[Verdict]:
    """A verdict for each cached answer, from the outputs of its prompt pass."""
    return [_verdict(t, o, vocabulary=vocabulary) for t, o in zip(cached, outputs, strict=True)]


def _verdict(trajectory: Trajectory, output: RequestOutput, *, vocabulary: int) -> Verdict:
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
            return Verdict(index, winner in ids_K)
    return Verdict(len(tokens), is_known=True)
