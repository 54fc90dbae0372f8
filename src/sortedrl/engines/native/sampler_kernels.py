"""Triton kernels of the sampler: one pass over the logits, generating the noise on the fly.

`sample` computes the same as `sampler.choose`: the same bits, and the same token up to the rounding
of two logarithms. `filter_floors` computes the same as `sampler.floors`, without a sort: it bisects
the logits of a row, and sums probabilities as integers, so that neither the summation order nor
other rows can affect the result.

Axes: Q rows to choose for, S slots, V tokens of the vocabulary, C chunks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sortedrl.engines.native import sampler
from sortedrl.engines.native.sampler import (
    MASS_UNITS,
    SamplerInputs,
    SamplerOutput,
    TokenFilters,
)

CHUNK_TOKENS = 4096
_FILTERED_CHUNK_TOKENS = 8192

_kernel: Callable[[Callable[..., Any]], Any] = triton.jit

_GOLDEN_64 = tl.constexpr(sampler.GOLDEN_64)
_FIRST_64, _SECOND_64 = map(tl.constexpr, sampler.ROUND_64)
_GOLDEN_32 = tl.constexpr(sampler.GOLDEN_32)
_FIRST_32, _SECOND_32 = map(tl.constexpr, sampler.ROUND_32)
_MASK_31 = tl.constexpr(sampler.MASK_31)
_LARGEST = tl.constexpr(sampler.LARGEST)
_SERIES_BELOW = tl.constexpr(sampler.SERIES_BELOW)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_MASS_UNITS = tl.constexpr(MASS_UNITS)
_LOWEST_KEY = tl.constexpr(-(2**31))
_HALVINGS = tl.constexpr(16)
"""Passes that narrow 2**32 keys down to one, by a quarter each."""


def sample(
    logits_QV: Tensor,
    draw: SamplerInputs,
    *,
    floors_Q: Tensor,
    commit_slots_Q: Tensor,
    last_tokens_S: Tensor,
) -> SamplerOutput:
    """The token with the largest perturbed logit in each row, also written to its commit slot.

    An inverse temperature of 0 is greedy: without noise, and scored at temperature 1.
    Log-probabilities are over the whole vocabulary; tokens with a logit below the floor are only
    excluded from sampling. A gap is the number of nats by which the expected token (-1: none) fell
    short of the sampled one: 0 if they are the same, infinite if it lies below the floor. A commit
    slot of -1 writes nowhere.
    """
    num_rows, vocabulary = logits_QV.shape
    chunks = triton.cdiv(vocabulary, CHUNK_TOKENS)
    inputs = (
        logits_QV,
        draw.streams_Q,
        draw.positions_Q,
        draw.inverse_temperatures_Q,
        floors_Q,
    )
    targets = (draw.expected_Q, commit_slots_Q, last_tokens_S)
    assert logits_QV.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (*inputs[1:], *targets))
    best_tokens_QC = logits_QV.new_empty(num_rows, chunks, dtype=torch.int32)
    best_QC = torch.empty_like(best_tokens_QC, dtype=torch.float32)
    partial = (best_tokens_QC, best_QC, torch.empty_like(best_QC), torch.empty_like(best_QC))
    tokens_Q = torch.empty_like(draw.expected_Q, dtype=torch.int32)
    logprobs_Q = torch.empty_like(tokens_Q, dtype=torch.float32)
    results = (tokens_Q, logprobs_Q, torch.empty_like(logprobs_Q), torch.empty_like(logprobs_Q))
    _choose_in_chunk[(num_rows, chunks)](
        *inputs, *partial, vocabulary, logits_QV.stride(0), CHUNK=CHUNK_TOKENS, num_warps=4
    )
    _choose[(num_rows,)](
        *inputs, *targets, *partial, *results, vocabulary, logits_QV.stride(0),
        chunks, C_PAD=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return SamplerOutput(*results)


def filter_floors(logits_QV: Tensor, draw: SamplerInputs, keep: TokenFilters) -> Tensor:
    """The lowest logit of each row that passes its filters; see `sampler.floors`."""
    num_rows, vocabulary = logits_QV.shape
    floors_Q = torch.empty_like(draw.inverse_temperatures_Q)
    inputs = (
        draw.inverse_temperatures_Q,
        keep.top_k_Q.contiguous(),
        keep.top_p_Q.contiguous(),
        keep.min_p_Q.contiguous(),
    )
    assert logits_QV.stride(1) == 1
    chunk = min(_FILTERED_CHUNK_TOKENS, triton.next_power_of_2(vocabulary))
    _filter_row[(num_rows,)](
        logits_QV, *inputs, floors_Q, vocabulary, logits_QV.stride(0), CHUNK=chunk, num_warps=16
    )
    return floors_Q


@_kernel
def _ordered(scaled: tl.tensor) -> tl.tensor:
    """Order-preserving integers for floats; adding 0 makes -0 equal to 0."""
    bits = (scaled + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@_kernel
def _masses(scaled: tl.tensor, best: tl.tensor) -> tl.tensor:
    return (tl.exp(scaled - best) * _MASS_UNITS).to(tl.int64)


@_kernel
def _lowest_key(
    logits_V: tl.tensor, scale: tl.tensor, best: tl.tensor, vocabulary: tl.tensor,
    least: tl.tensor, limit: tl.tensor, IS_MASS: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The smallest key such that the tokens above it weigh less than `limit`.

    A token weighs its mass, or 1; keys below `least` weigh nothing.
    """
    lowest = tl.full((), _LOWEST_KEY, tl.int64)
    quarter = tl.full((), 2**30, tl.int64)
    for _ in range(_HALVINGS):
        first = tl.full((), 0, tl.int64)
        second = tl.full((), 0, tl.int64)
        third = tl.full((), 0, tl.int64)
        for start in range(0, vocabulary, CHUNK):
            tokens = start + tl.arange(0, CHUNK)
            mask = tokens < vocabulary
            logits = tl.load(logits_V + tokens, mask=mask, other=float("-inf"))
            scaled = logits.to(tl.float32) * scale
            keys = _ordered(scaled)
            if IS_MASS:
                weights = tl.where(mask & (keys >= least), _masses(scaled, best), 0)
            else:
                weights = mask.to(tl.int64)
            first += tl.sum(tl.where(keys > lowest + quarter - 1, weights, 0), 0)
            second += tl.sum(tl.where(keys > lowest + 2 * quarter - 1, weights, 0), 0)
            third += tl.sum(tl.where(keys > lowest + 3 * quarter - 1, weights, 0), 0)
        above = (first.to(tl.float64) >= limit).to(tl.int64)
        above += (second.to(tl.float64) >= limit).to(tl.int64)
        above += (third.to(tl.float64) >= limit).to(tl.int64)
        lowest += above * quarter
        quarter = quarter // 4
    return lowest


@_kernel
def _filter_row(
    logits_QV: tl.tensor, inverse_temperatures_Q: tl.tensor,
    top_k_Q: tl.tensor, top_p_Q: tl.tensor, min_p_Q: tl.tensor, floors_Q: tl.tensor,
    vocabulary: tl.tensor, logits_stride: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_QV + row * logits_stride
    inverse = tl.load(inverse_temperatures_Q + row)
    scale = tl.where(inverse > 0.0, inverse, 1.0)
    top_k = tl.where(inverse > 0.0, tl.load(top_k_Q + row).to(tl.int64), vocabulary)
    top_p = tl.where(inverse > 0.0, tl.load(top_p_Q + row), 1.0)
    min_p = tl.load(min_p_Q + row)
    best = tl.full((), float("-inf"), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        logits = tl.load(logits_V + tokens, mask=tokens < vocabulary, other=float("-inf"))
        best = tl.maximum(best, tl.max(logits.to(tl.float32) * scale, 0))
    lowest = tl.full((), _LOWEST_KEY, tl.int64)
    if top_k < vocabulary:
        lowest = _lowest_key(
            logits_V, scale, best, vocabulary, lowest, top_k.to(tl.float64), False, CHUNK
        )
    if top_p < 1.0:
        total = tl.full((), 0, tl.int64)
        for start in range(0, vocabulary, CHUNK):
            tokens = start + tl.arange(0, CHUNK)
            mask = tokens < vocabulary
            logits = tl.load(logits_V + tokens, mask=mask, other=float("-inf"))
            scaled = logits.to(tl.float32) * scale
            is_in = mask & (_ordered(scaled) >= lowest)
            total += tl.sum(tl.where(is_in, _masses(scaled, best), 0), 0)
        limit = top_p.to(tl.float64) * total.to(tl.float64)
        lowest_p = _lowest_key(logits_V, scale, best, vocabulary, lowest, limit, True, CHUNK)
        lowest = tl.maximum(lowest, lowest_p)
    floor = tl.full((), float("inf"), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        mask = tokens < vocabulary
        logits = tl.load(logits_V + tokens, mask=mask, other=float("-inf")).to(tl.float32)
        scaled = logits * scale
        is_kept = mask & (_ordered(scaled) >= lowest) & (tl.exp(scaled - best) >= min_p)
        floor = tl.minimum(floor, tl.min(tl.where(is_kept, logits, float("inf")), 0))
    tl.store(floors_Q + row, tl.where(inverse > 0.0, floor, float("-inf")))


@_kernel
def _row_key(stream: tl.tensor, position: tl.tensor) -> tl.tensor:
    state = (stream ^ position.to(tl.int64)).to(tl.uint64) + _GOLDEN_64
    state = (state ^ (state >> 30)) * _FIRST_64
    state = (state ^ (state >> 27)) * _SECOND_64
    return state ^ (state >> 31)


@_kernel
def _gumbel(key: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    bits = tokens.to(tl.uint32) * _GOLDEN_32 + key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * _FIRST_32
    bits = (bits ^ (bits >> 15) ^ (key >> 32).to(tl.uint32)) * _SECOND_32
    words = (bits ^ (bits >> 15)) & _MASK_31
    w = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-31, _LARGEST)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4))))
    return -tl.log(tl.where(w < _SERIES_BELOW, series, -tl.log(1 - w)))


@_kernel
def _choose_in_chunk(
    logits_QV: tl.tensor, streams_Q: tl.tensor, positions_Q: tl.tensor,
    inverse_temperatures_Q: tl.tensor, floors_Q: tl.tensor,
    best_tokens_QC: tl.tensor, best_QC: tl.tensor, largest_QC: tl.tensor, sums_QC: tl.tensor,
    vocabulary: tl.tensor, logits_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = tokens < vocabulary
    logits = tl.load(logits_QV + row * logits_stride + tokens, mask=mask, other=float("-inf"))
    logits = logits.to(tl.float32)
    inverse = tl.load(inverse_temperatures_Q + row)
    scaled = logits * tl.where(inverse > 0.0, inverse, 1.0)
    gumbel = _gumbel(_row_key(tl.load(streams_Q + row), tl.load(positions_Q + row)), tokens)
    perturbed = scaled + tl.where(inverse > 0.0, gumbel, 0.0)
    perturbed = tl.where(logits < tl.load(floors_Q + row), float("-inf"), perturbed)
    best = tl.max(perturbed, 0)
    best_token = tl.min(tl.where(perturbed == best, tokens, _NO_TOKEN), 0)

    largest = tl.max(scaled, 0)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    target = row * tl.num_programs(1) + chunk
    tl.store(best_tokens_QC + target, best_token)
    tl.store(best_QC + target, best)
    tl.store(largest_QC + target, largest)
    tl.store(sums_QC + target, tl.sum(tl.exp(scaled - origin), 0))


@_kernel
def _choose(
    logits_QV: tl.tensor, streams_Q: tl.tensor, positions_Q: tl.tensor,
    inverse_temperatures_Q: tl.tensor, floors_Q: tl.tensor,
    expected_Q: tl.tensor, commit_slots_Q: tl.tensor, last_tokens_S: tl.tensor,
    best_tokens_QC: tl.tensor, best_QC: tl.tensor, largest_QC: tl.tensor, sums_QC: tl.tensor,
    tokens_Q: tl.tensor, logprobs_Q: tl.tensor, gaps_Q: tl.tensor, expected_logprobs_Q: tl.tensor,
    vocabulary: tl.tensor, logits_stride: tl.tensor,
    num_chunks: tl.tensor, C_PAD: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, C_PAD)
    mask = chunks < num_chunks
    source = row * num_chunks + chunks
    best_C = tl.load(best_QC + source, mask=mask, other=float("-inf"))
    best_tokens_C = tl.load(best_tokens_QC + source, mask=mask, other=_NO_TOKEN)
    largest_C = tl.load(largest_QC + source, mask=mask, other=float("-inf"))
    sums_C = tl.load(sums_QC + source, mask=mask, other=0.0)
    best = tl.max(best_C, 0)
    token = tl.min(tl.where(best_C == best, best_tokens_C, _NO_TOKEN), 0)
    largest = tl.max(largest_C, 0)
    log_sum = tl.log(tl.sum(sums_C * tl.exp(largest_C - largest), 0))

    # A row of NaN has no best token, which must not make the loads below go out of bounds.
    token = tl.minimum(token, vocabulary - 1)
    expected = tl.load(expected_Q + row)
    expected = tl.where(expected >= 0, expected, token)
    inverse = tl.load(inverse_temperatures_Q + row)
    scoring = tl.where(inverse > 0.0, inverse, 1.0)
    logits_V = logits_QV + row * logits_stride
    scaled = tl.load(logits_V + token).to(tl.float32) * scoring
    expected_logit = tl.load(logits_V + expected).to(tl.float32)
    expected_scaled = expected_logit * scoring
    gumbel = _gumbel(_row_key(tl.load(streams_Q + row), tl.load(positions_Q + row)), expected)
    perturbed = expected_scaled + tl.where(inverse > 0.0, gumbel, 0.0)
    perturbed = tl.where(expected_logit < tl.load(floors_Q + row), float("-inf"), perturbed)
    tl.store(tokens_Q + row, token)
    tl.store(logprobs_Q + row, scaled - largest - log_sum)
    tl.store(gaps_Q + row, tl.where(expected == token, 0.0, best - perturbed))
    tl.store(expected_logprobs_Q + row, expected_scaled - largest - log_sum)
    slot = tl.load(commit_slots_Q + row)
    tl.store(last_tokens_S + slot, token, mask=slot >= 0)
