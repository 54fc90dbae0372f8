"""Triton kernels for the KV cache: write keys and values, and attend to them.

Batch invariance: a row's result is bitwise independent of the rest of the launch. The number of
rows, whether a row comes alone (decode) or in a tile with neighbours (prefill), and the number of
splits change nothing, because a row always gets the same arithmetic in the same order: one tile
shape, keys in blocks of `BLOCK_KEYS` counted from position 0, splits of `SPLIT_TOKENS` counted from
position 0 and merged in order, masked keys that add exactly 0.

Rows that only decode and spans of prefill have tiles of two heights (`TileRows`), so the order of
sums must not follow the height either. A reduction over the keys is spread over threads by the
shape of the tile; probabilities are therefore summed key by key, and once at the end over the keys
of a block, in a product whose order is that of the keys. That matrix instructions of both heights
add alike is a property of the GPU, which a test compares; on an H200 they do.

Token place of a position: `block_tables[slot, position // block_tokens] * block_tokens
+ position % block_tokens`.

Axes: R rows, H query heads, K key/value heads, G query heads per key/value head,
D head dimension, N token places, M rows of a tile (tokens x G).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_TOKENS = 1024
BLOCK_KEYS = 64
TILE_ROWS = 16

_kernel: Callable[[Callable[..., Any]], Any] = triton.jit
# The number of rows changes from pass to pass: no specialisation for 1 or multiples of 16.
_kernel_of_rows: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["num_rows"])


@dataclass(frozen=True, kw_only=True)
class KernelRows:
    """The token of each row, and the rows that share an attention tile.

    A tile is `tile_counts_R[t]` rows from `tile_starts_R[t]` on: one slot, consecutive
    positions, at most `tokens_per_tile` of them; a count of 0 is no tile. There may be fewer
    entries for tiles than rows. Tiles of the other height are listed separately.
    """

    slots_R: Tensor
    positions_R: Tensor
    tile_starts_R: Tensor
    tile_counts_R: Tensor
    block_tables: Tensor
    span_tiles: tuple[Tensor, Tensor] | None = None
    """Starts and counts of the tiles of `TileRows.spans` rows; the others have `decode` rows."""

    def __post_init__(self) -> None:
        """The kernels step through memory."""
        per_row = (self.slots_R, self.positions_R, self.tile_starts_R, self.tile_counts_R)
        assert all(
            tensor.is_contiguous()
            for tensor in (*per_row, self.block_tables, *(self.span_tiles or ()))
        )


@dataclass(frozen=True, kw_only=True)
class TileRows:
    """The heights of tiles, in query rows: tokens x query heads per key/value head."""

    decode: int = TILE_ROWS
    spans: int = TILE_ROWS
    """For spans with more tokens than fit in a decode tile."""

    def __post_init__(self) -> None:
        """Validate the heights, which matrix instructions fix."""
        if not {self.decode, self.spans} <= {16, 32, 64, 128} or self.spans < self.decode:
            raise ValueError(
                "attention tiles must have 16, 32, 64 or 128 rows, those of spans no fewer than "
                f"those of decoding, got {self.spans} and {self.decode}"
            )

    @property
    def are_two(self) -> bool:
        """Whether rows come in tiles of two heights."""
        return self.spans > self.decode


def tokens_per_tile(group: int, *, tile_rows: int = TILE_ROWS) -> int:
    """How many tokens of a sequence, each with its `group` query heads, fill a tile."""
    return max(1, tile_rows // group)


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
    tile_rows: TileRows | None = None,
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
    heights = tile_rows or TileRows()
    assert rows.span_tiles is None or heights.are_two
    assert q.stride(3) == 1
    assert q.dtype == key_cache.dtype == value_cache.dtype
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    out = q.new_empty(1, num_rows, num_heads, dim)
    num_partials = num_splits if num_splits > 1 else 0
    partials = q.new_empty(num_partials, num_rows, num_heads, dim, dtype=torch.float32)
    weights = q.new_empty(num_partials, num_rows, num_heads, dtype=torch.float32)
    tiles = [(heights.decode, rows.tile_starts_R, rows.tile_counts_R)]
    if rows.span_tiles is not None:
        tiles.append((heights.spans, *rows.span_tiles))
    for height, starts, counts in tiles:
        tile = max(height, triton.next_power_of_2(group))
        _attend[(len(starts), num_key_heads, num_splits)](
            q, key_cache, value_cache, out, partials, weights,
            rows.slots_R, rows.positions_R, starts, counts, rows.block_tables,
            scale * math.log2(math.e), num_rows, q.stride(1), q.stride(2), key_cache.stride(0),
            rows.block_tables.stride(0),
            G=group, M=tile, D=dim, D_PAD=dim_pad,
            BLOCK_TOKENS=block_tokens, WINDOW=window or 0, BLOCK_N=BLOCK_KEYS, SPLIT=SPLIT_TOKENS,
            **launch_options(tile, key_bytes),
        )  # fmt: skip
    if num_splits > 1:
        _merge[(num_rows, num_key_heads)](
            partials, weights, out, rows.positions_R, num_splits,
            G=group, G_PAD=triton.next_power_of_2(group), D=dim, D_PAD=dim_pad, WINDOW=window or 0,
            SPLIT=SPLIT_TOKENS,
            num_warps=4,
        )  # fmt: skip
    return out


def launch_options(tile: int, key_bytes: int) -> dict[str, int]:
    """Warps and stages for a tile of this many rows; no bit depends on them."""
    stages = 5 if key_bytes <= 128 else 3
    if key_bytes > 256 or tile > 64:
        return {"num_warps": 8, "num_stages": stages}
    # A fifth faster on an H200 with two key/value heads of 128 dimensions, the same with eight.
    is_narrow = key_bytes == 256 and tile <= 16
    return {"num_warps": 2 if is_narrow else 4, "num_stages": stages}


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
def _attend_to_keys(
    queries: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, table: tl.tensor,
    positions_M: tl.tensor, head_offset: tl.tensor,
    begin: tl.tensor, end: tl.tensor, last: tl.tensor, scale: tl.tensor,
    M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    largest_M = tl.full([M], float("-inf"), tl.float32)
    sums_MN = tl.zeros([M, BLOCK_N], tl.float32)
    result = tl.zeros([M, D_PAD], tl.float32)
    dims = tl.arange(0, D_PAD)
    for block in range(begin, end, BLOCK_N):
        keys_N = block + tl.arange(0, BLOCK_N)
        places_N = _places(table, keys_N, keys_N <= last, BLOCK_TOKENS)
        offsets = (head_offset + places_N * D)[:, None] + dims[None, :]
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
        sums_MN = sums_MN * decay_M[:, None] + probabilities
        probabilities = probabilities.to(values.dtype)
        result = tl.dot(probabilities, values, result * decay_M[:, None], input_precision="ieee")
        largest_M = new_largest_M

    ones = tl.full([BLOCK_N, 16], 1.0, tl.float32)
    sums_M16 = tl.dot(sums_MN, ones, input_precision="ieee")
    # All columns are the same.
    return largest_M, tl.max(sums_M16, 1), result


@_kernel_of_rows
def _attend(
    q: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, out: tl.tensor, partials: tl.tensor,
    weights: tl.tensor,
    slots_R: tl.tensor, positions_R: tl.tensor, tile_starts_R: tl.tensor, tile_counts_R: tl.tensor,
    block_tables: tl.tensor,
    scale: tl.tensor, num_rows: tl.tensor, q_head_stride: tl.tensor, q_row_stride: tl.tensor,
    cache_stride: tl.tensor, table_stride: tl.tensor,
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

    largest_M, sums_M, result = _attend_to_keys(
        queries, key_cache, value_cache, table, positions_M, key_head * cache_stride,
        begin, end, last, scale,
        M, D, D_PAD, BLOCK_TOKENS, WINDOW, BLOCK_N,
    )  # fmt: skip
    sums_M = tl.where(sums_M > 0.0, sums_M, 1.0)
    # Adding 0 makes every zero positive: its sign would depend on masked blocks.
    result = result / sums_M[:, None] + 0.0
    num_heads = tl.num_programs(1) * G
    outputs_M = rows_M * num_heads + heads_M
    # A branch instead of a constexpr: the same machine code runs with one split and with many.
    if tl.num_programs(2) == 1:
        tl.store(out + outputs_M[:, None] * D + dims[None, :], result, mask=mask)
    else:
        outputs_M += tl.program_id(2).to(tl.int64) * num_rows * num_heads
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
