"""Sampling: from logits and noise to tokens, on any device.

A token is `argmax(logits / temperature + noise)`, which is exact sampling from the softmax.
The noise belongs to the answer (noise.py), so a sampled token depends on its row alone.

Axes: Q rows that are sampled, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sortedrl.engines.native.noise import exponential, random_bits, row_keys

_NOTHING_EXPECTED = -1
_CACHED_NUMBERS = 1 << 16


class SamplerInputs(NamedTuple):
    """The inputs of the sampler besides the logits, one entry per row."""

    streams_Q: Tensor
    positions_Q: Tensor
    inverse_temperatures_Q: Tensor
    expected_Q: Tensor


@dataclass(frozen=True, slots=True)
class TokenFilters:
    """Top-k, top-p and min-p of each row."""

    top_k_Q: Tensor
    top_p_Q: Tensor
    min_p_Q: Tensor


class SamplerOutput(NamedTuple):
    """The sampled tokens, and how the expected ones compare.

    `logprobs_Q` are over the whole vocabulary at the sampling temperature (1 if greedy), from the
    logits that were sampled from; filters do not enter them. `gaps_Q` is by how many nats the
    expected token falls short of the sampled one.
    """

    tokens_Q: Tensor
    logprobs_Q: Tensor
    gaps_Q: Tensor
    expected_logprobs_Q: Tensor


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The output of the sampler on the host."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    expected_logprobs: list[float]


def floors(logits_QV: Tensor, draw: SamplerInputs, keep: TokenFilters) -> Tensor:
    """The lowest logit that passes the filters: top-k first, then top-p, then min-p."""
    inverse_Q1 = draw.inverse_temperatures_Q[:, None]
    sorted_QV, _ = (logits_QV * inverse_Q1).sort(dim=-1, descending=True)
    ranks_V = torch.arange(logits_QV.shape[1], device=logits_QV.device)
    sorted_QV = sorted_QV.masked_fill(ranks_V >= keep.top_k_Q[:, None], -math.inf)
    mass_QV = sorted_QV.softmax(-1)
    before_QV = mass_QV.cumsum(-1) - mass_QV
    top_p_Q1 = keep.top_p_Q[:, None]
    is_kept_QV = ((before_QV < top_p_Q1) | (top_p_Q1 >= 1)) & (ranks_V < keep.top_k_Q[:, None])
    is_kept_QV &= mass_QV >= keep.min_p_Q[:, None] * mass_QV[:, :1]
    last_Q1 = is_kept_QV.long().cumsum(-1).argmax(-1, keepdim=True)
    lowest_Q = sorted_QV.gather(-1, last_Q1)[:, 0]
    # Slightly lower: rounding in the division must not exclude the last kept token.
    lowest_Q = (lowest_Q - lowest_Q.abs() * 1e-6) / draw.inverse_temperatures_Q
    return torch.where(draw.inverse_temperatures_Q > 0, lowest_Q, -math.inf)


def choose(
    logits_QV: Tensor, draw: SamplerInputs, *, floors_Q: Tensor | None = None
) -> SamplerOutput:
    """Sample by an exponential race: the Gumbel argmax with one logarithm less.

    `exp(logit) / exponential noise` is the exponential of `logit + Gumbel noise`, so the largest
    is the same token, and gaps in nats are differences of logarithms.
    """
    size = max(1, _CACHED_NUMBERS // logits_QV.shape[1])
    parts = [
        _choose_few(
            logits_QV[start : start + size],
            SamplerInputs(*(tensor[start : start + size] for tensor in draw)),
            floors_Q[start : start + size] if floors_Q is not None else None,
        )
        for start in range(0, logits_QV.shape[0], size)
    ]
    if not parts:
        return _choose_few(logits_QV, draw, floors_Q)
    return SamplerOutput(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _choose_few(logits_QV: Tensor, draw: SamplerInputs, floors_Q: Tensor | None) -> SamplerOutput:
    """Sample so few rows that their logits stay in the CPU cache."""
    inverse_Q1 = draw.inverse_temperatures_Q[:, None]
    is_greedy_Q1 = inverse_Q1 == 0
    scaled_QV = logits_QV * inverse_Q1.masked_fill(is_greedy_Q1, 1.0)
    best_Q1 = scaled_QV.amax(-1, keepdim=True)
    race_QV = (scaled_QV - best_Q1).exp_()
    totals_Q = race_QV.sum(-1)
    keys_Q = row_keys(draw.streams_Q, draw.positions_Q)
    noise_QV = exponential(
        random_bits(keys_Q, torch.arange(logits_QV.shape[1], device=keys_Q.device))
    )
    race_QV /= noise_QV.masked_fill_(is_greedy_Q1, 1.0)
    if floors_Q is not None:
        race_QV.masked_fill_(logits_QV < floors_Q[:, None], 0.0)
    winners_Q1 = race_QV.argmax(-1, keepdim=True)
    expected_Q1 = draw.expected_Q.long()[:, None]
    expected_Q1 = expected_Q1.where(expected_Q1 != _NOTHING_EXPECTED, winners_Q1)

    def logprobs(tokens_Q1: Tensor) -> Tensor:
        return (scaled_QV.gather(-1, tokens_Q1) - best_Q1)[:, 0] - totals_Q.log()

    gaps_Q1 = race_QV.gather(-1, winners_Q1).log() - race_QV.gather(-1, expected_Q1).log()
    return SamplerOutput(
        tokens_Q=winners_Q1[:, 0],
        logprobs_Q=logprobs(winners_Q1),
        gaps_Q=gaps_Q1[:, 0],
        expected_logprobs_Q=logprobs(expected_Q1),
    )
