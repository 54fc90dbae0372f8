"""Weights on their way into the engine: all of them or none, rounded or held."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from native_worlds import answer, fresh_all, roll_out, tiny_model, trained_a_little
from sortedrl.engines.native import NativeEngine
from sortedrl.engines.native.weights import copy_weights, held, read_safetensors
from sortedrl.errors import DataError, ModelError
from sortedrl.types import Weights

HALVES = (torch.bfloat16, torch.float16)
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
numbers = st.floats(-100, 100, width=32)


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_as(model, tensors):
    return all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_engine_given_weights_writes_as_one_made_with_them(architecture):
    """Qwen 3 here ties its output to its input, so one name of the two has no parameter."""
    ours, theirs = tiny_model(architecture), tiny_model(architecture, seed=1)
    work = fresh_all((3, 9, 20))
    engine = NativeEngine(ours, slots=4, max_tokens=12)
    before = roll_out(engine, work)
    engine.load_weights(Weights(1, theirs.state_dict()))
    after = roll_out(engine, work)
    expected = roll_out(NativeEngine(theirs, slots=4, max_tokens=12), work)
    assert list(map(answer, after)) == list(map(answer, expected))
    assert all(a.tokens != b.tokens for a, b in zip(after, before, strict=True))
    assert {segment.version for t in after for segment in t.segments} == {1}
    assert engine.version == 1


def test_shared_weights_are_read_anew_and_nothing_is_copied():
    model = tiny_model()
    work = fresh_all((3, 9, 20))
    engine = NativeEngine(model, slots=4, max_tokens=12)
    roll_out(engine, work)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    trained_a_little(model, learning_rate=0.05)
    engine.load_weights(Weights(1))
    expected = roll_out(NativeEngine(model, slots=4, max_tokens=12), work)
    assert list(map(answer, roll_out(engine, work))) == list(map(answer, expected))
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]


def test_weights_come_from_one_file_or_from_all_files_of_a_folder(tmp_path):
    model, other = tiny_model(), tiny_model(seed=1)
    tensors = copied(other)
    names = sorted(tensors)
    save_file(tensors, tmp_path / "whole.safetensors")
    parts = tmp_path / "parts"
    parts.mkdir()
    save_file({name: tensors[name] for name in names[:5]}, parts / "1.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, parts / "2.safetensors")
    for place in (tmp_path / "whole.safetensors", parts):
        copy_weights(model, copied(tiny_model(seed=2)))
        NativeEngine(model, slots=1).load_weights(Weights(1, read_safetensors(place)))
        assert is_as(model, tensors)


def test_a_file_that_holds_no_weights_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.safetensors file"):
        read_safetensors(tmp_path)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights")
    with pytest.raises(DataError, match=r"broken\.safetensors: is not a readable safetensors"):
        read_safetensors(tmp_path)
    with pytest.raises(DataError, match=r"absent\.safetensors"):
        read_safetensors(tmp_path / "absent.safetensors")


LAST = "model.norm.weight"
WRONG = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != LAST}, f"missing: {LAST}"),
    "unknown": (lambda t: t | {"model.extra": torch.zeros(1)}, r"unknown: model\.extra"),
    "shape": (lambda t: t | {LAST: torch.zeros(7)}, r"shape \(48,\), got \(7,\)"),
    "no tensor": (lambda t: t | {LAST: [0.0] * 48}, r"shape \(48,\), got list"),
    "nothing": (lambda t: {}, "missing: lm_head.weight"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(change, message):
    model = tiny_model()
    before = copied(model)
    work = fresh_all((3, 9, 20))
    undisturbed = roll_out(NativeEngine(model, slots=2, max_tokens=12), work)
    engine = NativeEngine(model, slots=2, max_tokens=12)
    engine.submit(work, tolerance=0.0)
    done = [*engine.step().finished, *engine.step().finished]
    with pytest.raises(ModelError, match=message):
        engine.load_weights(Weights(1, change(copied(tiny_model(seed=1)))))
    assert is_as(model, before)
    assert engine.version == 0
    while len(done) < len(work):
        step = engine.step()
        assert step.decoded_tokens, "what was running goes on"
        done += step.finished
    done.sort(key=lambda t: t.key)
    assert list(map(answer, done)) == list(map(answer, undisturbed))


@halves
@given(values=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_half_a_unit_is_plain_rounding(dtype, values):
    old = torch.tensor([a for a, _ in values]).to(dtype)
    master = torch.tensor([b for _, b in values])
    assert torch.equal(held(old, master, hold_ulps=0.5).to(dtype), master.to(dtype))


@halves
@given(
    value=numbers,
    units=st.floats(-3, 3, width=32),
    hold_ulps=st.sampled_from((0.75, 1.0, 1.5, 2.0)),
)
def test_a_weight_is_held_while_its_master_stays_within_reach(dtype, value, units, hold_ulps):
    old = torch.tensor([value]).to(dtype)
    unit = ulp(old)
    master = old.float() + units * unit
    distance = ((master - old.float()).abs() / unit).item()
    found = held(old, master, hold_ulps=hold_ulps).to(dtype)
    if distance <= hold_ulps:
        assert torch.equal(found, old)
    else:
        assert torch.equal(found, master.to(dtype))


def ulp(old):
    """The distance between neighbours at a 16-bit number, from its bits."""
    info = torch.finfo(old.dtype)
    size = max(abs(old.item()), info.smallest_normal)
    return info.eps * 2.0 ** math.floor(math.log2(size))


@halves
def test_a_weight_of_zero_is_not_held_for_ever(dtype):
    """Biases and zero-centred norms start at 0, where a unit is as small as units get."""
    old = torch.zeros(3, dtype=dtype)
    master = torch.tensor([1e-4, -2e-4, 3e-4])
    assert torch.equal(held(old, master, hold_ulps=1.0).to(dtype), master.to(dtype))


def test_a_weight_that_swings_across_a_border_of_rounding_stays():
    """Between 1 and the next bf16 number lies 2**-7; the border lies in the middle."""
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    copy_weights(model, {"weight": torch.tensor([[1.0]])})
    seen = set()
    for swing in (0.51, 0.49, 0.55, 0.45, 0.99):
        master = {"weight": torch.tensor([[1.0 + swing * 2**-7]])}
        copy_weights(model, master, hold_ulps=1.0)
        seen.add(model.weight.item())
    assert seen == {1.0}
    copy_weights(model, {"weight": torch.tensor([[1.0 + 1.01 * 2**-7]])}, hold_ulps=1.0)
    assert model.weight.item() == 1.0 + 2**-7


def test_weights_of_the_same_precision_are_copied_as_they_are():
    old, new = torch.tensor([1.0]), torch.tensor([1.0 + 2**-20])
    assert torch.equal(held(old, new, hold_ulps=2.0), new)
    old, new = old.bfloat16(), torch.tensor([1.0 + 2**-7]).bfloat16()
    assert torch.equal(held(old, new, hold_ulps=2.0), new)
