"""The Triton kernels of a step: write the cache, attend to it, choose the tokens.

The invariant: a row's result is bitwise the same whatever else is in the launch. How many rows
there are, whether a row comes alone (decode) or in a tile with its neighbours (prefill) and how
many splits the launch has change nothing, because a row always meets the same arithmetic in the
same order: one tile shape, keys in blocks of `BLOCK_KEYS` counted from position 0, splits of
`SPLIT_TOKENS` counted from position 0 and merged in order, masked keys that add exactly 0.

Token place of a position: `block_tables[slot, position // block_tokens] * block_tokens
+ position % block_tokens`.

Axes: R rows, S slots, H query heads, K key/value heads, G query heads per key/value head,
D head dimension, N token places, M rows of a tile (tokens x G), Q rows to choose for,
V tokens of the vocabulary, C chunks of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from sortedrl.engines.native import noise

SPLIT_TOKENS = 512
BLOCK_KEYS = 64
TILE_ROWS = 16
CHUNK_TOKENS = 4096

_kernel: Callable[[Callable[..., Any]], Any] = triton.jit

_GOLDEN_64 = tl.constexpr(noise.GOLDEN_64)
_FIRST_64, _SECOND_64 = map(tl.constexpr, noise.ROUND_64)
_GOLDEN_32 = tl.constexpr(noise.GOLDEN_32)
_FIRST_32, _SECOND_32 = map(tl.constexpr, noise.ROUND_32)
_MASK_31 = tl.constexpr(noise.MASK_31)
_LARGEST = tl.constexpr(noise.LARGEST)
_SERIES_BELOW = tl.constexpr(noise.SERIES_BELOW)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, kw_only=True)
class KernelRows:
    """Which token each row is, and which rows go through attention together.

    A tile is `tile_counts_R[t]` rows from `tile_starts_R[t]` on: one slot, consecutive
    positions, at most `tokens_per_tile` of them; a count of 0 is no tile.
    """

    slots_R: Tensor
    positions_R: Tensor
    tile_starts_R: Tensor
    tile_counts_R: Tensor
    block_tables: Tensor

    def __post_init__(self) -> None:
        """The kernels step through memory."""
        per_row = (self.slots_R, self.positions_R, self.tile_starts_R, self.tile_counts_R)
        assert all(tensor.is_contiguous() for tensor in (*per_row, self.block_tables))


class Choices(NamedTuple):
    """What `sample` gives for each row; where nothing is expected, the chosen token is."""

    tokens_Q: Tensor
    logprobs_Q: Tensor
    gaps_Q: Tensor
    expected_logprobs_Q: Tensor


def tokens_per_tile(group: int) -> int:
    """How many tokens of a sequence, each with its `group` query heads, fill a tile."""
    return max(1, TILE_ROWS // group)


def write_cache(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    rows: KernelRows,
    block_tokens: int,
) -> None:
    """Put the keys and values [1, K, R, D] of every row at its place in the caches [K, N, D]."""
    _, num_heads, num_rows, dim = k.shape
    assert k.stride(3) == v.stride(3) == 1
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    heads = min(8, triton.next_power_of_2(num_heads))
    _write[(num_rows, triton.cdiv(num_heads, heads))](
        k, v, key_cache, value_cache,
        rows.slots_R, rows.positions_R, rows.block_tables,
        num_heads, k.stride(1), k.stride(2), v.stride(1), v.stride(2), key_cache.stride(0),
        rows.block_tables.stride(0),
        HEADS=heads, D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK_TOKENS=block_tokens,
        num_warps=4,
    )  # fmt: skip


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    rows: KernelRows,
    block_tokens: int,
    scale: float,
    window: int | None,
    num_splits: int,
) -> Tensor:
    """Causal attention [1, R, H, D] of the queries [1, H, R, D] to what the caches hold.

    `num_splits * SPLIT_TOKENS` must cover the longest context: what lies beyond is not seen.
    Rows that are in no tile are left undefined.
    """
    _, num_heads, num_rows, dim = q.shape
    num_key_heads = key_cache.shape[0]
    group = num_heads // num_key_heads
    dim_pad = max(16, triton.next_power_of_2(dim))
    key_bytes = dim_pad * q.element_size()
    assert q.stride(3) == 1
    assert q.dtype == key_cache.dtype == value_cache.dtype
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    out = q.new_empty(1, num_rows, num_heads, dim)
    num_partials = num_splits if num_splits > 1 else 0
    partials = q.new_empty(num_partials, num_rows, num_heads, dim, dtype=torch.float32)
    weights = q.new_empty(num_partials, num_rows, num_heads, dtype=torch.float32)
    _attend[(num_rows, num_key_heads, num_splits)](
        q, key_cache, value_cache, out, partials, weights,
        rows.slots_R, rows.positions_R, rows.tile_starts_R, rows.tile_counts_R, rows.block_tables,
        scale * math.log2(math.e), q.stride(1), q.stride(2), key_cache.stride(0),
        rows.block_tables.stride(0),
        G=group, M=max(TILE_ROWS, triton.next_power_of_2(group)), D=dim, D_PAD=dim_pad,
        BLOCK_TOKENS=block_tokens, WINDOW=window or 0, BLOCK_N=BLOCK_KEYS, SPLIT=SPLIT_TOKENS,
        num_warps=8 if key_bytes > 256 else 4, num_stages=5 if key_bytes <= 128 else 3,
    )  # fmt: skip
    if num_splits > 1:
        _merge[(num_rows, num_key_heads)](
            partials, weights, out, rows.positions_R, num_splits,
            G=group, G_PAD=triton.next_power_of_2(group), D=dim, D_PAD=dim_pad, WINDOW=window or 0,
            SPLIT=SPLIT_TOKENS,
            num_warps=4,
        )  # fmt: skip
    return out


def sample(
    logits_QV: Tensor,
    *,
    streams_Q: Tensor,
    positions_Q: Tensor,
    inverse_temperatures_Q: Tensor,
    floors_Q: Tensor,
    expected_Q: Tensor,
    commit_slots_Q: Tensor,
    last_tokens_S: Tensor,
) -> Choices:
    """The token of largest perturbed logit in each row, written also to its commit slot.

    An inverse temperature of 0 is the greedy choice, without noise and scored at temperature 1.
    Log-probabilities are over the whole vocabulary; tokens whose logit is below the floor are
    only kept from being chosen. A gap is by how many nats the expected token (-1: none) fell
    short of the chosen one: 0 if they are the same, infinite if it lies below the floor. A commit
    slot of -1 writes nowhere.
    """
    num_rows, vocabulary = logits_QV.shape
    chunks = triton.cdiv(vocabulary, CHUNK_TOKENS)
    inputs = (logits_QV, streams_Q, positions_Q, inverse_temperatures_Q, floors_Q)
    targets = (expected_Q, commit_slots_Q, last_tokens_S)
    assert logits_QV.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (*inputs[1:], *targets))
    best_tokens_QC = logits_QV.new_empty(num_rows, chunks, dtype=torch.int32)
    best_QC = torch.empty_like(best_tokens_QC, dtype=torch.float32)
    partial = (best_tokens_QC, best_QC, torch.empty_like(best_QC), torch.empty_like(best_QC))
    tokens_Q = torch.empty_like(expected_Q, dtype=torch.int32)
    logprobs_Q = torch.empty_like(tokens_Q, dtype=torch.float32)
    choices = Choices(
        tokens_Q, logprobs_Q, torch.empty_like(logprobs_Q), torch.empty_like(logprobs_Q)
    )
    _choose_in_chunk[(num_rows, chunks)](
        *inputs, *partial, vocabulary, logits_QV.stride(0), CHUNK=CHUNK_TOKENS, num_warps=4
    )
    _choose[(num_rows,)](
        *inputs, *targets, *partial, *choices, vocabulary, logits_QV.stride(0),
        chunks, C_PAD=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return choices


@_kernel
def _places(
    table: tl.tensor, positions: tl.tensor, mask: tl.tensor, BLOCK_TOKENS: tl.constexpr
) -> tl.tensor:
    blocks = tl.load(table + positions // BLOCK_TOKENS, mask=mask, other=0)
    return blocks.to(tl.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS


@_kernel
def _is_seen(keys: tl.tensor, positions: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    is_seen = keys <= positions
    if WINDOW > 0:
        is_seen &= keys > positions - WINDOW
    return is_seen


@_kernel
def _write(
    k: tl.tensor, v: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor,
    slots_R: tl.tensor, positions_R: tl.tensor, block_tables: tl.tensor,
    num_heads: tl.tensor, k_head_stride: tl.tensor, k_row_stride: tl.tensor,
    v_head_stride: tl.tensor, v_row_stride: tl.tensor, cache_stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    dims = tl.arange(0, D_PAD)[None, :]
    mask = (heads < num_heads) & (dims < D)
    table = block_tables + tl.load(slots_R + row).to(tl.int64) * table_stride
    position = tl.load(positions_R + row)
    place = _places(table, position, position >= 0, BLOCK_TOKENS)
    target = heads * cache_stride + place * D + dims
    new_k = tl.load(k + heads * k_head_stride + row * k_row_stride + dims, mask=mask)
    new_v = tl.load(v + heads * v_head_stride + row * v_row_stride + dims, mask=mask)
    tl.store(key_cache + target, new_k, mask=mask)
    tl.store(value_cache + target, new_v, mask=mask)


@_kernel
def _attend(
    q: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, out: tl.tensor, partials: tl.tensor,
    weights: tl.tensor,
    slots_R: tl.tensor, positions_R: tl.tensor, tile_starts_R: tl.tensor, tile_counts_R: tl.tensor,
    block_tables: tl.tensor,
    scale: tl.tensor, q_head_stride: tl.tensor, q_row_stride: tl.tensor, cache_stride: tl.tensor,
    table_stride: tl.tensor,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    count = tl.load(tile_counts_R + tl.program_id(0))
    if count == 0:
        return
    start = tl.load(tile_starts_R + tl.program_id(0)).to(tl.int64)
    first = tl.load(positions_R + start)
    last = first + count - 1
    begin = tl.program_id(2) * SPLIT
    end = tl.minimum(last + 1, begin + SPLIT)
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
    if begin >= end:
        return

    tokens_M = tl.arange(0, M) // G
    heads_M = key_head * G + tl.arange(0, M) % G
    rows_M = start + tokens_M
    positions_M = first + tokens_M
    dims = tl.arange(0, D_PAD)
    mask = (tokens_M < count)[:, None] & (dims < D)[None, :]
    sources_M = rows_M * q_row_stride + heads_M * q_head_stride
    queries = tl.load(q + sources_M[:, None] + dims[None, :], mask=mask, other=0.0)
    table = block_tables + tl.load(slots_R + start).to(tl.int64) * table_stride

    largest_M = tl.full([M], float("-inf"), tl.float32)
    sums_M = tl.zeros([M], tl.float32)
    result = tl.zeros([M, D_PAD], tl.float32)
    for block in range(begin, end, BLOCK_N):
        keys_N = block + tl.arange(0, BLOCK_N)
        places_N = _places(table, keys_N, keys_N <= last, BLOCK_TOKENS)
        offsets = (key_head * cache_stride + places_N * D)[:, None] + dims[None, :]
        is_held = (keys_N <= last)[:, None] & (dims < D)[None, :]
        keys = tl.load(key_cache + offsets, mask=is_held, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        is_seen = _is_seen(keys_N[None, :], positions_M[:, None], WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_largest_M = tl.maximum(largest_M, tl.max(scores, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        origin_M = tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)
        decay_M = tl.exp2(largest_M - origin_M)
        probabilities = tl.exp2(scores - origin_M[:, None])
        values = tl.load(value_cache + offsets, mask=is_held, other=0.0)
        sums_M = sums_M * decay_M + tl.sum(probabilities, 1)
        probabilities = probabilities.to(values.dtype)
        result = tl.dot(probabilities, values, result * decay_M[:, None], input_precision="ieee")
        largest_M = new_largest_M

    sums_M = tl.where(sums_M > 0.0, sums_M, 1.0)
    # Adding 0 makes every zero positive: the sign would tell of masked blocks.
    result = result / sums_M[:, None] + 0.0
    num_heads = tl.num_programs(1) * G
    outputs_M = rows_M * num_heads + heads_M
    # A branch and not a constexpr: with one split and with many the same machine code runs.
    if tl.num_programs(2) == 1:
        tl.store(out + outputs_M[:, None] * D + dims[None, :], result, mask=mask)
    else:
        outputs_M += tl.program_id(2).to(tl.int64) * tl.num_programs(0) * num_heads
        tl.store(partials + outputs_M[:, None] * D + dims[None, :], result, mask=mask)
        tl.store(weights + outputs_M, largest_M + tl.log2(sums_M), mask=tokens_M < count)


@_kernel
def _merge(
    partials: tl.tensor, weights: tl.tensor, out: tl.tensor, positions_R: tl.tensor,
    num_splits: tl.tensor,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_R + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    num_heads = tl.num_programs(1) * G
    heads_G = tl.arange(0, G_PAD)
    dims = tl.arange(0, D_PAD)
    mask = (heads_G < G)[:, None] & (dims < D)[None, :]
    outputs_G = row * num_heads + tl.program_id(1) * G + heads_G
    largest_G = tl.full([G_PAD], float("-inf"), tl.float32)
    sums_G = tl.zeros([G_PAD], tl.float32)
    result = tl.zeros([G_PAD, D_PAD], tl.float32)
    for split in range(first, tl.minimum(position // SPLIT + 1, num_splits)):
        offsets_G = outputs_G + tl.cast(split, tl.int64) * tl.num_programs(0) * num_heads
        weights_G = tl.load(weights + offsets_G, mask=heads_G < G, other=0.0)
        partial = tl.load(partials + offsets_G[:, None] * D + dims[None, :], mask=mask, other=0.0)
        new_largest_G = tl.maximum(largest_G, weights_G)
        decay_G = tl.exp2(largest_G - new_largest_G)
        share_G = tl.exp2(weights_G - new_largest_G)
        sums_G = sums_G * decay_G + share_G
        result = result * decay_G[:, None] + partial * share_G[:, None]
        largest_G = new_largest_G
    # Correctly rounded, so that the result of a single split stays as it is.
    result = tl.div_rn(result, tl.broadcast_to(sums_G[:, None], [G_PAD, D_PAD]))
    tl.store(out + outputs_G[:, None] * D + dims[None, :], result, mask=mask)


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

    # A row of NaN has no best token: it must not send the loads below out of bounds.
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
