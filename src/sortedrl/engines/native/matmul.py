"""Matrix products on the GPU: the same bits for a row in any batch, and logits in fp32.

cuBLAS sums a row in the same order for any number of rows, as long as it does not use split-K: so
split-K is disabled while the engine runs or captures a pass. That holds for 16-bit weights; in
fp32, small batches still differ in the last bits.

With sums that may not be split, the products for few rows can be several times slower than those
for a hundred. So the products of the model are timed once for each size, and a pass with fewer rows
than pays is padded, which costs little: a decode step is bound by reading the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_cuda = torch.backends.cuda


@contextmanager
def no_split_k() -> Iterator[None]:
    """Disable split-K in cuBLAS inside the block."""
    matmul = _cuda.matmul
    library = _cuda.preferred_blas_library()
    bf16 = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    fp16 = (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction_split_k,
    )
    _cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = bf16
        matmul.allow_fp16_reduced_precision_reduction = fp16
        _cuda.preferred_blas_library(library)


def fp32_logits(output: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The output layer with its sums kept in fp32, not rounded back to the weights' type."""
    bias: Tensor | None = output.bias

    def forward(x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return linear(x, output.weight, bias)
        logits = torch.mm(x.flatten(0, -2), output.weight.t(), out_dtype=torch.float32)
        logits = logits if bias is None else logits + bias.float()
        result: Tensor = logits.unflatten(0, x.shape[:-1])
        return result

    return forward


def widened_fp32_logits(output: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The same for a CPU without such a product: the weights are converted once."""
    weight = output.weight.detach().float()
    bias: Tensor | None = output.bias
    wide = bias.detach().float() if bias is not None else None
    return lambda x: linear(x.float(), weight, wide)


_REPEATS = 5
_CLEARLY = 1.05


def fewest_rows(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest size that no larger one beats clearly.

    >>> fewest_rows((8, 64, 96, 128), {8: 8.2, 64: 8.3, 96: 2.8, 128: 2.9}.__getitem__)
    96
    >>> fewest_rows((8, 64, 96, 128), {8: 1.1, 64: 1.2, 96: 1.2, 128: 1.3}.__getitem__)
    8
    """
    taken = [seconds(size) for size in sizes]
    return next(
        size for place, size in enumerate(sizes) if taken[place] <= _CLEARLY * min(taken[place:])
    )


class ProductTimer:
    """Times the matrix products of one pass through a model on the GPU."""

    def __init__(self, model: nn.Module, replaced: dict[nn.Module, Callable[..., Tensor]]) -> None:
        """`replaced` maps layers to their replacements."""
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        self._counts = Counter(_kind(layer) for layer in linears)
        self._products: dict[tuple[int, int, bool], Callable[[Tensor], Tensor]] = {}
        for layer in linears:
            self._products[_kind(layer)] = replaced.get(layer, layer)
        self._like = next(model.parameters())

    @torch.inference_mode()
    def __call__(self, rows: int) -> float:
        """Seconds of all products of a pass with this many rows."""
        return sum(count * self._seconds(kind, rows) for kind, count in self._counts.items())

    def _seconds(self, kind: tuple[int, int, bool], rows: int) -> float:
        x = torch.zeros(rows, kind[0], dtype=self._like.dtype, device=self._like.device)
        product = self._products[kind]
        product(x)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(_REPEATS):
            product(x)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000 / _REPEATS


def _kind(layer: nn.Linear) -> tuple[int, int, bool]:
    return layer.in_features, layer.out_features, layer.bias is not None
