"""Matrix products on the GPU: the same bits for a row in any batch, and logits in fp32.

cuBLAS sums a row in the same order for any number of rows, as long as it does not use split-K: so
split-K is disabled while the engine runs or captures a pass. That holds for 16-bit weights; in
fp32, small batches still differ in the last bits.

That is checked when an engine starts: the product of every shape is compared over numbers of rows.
One that depends on them is replaced by one that always has the same number of rows.

With sums that may not be split, the products for few rows can be several times slower than those
for a hundred. So the products of the model are timed once for each size, and a pass with fewer rows
than pays is padded, which costs little: a decode step is bound by reading the weights.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

Product = Callable[[Tensor], Tensor]

_LOG = logging.getLogger(__name__)
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


_FIXED_ROWS = 64
_MOST_COMPARED_BYTES = 256 << 20


def invariant_products(
    model: nn.Module, replaced: Mapping[nn.Module, Product], *, sizes: Sequence[int]
) -> dict[nn.Module, Product]:
    """Replacements for the linear layers whose rows have other bits at another number of rows.

    `replaced` maps layers to the products that they use already. One layer of each shape is tried.
    If rows differ even in products of a fixed size, that is logged as a warning.
    """
    alike: dict[tuple[_Kind, bool], list[nn.Linear]] = {}
    for layer in model.modules():
        if type(layer) is nn.Linear:
            alike.setdefault((_kind(layer), layer in replaced), []).append(layer)
    found: dict[nn.Module, Product] = {}
    for (kind, _), layers in alike.items():
        width, height, like = kind.width, kind.height, layers[0].weight
        product = replaced.get(layers[0], layers[0])
        if _is_invariant(product, like, width=width, height=height, sizes=sizes):
            continue
        if not _is_invariant(fixed_rows(product), like, width=width, height=height, sizes=sizes):
            _LOG.warning(
                "products of %s x %s weights in %s give a row other bits in another batch on %s: "
                "answers may depend on what else is generated, and verification of unchanged "
                "weights may reject tokens; use another dtype or another build of torch",
                width, height, like.dtype, like.device,
            )  # fmt: skip
            continue
        _LOG.info(
            "products of %s x %s weights depend on the number of rows; computing %s rows at a time",
            width, height, _FIXED_ROWS,
        )  # fmt: skip
        found |= {layer: fixed_rows(replaced.get(layer, layer.forward)) for layer in layers}
    return found


def fixed_rows(product: Product) -> Product:
    """A product in parts of always the same number of rows, so that nothing depends on how many."""

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        padded = pad(rows, (0, 0, 0, -len(rows) % _FIXED_ROWS))
        parts = [product(part) for part in padded.split(_FIXED_ROWS)]
        result: Tensor = torch.cat(parts)[: len(rows)].unflatten(0, x.shape[:-1])
        return result

    # Compiled, the loop would be unrolled anew for every number of rows.
    outside_of_graphs: Product = torch.compiler.disable(forward)
    return outside_of_graphs


@torch.inference_mode()
def _is_invariant(
    product: Product, like: Tensor, *, width: int, height: int, sizes: Sequence[int]
) -> bool:
    """Whether rows of random numbers come out with the same bits at all of these sizes."""
    most = max(min(sizes), _MOST_COMPARED_BYTES // (4 * height))
    sizes = sorted(size for size in sizes if size <= most)
    generator = torch.Generator(like.device).manual_seed(width)
    x = torch.randn(sizes[-1], width, generator=generator, device=like.device).to(like.dtype)
    whole = product(x)
    return all(torch.equal(product(x[:size]), whole[:size]) for size in sizes[:-1])


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
        self._products: dict[_Kind, Callable[[Tensor], Tensor]] = {}
        for layer in linears:
            self._products[_kind(layer)] = replaced.get(layer, layer)
        self._like = next(model.parameters())

    @torch.inference_mode()
    def __call__(self, rows: int) -> float:
        """Seconds of all products of a pass with this many rows."""
        return sum(count * self._seconds(kind, rows) for kind, count in self._counts.items())

    def _seconds(self, kind: _Kind, rows: int) -> float:
        x = torch.zeros(rows, kind.width, dtype=kind.dtype, device=self._like.device)
        product = self._products[kind]
        product(x)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(_REPEATS):
            product(x)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000 / _REPEATS


class _Kind(NamedTuple):
    """What products have in common that take the same time; adapters may have their own dtype."""

    width: int
    height: int
    has_bias: bool
    dtype: torch.dtype


def _kind(layer: nn.Linear) -> _Kind:
    has_bias = layer.bias is not None
    return _Kind(layer.in_features, layer.out_features, has_bias, layer.weight.dtype)
