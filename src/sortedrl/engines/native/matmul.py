"""Batch-invariant matrix products on the GPU, and logits in fp32.

cuBLAS sums a row in the same order for any number of rows unless it uses split-K, so split-K is
disabled while the engine runs or captures a pass. That is enough for 16-bit weights; in fp32, small
batches still differ in the last bits.

This is checked when an engine starts: the product of every shape is compared over numbers of rows.
If only those of few rows differ, passes are padded to more; one that still depends on the rows is
replaced by one with a fixed number of rows.

Without split-K, products for few rows can be several times slower than those for a hundred. The
products of the model are therefore timed once per size, and smaller passes are padded, which costs
little: a decode step is bound by reading the weights.

`product_kernels` can replace cuBLAS: its split of K is the same for any number of rows. Each shape
of weights uses one product throughout, because two products differ in the last bits.
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

from sortedrl.engines.native.hf_model import GpuKernels

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
    """The output layer with fp32 accumulation and fp32 results."""
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
    """Replacements for linear layers that are not batch-invariant.

    `replaced` maps layers to the products that they already use. One layer of each shape is tested.
    If rows differ even in products of a fixed size, a warning is logged.
    """
    found: dict[nn.Module, Product] = {}
    for (kind, _), layers in _alike(model, replaced).items():
        width, height, like = kind.width, kind.height, layers[0].weight
        product = replaced.get(layers[0], layers[0])
        if _is_invariant(product, like, width=width, height=height, sizes=sizes):
            continue
        if not _is_invariant(fixed_rows(product), like, width=width, height=height, sizes=sizes):
            _LOG.warning(
                "products of %s x %s weights in %s are not batch-invariant on %s: "
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


def fewest_invariant_rows(
    model: nn.Module, replaced: Mapping[nn.Module, Product], *, sizes: Sequence[int], most: int
) -> int:
    """The smallest number of rows, up to `most`, from which on products are batch-invariant.

    Padding smaller passes costs less than products in parts. Products that still differ for more
    than `most` rows do not count; they are left to `invariant_products`.
    """
    fewest = min(sizes)
    for (kind, _), layers in _alike(model, replaced).items():
        width, height, like = kind.width, kind.height, layers[0].weight
        product = replaced.get(layers[0], layers[0])
        for first in sorted(size for size in sizes if size <= most):
            larger = [size for size in sizes if size >= first]
            if _is_invariant(product, like, width=width, height=height, sizes=larger):
                fewest = max(fewest, first)
                break
    return fewest


def fixed_rows(product: Product) -> Product:
    """A product in parts with a fixed number of rows, which makes it batch-invariant."""

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        padded = pad(rows, (0, 0, 0, -len(rows) % _FIXED_ROWS))
        parts = [product(part) for part in padded.split(_FIXED_ROWS)]
        result: Tensor = torch.cat(parts)[: len(rows)].unflatten(0, x.shape[:-1])
        return result

    # If compiled, the loop would be unrolled again for every number of rows.
    outside_of_graphs: Product = torch.compiler.disable(forward)
    return outside_of_graphs


def _most_compared(sizes: Sequence[int], height: int) -> int:
    """Inputs with a result of limited size."""
    return max(min(sizes), _MOST_COMPARED_BYTES // (4 * height))


@torch.inference_mode()
def _is_invariant(
    product: Product, like: Tensor, *, width: int, height: int, sizes: Sequence[int]
) -> bool:
    """Whether random rows have the same bits at all of these sizes."""
    sizes = sorted(size for size in sizes if size <= _most_compared(sizes, height))
    generator = torch.Generator(like.device).manual_seed(width)
    x = torch.randn(sizes[-1], width, generator=generator, device=like.device).to(like.dtype)
    whole = product(x)
    return all(torch.equal(product(x[:size]), whole[:size]) for size in sizes[:-1])


_REPEATS = 5
_CLEARLY = 1.05
_TIMED_LAYERS = 8
_SHARE_OF_BIG_PASSES = 1 / 16


def graphed_seconds(products: Sequence[Product], x: Tensor) -> float:
    """Seconds of one of these products on the GPU, without the host's time to launch it.

    They alternate, so that weights come from memory as in a pass.
    """
    for product in products:
        product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    graph.replay()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(_REPEATS):
        graph.replay()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000 / _REPEATS / len(products)


def is_clearly_faster(
    ours: Mapping[int, float], library: Mapping[int, float], *, decode_sizes: Sequence[int]
) -> bool:
    """Whether our product clearly speeds up passes, given seconds by number of rows.

    Decode passes count fully, larger ones by their share of a run. A pass may be padded, so no size
    takes longer than a larger one.

    >>> library = {32: 20e-6, 128: 9e-6, 2048: 60e-6}
    >>> is_clearly_faster({32: 8e-6, 128: 8e-6, 2048: 64e-6}, library, decode_sizes=(32, 128))
    True
    >>> is_clearly_faster({32: 8e-6, 128: 9e-6, 2048: 90e-6}, library, decode_sizes=(32, 128))
    False
    """

    def cost(seconds: Mapping[int, float]) -> float:
        padded = {rows: min(seconds[more] for more in seconds if more >= rows) for rows in seconds}
        return sum(
            taken if rows in decode_sizes else _SHARE_OF_BIG_PASSES * taken
            for rows, taken in padded.items()
        )

    return _CLEARLY * cost(ours) < cost(library)


@torch.inference_mode()
def chosen_products(
    model: nn.Module,
    replaced: Mapping[nn.Module, Product],
    *,
    kernels: GpuKernels,
    ours: Callable[[nn.Linear], Product],
    sizes: Sequence[int],
    decode_sizes: Sequence[int],
    seconds: Callable[[Sequence[Product], Tensor], float] = graphed_seconds,
) -> dict[nn.Module, Product]:
    """Our products for the layers that use them: all layers of a shape, or none.

    `replaced` maps layers to the products that they already use. A shape for which ours are not
    batch-invariant keeps its product, with a warning.
    """
    if kernels.products == "library":
        return {}
    found: dict[nn.Module, Product] = {}
    for (kind, _), layers in _alike(model, replaced).items():
        width, height, like = kind.width, kind.height, layers[0].weight
        is_wanted = kernels.shapes is None or (height, width) in kernels.shapes
        if not is_wanted or kind.dtype not in (torch.float16, torch.bfloat16):
            continue
        products: dict[nn.Module, Product] = {layer: ours(layer) for layer in layers}
        if not _is_invariant(products[layers[0]], like, width=width, height=height, sizes=sizes):
            _LOG.warning(
                "our products of %s x %s weights are not batch-invariant on %s; "
                "keeping those of the library", width, height, like.device,
            )  # fmt: skip
            continue
        if kernels.products == "fastest":
            biggest = max(size for size in sizes if size <= _most_compared(sizes, height))
            some = layers[:_TIMED_LAYERS]
            timed: list[dict[int, float]] = [{}, {}]
            for rows in {*decode_sizes, biggest}:
                x = torch.zeros(rows, width, dtype=like.dtype, device=like.device)
                timed[0][rows] = seconds([products[layer] for layer in some], x)
                timed[1][rows] = seconds([replaced.get(layer, layer) for layer in some], x)
            is_taken = is_clearly_faster(*timed, decode_sizes=decode_sizes)
            _LOG.info(
                "products of %s x %s weights by %s: %s us with ours, %s us with the library",
                width, height, "ours" if is_taken else "the library",
                *({rows: round(1e6 * each[rows], 1) for rows in sorted(each)} for each in timed),
            )  # fmt: skip
            if not is_taken:
                continue
        found |= products
    return found


def _alike(
    model: nn.Module, replaced: Mapping[nn.Module, Product]
) -> dict[tuple[_Kind, bool], list[nn.Linear]]:
    """The linear layers of each shape, with and without a replacement."""
    alike: dict[tuple[_Kind, bool], list[nn.Linear]] = {}
    for layer in model.modules():
        if type(layer) is nn.Linear:
            alike.setdefault((_kind(layer), layer in replaced), []).append(layer)
    return alike


def fewest_rows(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest size that no larger one clearly beats.

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

    def __init__(
        self,
        model: nn.Module,
        replaced: dict[nn.Module, Callable[..., Tensor]],
        *,
        is_graphed: bool = False,
    ) -> None:
        """`replaced` maps layers to their replacements.

        Products with a slow launch need `is_graphed`: a pass replays them in a graph.
        """
        self._is_graphed = is_graphed
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
        if self._is_graphed:
            return graphed_seconds([product], x)
        product(x)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(_REPEATS):
            product(x)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000 / _REPEATS


class _Kind(NamedTuple):
    """The key of products that take the same time; adapters may have another dtype."""

    width: int
    height: int
    has_bias: bool
    dtype: torch.dtype


def _kind(layer: nn.Linear) -> _Kind:
    has_bias = layer.bias is not None
    return _Kind(layer.in_features, layer.out_features, has_bias, layer.weight.dtype)
