"""Sampling: from logits and keyed noise to tokens, on any device.

A token is `argmax(logits / temperature + noise)`, which is exact sampling from the softmax.
The noise belongs to the answer, so a sampled token depends on its row alone.

Gumbel noise is a function of its key: (seed, attempt, position, token). The seed and the attempt of
an answer form its *stream*, stream and position the 64-bit key of a row, key and token 31 random
bits. Only integer arithmetic is used up to here, so every device has the same bits; the two
logarithms that follow agree to a few ulps.

The bits have their finest resolution of `w`, uniform in (0, 1), near 0, where large noise comes
from: `gumbel = -log(-log(1 - w))` reaches 22, enough not to truncate any vocabulary.

Axes: R rows, Q rows that are sampled, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sortedrl.core.randomness import mix

_NOTHING_EXPECTED = -1
_CACHED_NUMBERS = 1 << 16
_SORTED_TOKENS = 4096
MASS_UNITS = 2.0**40
"""The probability of the most likely token, in units in which filters add probabilities."""
GOLDEN_64 = 0x9E3779B97F4A7C15
ROUND_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN_32 = 0x9E3779B1
ROUND_32 = (0x21F0AAAD, 0x735A2D97)
MASK_31 = 0x7FFFFFFF
LARGEST = 1 - 2**-24
SERIES_BELOW = 1 / 64


def stream(seed: int, attempt: int) -> int:
    """The noise stream of one attempt at an answer, as a signed 64-bit number."""
    return signed(mix(seed, attempt), bits=64)


def signed(value: int, *, bits: int) -> int:
    """The two's complement reading of an unsigned number: torch has no unsigned arithmetic."""
    return value - (1 << bits) if value >> (bits - 1) else value


def row_keys(streams_R: Tensor, positions_R: Tensor) -> Tensor:
    """The 64-bit key of each row: one more round of the mix that made the stream."""
    state = (streams_R ^ positions_R.long()) + signed(GOLDEN_64, bits=64)
    state = (state ^ _shift(state, 30, bits=64)) * signed(ROUND_64[0], bits=64)
    state = (state ^ _shift(state, 27, bits=64)) * signed(ROUND_64[1], bits=64)
    return state ^ _shift(state, 31, bits=64)


def random_bits(keys_R: Tensor, tokens_V: Tensor) -> Tensor:
    """31 random bits for each row and token."""
    low = keys_R.to(torch.int32)[:, None]
    high = (keys_R >> 32).to(torch.int32)[:, None]
    bits = tokens_V.to(torch.int32) * signed(GOLDEN_32, bits=32) + low
    bits ^= _shift(bits, 16, bits=32)
    bits *= ROUND_32[0]
    bits ^= _shift(bits, 15, bits=32)
    bits ^= high
    bits *= ROUND_32[1]
    bits ^= _shift(bits, 15, bits=32)
    bits &= MASK_31
    return bits


def exponential(bits: Tensor) -> Tensor:
    """Exponential noise `-log(1 - w)`, accurate in its small values."""
    return bits.float().mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=-LARGEST).log1p_().neg_()


def gumbel(keys_R: Tensor, tokens_V: Tensor) -> Tensor:
    """Gumbel noise for each row and token, in fp32."""
    return -torch.log(exponential(random_bits(keys_R, tokens_V)))


def _shift(value: Tensor, count: int, *, bits: int) -> Tensor:
    """A logical shift to the right: torch's is arithmetic."""
    shifted = value >> count
    shifted &= (1 << (bits - count)) - 1
    return shifted


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
    """The sampled tokens, and a comparison with the expected ones.

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
    """The lowest logit that passes the filters: top-k first, then top-p, then min-p.

    Top-p keeps a token if the tokens above it have less than `top_p` of the probability. Equal
    logits are kept or dropped together. Probabilities are summed as integers, in units of 2**-40 of
    the largest one: such sums are exact in any order, so a floor depends only on its row. The
    tokens kept are those of a sort and a sum in float64, except for tokens within 1e-6 of the
    threshold.
    """
    size = max(1, _CACHED_NUMBERS // logits_QV.shape[1])
    parts = [
        _floors_few(
            logits_QV[rows],
            draw.inverse_temperatures_Q[rows],
            TokenFilters(keep.top_k_Q[rows], keep.top_p_Q[rows], keep.min_p_Q[rows]),
            num_sorted=_SORTED_TOKENS,
        )
        for rows in (slice(start, start + size) for start in range(0, len(logits_QV), size))
    ]
    return torch.cat(parts) if parts else logits_QV.new_empty(0)


def _floors_few(
    logits_QV: Tensor, inverse_Q: Tensor, keep: TokenFilters, *, num_sorted: int
) -> Tensor:
    """The floors of a few rows, from their largest `num_sorted` logits if those suffice."""
    vocabulary = logits_QV.shape[1]
    num_sorted = min(num_sorted, vocabulary)
    scaled_QV = logits_QV * inverse_Q[:, None]
    ratios_QV = (scaled_QV - scaled_QV.amax(-1, keepdim=True)).exp_()
    masses_QV = (ratios_QV * MASS_UNITS).long()
    sorted_QC, tokens_QC = scaled_QV.topk(num_sorted)

    last_Q1 = keep.top_k_Q[:, None].clamp(max=num_sorted) - 1
    is_cut_Q1 = keep.top_k_Q[:, None] < vocabulary
    lowest_Q1 = sorted_QC.gather(-1, last_Q1).where(is_cut_Q1, -math.inf)
    is_known_Q = ~is_cut_Q1[:, 0] | (keep.top_k_Q <= num_sorted)
    masses_QV = masses_QV.where(scaled_QV >= lowest_Q1, 0)

    top_p_Q1 = keep.top_p_Q[:, None].double()
    enough_Q1 = top_p_Q1 * masses_QV.sum(-1, keepdim=True).double()
    above_QC = masses_QV.gather(-1, tokens_QC)
    above_QC = above_QC.cumsum(-1) - above_QC
    num_kept_Q1 = (above_QC < enough_Q1).sum(-1, keepdim=True)
    lowest_p_Q1 = sorted_QC.gather(-1, (num_kept_Q1 - 1).clamp(min=0))
    lowest_Q1 = torch.where(top_p_Q1 < 1, torch.maximum(lowest_Q1, lowest_p_Q1), lowest_Q1)
    is_known_Q &= (keep.top_p_Q >= 1) | (num_kept_Q1[:, 0] < num_sorted)

    is_kept_QV = (scaled_QV >= lowest_Q1) & (ratios_QV >= keep.min_p_Q[:, None])
    floors_Q = logits_QV.where(is_kept_QV, math.inf).amin(-1)
    floors_Q = floors_Q.where(inverse_Q > 0, -math.inf)
    is_open_Q = ~is_known_Q & (inverse_Q > 0)
    if num_sorted < vocabulary and is_open_Q.any():
        rest = TokenFilters(
            keep.top_k_Q[is_open_Q], keep.top_p_Q[is_open_Q], keep.min_p_Q[is_open_Q]
        )
        floors_Q[is_open_Q] = _floors_few(
            logits_QV[is_open_Q], inverse_Q[is_open_Q], rest, num_sorted=vocabulary
        )
    return floors_Q


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
    """Sample a few rows, whose logits stay in the CPU cache."""
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
