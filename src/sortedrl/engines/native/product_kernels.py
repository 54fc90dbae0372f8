"""Triton kernels for batch-invariant matrix products.

The invariant: the sum over K is cut into slices that depend on the shape of the weights alone. A
slice is summed from 0 in blocks of `BLOCK_K`, and slices are added from 0 in the order of K, in
fp32. Everything else is free: how many rows and columns a tile has, its warps, its stages, and
which of two schedules runs.

- *parallel*, for few rows: a program for every tile and slice writes its sums, and a second kernel
adds them in order, so that a product with few columns still fills the GPU.
- *serial*, for many rows: a program for every tile walks the slices with a second accumulator.

The weights are the left operand, because Hopper's matrix instructions need 64 rows on the left
and accept as few as 8 on the right.

Not measured on a GPU yet: the engine uses these kernels only on request.

Axes: R rows, N columns (outputs), K inputs, S slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_K = 64

_MOST_SLICES = 8
_SHORTEST_SLICE = 8 * BLOCK_K
_ENOUGH_PROGRAMS = 128
_COLUMNS = 128

_kernel: Callable[[Callable[..., Any]], Any] = triton.jit
# No specialisation for 1 or multiples of 16: the number of rows changes from pass to pass.
_kernel_of_rows: Callable[[Callable[..., Any]], Any] = triton.jit(
    do_not_specialize=["num_rows", "slices", "slice_blocks"]
)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The part of the result that a program computes, and its resources; no bit depends on it."""

    columns: int
    rows: int
    warps: int
    stages: int
    is_parallel: bool
    """Whether slices are summed by separate programs."""
    is_tma: bool = False
    """Whether TMA loads weights and inputs; rows must be multiples of 16 bytes.

    The bits are the same, as only the path into shared memory differs.
    """

    def stage_bytes(self, element_bytes: int = 2) -> int:
        """Shared memory for the weights and inputs in flight."""
        return self.stages * (self.columns + self.rows) * BLOCK_K * element_bytes


def num_slices(columns: int, inputs: int) -> int:
    """The number of slices of the sum over K for weights `[columns, inputs]`.

    Enough for about one program per processor of Hopper (132), as long as slices are not too short.
    It must not depend on the GPU or the rows, because the bits of the sums depend on it.

    >>> [num_slices(*shape) for shape in ((4096, 4096), (1024, 4096), (14336, 4096))]
    [4, 8, 1]
    >>> [num_slices(*shape) for shape in ((4096, 14336), (128256, 4096), (576, 576))]
    [4, 1, 1]
    """
    slices = 1
    while (
        slices < _MOST_SLICES
        and 2 * slices * _SHORTEST_SLICE <= inputs
        and 2 * slices * triton.cdiv(columns, _COLUMNS) <= _ENOUGH_PROGRAMS
    ):
        slices *= 2
    return slices


def tile_for(rows: int, *, columns: int, slices: int) -> Tile:
    """The tile for this many rows.

    >>> tile_for(3, columns=4096, slices=4)
    Tile(columns=128, rows=16, warps=4, stages=6, is_parallel=True, is_tma=False)
    >>> tile_for(4096, columns=4096, slices=4)
    Tile(columns=128, rows=128, warps=8, stages=4, is_parallel=False, is_tma=False)
    """
    height = min(128, max(16, triton.next_power_of_2(rows)))
    programs = triton.cdiv(rows, height) * triton.cdiv(columns, _COLUMNS)
    return Tile(
        columns=_COLUMNS,
        rows=height,
        warps=8 if height == 128 else 4,
        stages=4 if height == 128 else 6,
        is_parallel=slices > 1 and programs < _ENOUGH_PROGRAMS,
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    slices: int,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product `[R, N]` of rows `[R, K]` and weights `[N, K]`, plus a bias `[N]`.

    The bits of a row depend only on the row, the weights and `slices`.
    """
    num_rows, inputs = x.shape
    columns = len(weight)
    assert weight.shape[1] == inputs
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or bias.is_contiguous()
    tile = tile_for(num_rows, columns=columns, slices=slices) if tile is None else tile
    slice_blocks = triton.cdiv(triton.cdiv(inputs, slices), BLOCK_K)
    is_parallel = tile.is_parallel and slices > 1
    out = x.new_empty(num_rows, columns, dtype=out_dtype or weight.dtype)
    sums = out
    if is_parallel:
        sums = x.new_empty(slices, num_rows, columns, dtype=torch.float32)
    added = bias if bias is not None else weight
    left: Tensor | TensorDescriptor = weight
    right: Tensor | TensorDescriptor = x
    is_tma = tile.is_tma and _takes_tma(x) and _takes_tma(weight)
    if is_tma:
        left = TensorDescriptor.from_tensor(weight, [tile.columns, BLOCK_K])
        right = TensorDescriptor.from_tensor(x, [tile.rows, BLOCK_K])
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(columns, tile.columns)
    _multiply[(tiles, slices if is_parallel else 1)](
        right, left, added, sums,
        num_rows, columns, inputs, x.stride(0), weight.stride(0), slices, slice_blocks,
        BLOCK_N=tile.columns, BLOCK_R=tile.rows, BLOCK_K=BLOCK_K,
        IS_PARALLEL=is_parallel, IS_ONE_SLICE=slices == 1,
        IS_EVEN=inputs % (slices * BLOCK_K) == 0, HAS_BIAS=bias is not None, IS_TMA=is_tma,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if is_parallel:
        _add_slices[(num_rows, triton.cdiv(columns, _MERGED))](
            sums, added, out, num_rows, columns, slices,
            BLOCK_N=_MERGED, HAS_BIAS=bias is not None,
            num_warps=4,
        )  # fmt: skip
    return out


_MERGED = 512


def _takes_tma(operand: Tensor) -> bool:
    """Whether TMA can address rows of this tensor."""
    row_bytes = operand.stride(0) * operand.element_size()
    return row_bytes % 16 == 0 and operand.data_ptr() % 16 == 0


@torch.library.custom_op("sortedrl::fixed_split_product", mutates_args=())
def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_wide: bool) -> Tensor:
    out = multiply(
        x.flatten(0, -2),
        weight,
        bias,
        slices=num_slices(*weight.shape),
        out_dtype=torch.float32 if is_wide else None,
    )
    shaped: Tensor = out.unflatten(0, x.shape[:-1])
    return shaped


@_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, is_wide: bool) -> Tensor:
    dtype = torch.float32 if is_wide else weight.dtype
    return x.new_empty((*x.shape[:-1], len(weight)), dtype=dtype)


def fixed_split(layer: nn.Linear, *, is_wide: bool) -> Callable[[Tensor], Tensor]:
    """The product of a linear layer with these kernels; `is_wide` keeps it in fp32, for logits.

    It is a single custom op for torch.compile, which would otherwise specialise on numbers of rows.
    """
    bias: Tensor | None = layer.bias

    def forward(x: Tensor) -> Tensor:
        out: Tensor = _product(x, layer.weight, bias, is_wide)
        return out

    return forward


@_kernel
def _slice_sums(
    x: tl.tensor, weight: tl.tensor, index: tl.tensor,
    first_row: tl.tensor, first_column: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, num_inputs: tl.tensor,
    x_stride: tl.tensor, weight_stride: tl.tensor, slice_blocks: tl.tensor,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_TMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    begin = index * slice_blocks * BLOCK_K
    end = tl.minimum(begin + slice_blocks * BLOCK_K, num_inputs)
    sums_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    if IS_TMA:
        # Zeros are read beyond the end.
        for start in range(begin, end, BLOCK_K):
            weights_NK = weight.load([first_column, start])
            inputs_RK = x.load([first_row, start])
            sums_NR = tl.dot(weights_NK, tl.trans(inputs_RK), sums_NR, input_precision="ieee")
    else:
        # Beyond the end, the last row or column is read, and nothing is written.
        columns_N = tl.minimum(first_column + tl.arange(0, BLOCK_N), num_columns - 1)
        rows_R = tl.minimum(first_row + tl.arange(0, BLOCK_R), num_rows - 1)
        inner_K = tl.arange(0, BLOCK_K)
        weights = weight + columns_N.to(tl.int64)[:, None] * weight_stride + inner_K[None, :]
        inputs = x + rows_R.to(tl.int64)[:, None] * x_stride + inner_K[None, :]
        for start in range(begin, end, BLOCK_K):
            if IS_EVEN:
                weights_NK = tl.load(weights + start)
                inputs_RK = tl.load(inputs + start)
            else:
                mask_1K = (start + inner_K < end)[None, :]
                weights_NK = tl.load(weights + start, mask=mask_1K, other=0.0)
                inputs_RK = tl.load(inputs + start, mask=mask_1K, other=0.0)
            sums_NR = tl.dot(weights_NK, tl.trans(inputs_RK), sums_NR, input_precision="ieee")
    return sums_NR


@_kernel_of_rows
def _multiply(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, num_inputs: tl.tensor,
    x_stride: tl.tensor, weight_stride: tl.tensor, slices: tl.tensor, slice_blocks: tl.tensor,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_PARALLEL: tl.constexpr, IS_ONE_SLICE: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_TMA: tl.constexpr,
) -> None:  # fmt: skip
    # Tiles with the same weights are adjacent, so that the weights are read once.
    row_tiles = tl.cdiv(num_rows, BLOCK_R)
    first_column = tl.program_id(0) // row_tiles * BLOCK_N
    first_row = tl.program_id(0) % row_tiles * BLOCK_R
    columns_N = first_column + tl.arange(0, BLOCK_N)
    rows_R = first_row + tl.arange(0, BLOCK_R)
    mask = (columns_N < num_columns)[:, None] & (rows_R < num_rows)[None, :]
    targets = rows_R.to(tl.int64)[None, :] * num_columns + columns_N[:, None]

    if IS_PARALLEL or IS_ONE_SLICE:
        total_NR = _slice_sums(
            x, weight, tl.program_id(1), first_row, first_column,
            num_rows, num_columns, num_inputs, x_stride, weight_stride, slice_blocks,
            BLOCK_N, BLOCK_R, BLOCK_K, IS_EVEN, IS_TMA,
        )  # fmt: skip
        targets += tl.program_id(1).to(tl.int64) * num_rows * num_columns
    else:
        total_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for index in range(slices):
            total_NR += _slice_sums(
                x, weight, index, first_row, first_column,
                num_rows, num_columns, num_inputs, x_stride, weight_stride, slice_blocks,
                BLOCK_N, BLOCK_R, BLOCK_K, IS_EVEN, IS_TMA,
            )  # fmt: skip
    if HAS_BIAS and not IS_PARALLEL:
        total_NR += tl.load(bias + tl.minimum(columns_N, num_columns - 1)).to(tl.float32)[:, None]
    tl.store(out + targets, total_NR, mask=mask)


@_kernel_of_rows
def _add_slices(
    sums: tl.tensor, bias: tl.tensor, out: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, slices: tl.tensor,
    BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    columns_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_N = columns_N < num_columns
    places_N = tl.program_id(0).to(tl.int64) * num_columns + columns_N
    total_N = tl.zeros([BLOCK_N], tl.float32)
    for index in range(slices):
        offset = tl.cast(index, tl.int64) * num_rows * num_columns
        total_N += tl.load(sums + offset + places_N, mask=mask_N, other=0.0)
    if HAS_BIAS:
        total_N += tl.load(bias + columns_N, mask=mask_N, other=0.0).to(tl.float32)
    tl.store(out + places_N, total_N, mask=mask_N)
