"""Batch-invariant matrix products on the GPU, and logits in fp32.

cuBLAS sums a row in the same order for any number of rows unless it uses split-K, so split-K is
disabled while the engine runs or captures a pass. That is enough for 16-bit weights; in fp32, small
batches still differ in the last bits.

This is checked when an engine starts: the product of every shape is compared over numbers of rows.
If only those of few rows differ, passes are padded to more; one that still depends on the rows is
replaced by one with a fixed number of rows.

Without split-K, products with few columns are slow for few rows, as they occupy few processors.
Layers with the same input (queries, keys and values; gate and up) are therefore packed into one
product, and small passes are padded to the number of rows that is fast, which costs little: a
decode step is bound by reading the weights.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from sortedrl.models.attention_interface import plain_logprobs

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


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model, without those of derived classes."""
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


class PackedLinears:
    """Linear layers with the same input, computed as one product.

    Their weights become parts of one tensor. They stay the parameters that they are: whoever trains
    them in place trains the packed weights.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Pack layers of one width and dtype, in the order in which a model calls them."""
        self.layers = layers
        self.whole = nn.Linear(
            layers[0].in_features,
            sum(layer.out_features for layer in layers),
            bias=layers[0].bias is not None,
            device="meta",
        )
        self._sizes = [layer.out_features for layer in layers]
        self._rest: Sequence[Tensor] = ()
        self.pack()

    @torch.no_grad()
    def pack(self) -> None:
        """Make the weights of the layers parts of one tensor."""
        self.whole.weight = self._packed([layer.weight for layer in self.layers])
        if self.layers[0].bias is not None:
            self.whole.bias = self._packed([layer.bias for layer in self.layers])

    def _packed(self, parts: Sequence[Tensor]) -> nn.Parameter:
        first = parts[0].detach()
        shape = (sum(self._sizes), *first.shape[1:])
        ends = accumulate((part.numel() for part in parts), initial=0)
        is_packed = all(
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.storage_offset() == end
            for part, end in zip(parts, ends, strict=False)
        )
        # Another engine may have captured the address.
        whole = first.as_strided(shape, first.stride()) if is_packed else torch.cat([*parts])
        for part, view in zip(parts, whole.split(self._sizes), strict=True):
            part.data = view
        return nn.Parameter(whole, requires_grad=False)

    @property
    def is_current(self) -> bool:
        """Whether the layers still have these weights, not other tensors."""
        parts = [(layer.weight, self.whole.weight) for layer in self.layers]
        if self.layers[0].bias is not None:
            parts += [(layer.bias, self.whole.bias) for layer in self.layers]
        return all(
            part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            for part, whole in parts
        )

    def forwards(self, product: Product) -> dict[nn.Module, Product]:
        """Replacements for the layers: the first computes `product` for all of them."""

        def first(x: Tensor) -> Tensor:
            part: Tensor
            part, *self._rest = product(x).split(self._sizes, dim=-1)
            return part

        def other(place: int) -> Product:
            is_last = place == len(self.layers) - 1

            def forward(x: Tensor) -> Tensor:
                del x  # it is that of the first
                part = self._rest[place - 1]
                if is_last:
                    self._rest = ()
                return part

            return forward

        return {layer: other(place) if place else first for place, layer in enumerate(self.layers)}


def with_same_input(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """Linear layers that can be packed: a forward pass calls them on one and the same tensor."""
    calls: list[tuple[Tensor, nn.Linear]] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(layer, nn.Linear):
            calls.append((inputs[0], layer))

    hooks = [layer.register_forward_pre_hook(note) for layer in linear_layers(model)]
    try:
        plain_logprobs(model, [0, 0], after=1)
    except (RuntimeError, TypeError):  # the check of the model says why
        return []
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(layer for _, layer in calls)
    groups: dict[tuple[object, ...], list[nn.Linear]] = {}
    for x, layer in calls:
        # Parameters of other classes, such as shards or quantised ones, have no plain storage.
        if times[layer] == 1 and type(layer.weight) is nn.Parameter:
            kind = _kind(layer)
            key = id(x), kind.width, kind.has_bias, kind.dtype, layer.weight.requires_grad
            groups.setdefault(key, []).append(layer)
    return [layers for layers in groups.values() if len(layers) > 1]


_FIXED_ROWS = 64
_MOST_COMPARED_BYTES = 256 << 20


def invariant_products(
    layers: Iterable[nn.Linear], replaced: Mapping[nn.Module, Product], *, sizes: Sequence[int]
) -> dict[nn.Module, Product]:
    """Replacements for linear layers that are not batch-invariant.

    `replaced` maps layers to the products that they already use. One layer of each shape is tested.
    If rows differ even in products of a fixed size, a warning is logged.
    """
    found: dict[nn.Module, Product] = {}
    for (kind, _), alike in _alike(layers, replaced).items():
        width, height, like = kind.width, kind.height, alike[0].weight
        product = replaced.get(alike[0], alike[0])
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
        found |= {layer: fixed_rows(replaced.get(layer, layer.forward)) for layer in alike}
    return found


def fewest_invariant_rows(
    layers: Iterable[nn.Linear],
    replaced: Mapping[nn.Module, Product],
    *,
    sizes: Sequence[int],
    most: int,
) -> int:
    """The smallest number of rows, up to `most`, from which on products are batch-invariant.

    Padding smaller passes costs less than products in parts. Products that still differ for more
    than `most` rows do not count; they are left to `invariant_products`.
    """
    fewest = min(sizes)
    for (kind, _), alike in _alike(layers, replaced).items():
        width, height, like = kind.width, kind.height, alike[0].weight
        product = replaced.get(alike[0], alike[0])
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


def _alike(
    layers: Iterable[nn.Linear], replaced: Mapping[nn.Module, Product]
) -> dict[tuple[_Kind, bool], list[nn.Linear]]:
    """The layers of each shape, with and without a replacement."""
    alike: dict[tuple[_Kind, bool], list[nn.Linear]] = {}
    for layer in layers:
        alike.setdefault((_kind(layer), layer in replaced), []).append(layer)
    return alike


_REPEATS = 5
_CLEARLY = 1.05


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

    def __init__(self, layers: Sequence[nn.Linear], replaced: Mapping[nn.Module, Product]) -> None:
        """`replaced` maps layers to their replacements."""
        self._counts = Counter(map(_kind, layers))
        self._products = {_kind(layer): replaced.get(layer, layer) for layer in layers}
        self._device = layers[0].weight.device

    @torch.inference_mode()
    def __call__(self, rows: int) -> float:
        """Seconds of all products of a pass with this many rows."""
        return sum(count * self._seconds(kind, rows) for kind, count in self._counts.items())

    def _seconds(self, kind: _Kind, rows: int) -> float:
        x = torch.zeros(rows, kind.width, dtype=kind.dtype, device=self._device)
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
    """The key of products that take the same time; adapters may have another dtype."""

    width: int
    height: int
    has_bias: bool
    dtype: torch.dtype


def _kind(layer: nn.Linear) -> _Kind:
    has_bias = layer.bias is not None
    return _Kind(layer.in_features, layer.out_features, has_bias, layer.weight.dtype)
