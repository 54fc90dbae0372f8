"""Matrix products that depend on the number of rows are noticed and replaced, or reported."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from sortedrl.engines.native.hf_model import GpuKernels
from sortedrl.engines.native.matmul import (
    ProductTimer,
    chosen_products,
    fewest_invariant_rows,
    fixed_rows,
    invariant_products,
)

SIZES = (8, 16, 64, 96, 128, 256)


class Layers(nn.Module):
    """Three layers of two shapes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 48)
        self.again = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)

    def products(self, product):
        """The same kind of product for every layer."""
        return {layer: product(layer) for layer in (self.up, self.again, self.down)}


def row_by_row(layer):
    """Every row alone: nothing can depend on the others."""
    return lambda x: torch.cat([linear(row, layer.weight, layer.bias) for row in x.split(1)])


def with_a_split_for_few_rows(layer):
    """As cuBLAS with split-K: the sum over K is cut in two where there are few rows."""

    def product(x):
        if len(x) >= 96:
            return row_by_row(layer)(x)
        half = x.shape[1] // 2
        left = linear(x[:, :half], layer.weight[:, :half], layer.bias)
        return torch.cat(
            [part + linear(row[:, half:], layer.weight[:, half:])
             for part, row in zip(left.split(1), x.split(1), strict=True)]
        )  # fmt: skip

    return product


def test_products_that_do_not_depend_on_the_rows_stay():
    model = Layers()
    assert invariant_products(model, model.products(row_by_row), sizes=SIZES) == {}


def test_a_product_that_depends_on_the_rows_is_replaced_by_one_that_does_not(caplog):
    model = Layers()
    products = model.products(row_by_row) | {
        layer: with_a_split_for_few_rows(layer) for layer in (model.up, model.again)
    }
    with caplog.at_level(logging.WARNING):
        found = invariant_products(model, products, sizes=SIZES)
    assert found.keys() == {model.up, model.again}
    assert not caplog.records
    x = torch.randn(200, 32)
    whole = found[model.again](x)
    torch.testing.assert_close(whole, model.again(x))
    for rows in (1, 7, 64, 65, 130):
        assert torch.equal(found[model.again](x[:rows]), whole[:rows])
    wrong = products[model.again]
    assert not torch.equal(wrong(x[:7]), wrong(x)[:7]), "else this shows nothing"


def test_products_that_differ_for_few_rows_only_are_padded_instead_of_replaced():
    model = Layers()
    products = model.products(row_by_row) | {model.down: with_a_split_for_few_rows(model.down)}
    fewest = fewest_invariant_rows(model, products, sizes=SIZES, most=128)
    assert fewest == 96
    larger = [size for size in SIZES if size >= fewest]
    assert invariant_products(model, products, sizes=larger) == {}
    # Padding to so many rows would cost too much: it is left to be replaced.
    assert fewest_invariant_rows(model, products, sizes=SIZES, most=64) == min(SIZES)
    assert invariant_products(model, products, sizes=SIZES).keys() == {model.down}


def test_a_product_that_is_never_the_same_is_reported(caplog):
    model = Layers()
    generator = torch.Generator().manual_seed(0)

    def noisy(layer):
        return lambda x: layer(x) + torch.rand(1, generator=generator)

    with caplog.at_level(logging.WARNING):
        assert invariant_products(model, model.products(noisy), sizes=SIZES) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "32 x 48 weights in torch.float32 are not batch-invariant" in caplog.text


class Clock:
    """An event of a GPU that takes a second from one to the next."""

    def __init__(self, **_):
        """Never recorded."""

    def record(self):
        """Nothing to do."""

    def synchronize(self):
        """Nothing to do."""

    def elapsed_time(self, _):
        """Milliseconds."""
        return 1000.0


def test_layers_of_two_precisions_are_tried_each_in_its_own(monkeypatch):
    """peft keeps adapters in float32 beside weights of 16 bits."""
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    model = Layers()
    model.again.bfloat16()
    seen = []

    def noted(layer):
        def product(x):
            seen.append((layer, x.dtype))
            return row_by_row(layer)(x)

        return product

    products = model.products(noted)
    assert invariant_products(model, products, sizes=SIZES) == {}
    assert ProductTimer(model, products)(8) == pytest.approx(3 / 5)
    assert set(seen) == {(layer, layer.weight.dtype) for layer in products}


@pytest.mark.parametrize("shape", [(1, 5, 32), (130, 32), (2, 3, 4, 32)])
def test_a_product_of_fixed_rows_keeps_the_shape_of_its_input(shape):
    layer = nn.Linear(32, 48)
    x = torch.randn(shape)
    torch.testing.assert_close(fixed_rows(layer)(x), layer(x))


class Ours:
    """A product of our own, and how long it takes."""

    def __init__(self, layer, product=row_by_row):
        self.layer = layer
        self.product = product(layer)

    def __call__(self, x):
        return self.product(x)


def chosen(model, kernels, *, ours=Ours, seconds=None):
    return chosen_products(
        model, {}, kernels=kernels, ours=ours, sizes=SIZES, decode_sizes=(64, 96), seconds=seconds
    )


def half_layers():
    return Layers().to(torch.bfloat16)


def test_the_library_computes_all_products_unless_told_otherwise():
    assert chosen(half_layers(), GpuKernels()) == {}


def test_our_products_are_for_16_bit_weights_and_the_shapes_that_are_named():
    model = half_layers()
    kernels = GpuKernels(products="fixed_split")
    assert chosen(model, kernels).keys() == {model.up, model.again, model.down}
    assert chosen(Layers(), kernels) == {}
    some = GpuKernels(products="fixed_split", shapes=frozenset({(48, 32)}))
    assert chosen(model, some).keys() == {model.up, model.again}


def test_products_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="one of library, fixed_split, fastest, got 'fast'"):
        GpuKernels(products="fast")
    with pytest.raises(ValueError, match="shapes need products = 'fixed_split'"):
        GpuKernels(products="fastest", shapes=frozenset())


def test_the_faster_product_is_taken_for_a_shape_and_all_its_rows():
    model = half_layers()
    rows_timed = set()

    def seconds(products, x):
        layers = [product.layer if type(product) is Ours else product for product in products]
        assert layers in ([model.up, model.again], [model.down])
        rows_timed.add(len(x))
        is_faster = type(products[0]) is Ours and model.up in layers
        return 1e-6 if is_faster else 2e-6

    found = chosen(model, GpuKernels(products="fastest"), seconds=seconds)
    assert found.keys() == {model.up, model.again}
    assert rows_timed == {64, 96, max(SIZES)}


def test_a_product_of_ours_that_depends_on_the_rows_is_not_taken(caplog):
    model = half_layers()
    with caplog.at_level(logging.WARNING):
        found = chosen(
            model,
            GpuKernels(products="fixed_split"),
            ours=lambda layer: Ours(layer, with_a_split_for_few_rows),
        )
    assert found == {}
    assert "keeping those of the library" in caplog.text


def test_the_benchmark_of_the_engine_notes_the_products(monkeypatch):
    """Its numbers mean something else with other products."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    from engine_peers import native
    from engine_peers.peer import Workload

    def opened(*_, **__):
        invariant_products(model, model.products(with_a_split_for_few_rows), sizes=SIZES)

    model = Layers()
    monkeypatch.setattr(native, "NativeEngine", opened)
    workload = Workload(
        prompts=[[3]], lengths=[1], slots=1, device="cpu", dtype="float32", threads=1
    )
    note = native.Native(model, workload, cache_bytes=1).note
    assert note.startswith("log-probabilities included; products of 32 x 48 weights depend")
