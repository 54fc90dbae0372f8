"""Matrix products that depend on the number of rows are noticed and replaced, or reported."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from native_worlds import ARCHITECTURES, tiny_model, trained_a_little
from sortedrl.config.train import Lora
from sortedrl.engines.native.matmul import (
    PackedLinears,
    ProductTimer,
    fewest_invariant_rows,
    fixed_rows,
    invariant_products,
    with_same_input,
)
from sortedrl.training.lora import add_adapters

SIZES = (8, 16, 64, 96, 128, 256)


class Layers:
    """Three layers of two shapes."""

    def __init__(self):
        torch.manual_seed(0)
        self.up = nn.Linear(32, 48)
        self.again = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)

    def __iter__(self):
        return iter((self.up, self.again, self.down))

    def products(self, product):
        """The same kind of product for every layer."""
        return {layer: product(layer) for layer in self}


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
    assert ProductTimer([*model], products)(8) == pytest.approx(3 / 5)
    assert set(seen) == {(layer, layer.weight.dtype) for layer in products}


@pytest.mark.parametrize("shape", [(1, 5, 32), (130, 32), (2, 3, 4, 32)])
def test_a_product_of_fixed_rows_keeps_the_shape_of_its_input(shape):
    layer = nn.Linear(32, 48)
    x = torch.randn(shape)
    torch.testing.assert_close(fixed_rows(layer)(x), layer(x))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_with_the_same_input_are_found(architecture):
    model = tiny_model(architecture)
    names = {layer: name for name, layer in model.named_modules()}
    found = [[names[layer] for layer in layers] for layers in with_same_input(model)]
    assert found == [
        [f"model.layers.{number}.{part}_proj" for part in parts]
        for number in range(3)
        for parts in (
            ("self_attn.q", "self_attn.k", "self_attn.v"),
            ("mlp.gate", "mlp.up"),
        )
    ]


def test_layers_that_are_trained_and_layers_that_are_not_are_packed_apart():
    model = tiny_model("qwen2")
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(requires_grad=False)
    names = {layer: name.split(".")[-1] for name, layer in model.named_modules()}
    first = with_same_input(model)[0]
    assert [names[layer] for layer in first] == ["q_proj", "v_proj"]


def test_adapters_are_packed_apart_from_the_layers_that_they_adapt():
    model = tiny_model()
    add_adapters(model, Lora(rank=2), seed=0)
    names = {layer: name for name, layer in model.named_modules()}
    for layers in with_same_input(model):
        assert len({names[layer].split(".")[-1] for layer in layers}) == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # without and with biases
def test_a_model_with_packed_layers_is_the_model_that_it_was(architecture, tmp_path):
    text = torch.arange(20)[None]
    model, plain = tiny_model(architecture), tiny_model(architecture)
    packed = [PackedLinears(layers) for layers in with_same_input(model)]
    assert torch.equal(model(text).logits, plain(text).logits)
    trained_a_little(model, learning_rate=1e-2)
    trained_a_little(plain, learning_rate=1e-2)
    assert all(group.is_current for group in packed)
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    expected = plain(text).logits
    for group in packed:
        for layer, forward in group.forwards(group.whole).items():
            layer.forward = forward
    torch.testing.assert_close(model(text).logits, expected)
    model.save_pretrained(tmp_path)
    reopened = type(model).from_pretrained(tmp_path)
    assert torch.equal(reopened(text).logits, expected)


def test_a_second_engine_shares_the_packed_weights():
    """The graphs of the first one read them where they are."""
    model = tiny_model("qwen2")
    first, second = ([PackedLinears(layers) for layers in with_same_input(model)] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.is_current
        assert one.whole.weight.data_ptr() == other.whole.weight.data_ptr()
        assert torch.equal(one.whole.weight, other.whole.weight)


def test_layers_whose_weights_are_other_tensors_are_not_current():
    packed = PackedLinears([nn.Linear(8, 4), nn.Linear(8, 6)])
    assert packed.is_current
    packed.layers[1].bias.data = torch.ones(6)
    assert not packed.is_current
    packed.pack()
    assert packed.is_current
    assert packed.whole.bias[4:].eq(1).all()


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
