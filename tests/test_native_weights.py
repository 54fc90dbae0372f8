"""Weights on their way into the engine: all of them or none."""

import weakref

import pytest
import torch
from safetensors.torch import save_file

from native_worlds import (
    answer,
    fresh_all,
    plain_logprobs,
    roll_out,
    tiny_model,
    trained_a_little,
)
from sortedrl.cluster.weight_transport import ReceivedWeights, TransportFailed
from sortedrl.engines.native import NativeEngine
from sortedrl.engines.native.hf_model import copy_weights
from sortedrl.errors import DataError, EngineError, ModelError
from sortedrl.models.loading import read_safetensors
from sortedrl.types import Weights


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_as(model, tensors):
    return all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_engine_given_weights_writes_as_one_made_with_them(architecture):
    """Qwen 3 here ties its output to its input, so one name of the two has no parameter."""
    ours, theirs = tiny_model(architecture), tiny_model(architecture, seed=1)
    work = fresh_all((20, 9, 3))
    engine = NativeEngine(ours, slots=4, max_tokens=12, block_tokens=4)
    before = roll_out(engine, work)
    assert roll_out(engine, work) == before
    assert engine.stats.prefilled_tokens < 2 * (20 + 9 + 3), "something is remembered"
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
    with pytest.raises(DataError, match=r"has no \.safetensors file"):
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


def arriving(model, *, names=None, breaks=False):
    """Weights in buckets of one; whoever keeps a tensor is found out by the next but one."""

    def buckets():
        alive = weakref.WeakSet()
        for name, tensor in model.state_dict().items():
            if names is not None and name not in names:
                continue
            assert len(alive) <= 1, "an engine has room for one more model, or for one tensor"
            bucket = {name: tensor.clone()}
            alive.add(bucket[name])
            yield bucket
        if breaks:
            raise TransportFailed("the sender is gone")

    return ReceivedWeights(buckets())


def test_weights_that_arrive_are_copied_one_by_one_and_never_kept_together():
    theirs = tiny_model(seed=1)
    engine = NativeEngine(tiny_model(), slots=4, max_tokens=12)
    engine.load_weights(Weights(1, arriving(theirs), is_streamed=True))
    expected = roll_out(NativeEngine(theirs, slots=4, max_tokens=12), fresh_all((3, 9, 20)))
    assert list(map(answer, roll_out(engine, fresh_all((3, 9, 20))))) == list(map(answer, expected))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"breaks": True}, TransportFailed),
        ({"names": {"lm_head.weight"}}, ModelError),
    ],
    ids=["broken off", "incomplete"],
)
def test_an_engine_with_some_of_its_new_weights_loses_no_answer_and_writes_none(given, error):
    theirs, work = tiny_model(seed=1), fresh_all((3, 9, 20))
    engine = NativeEngine(tiny_model(), slots=2, max_tokens=12)
    engine.submit(work, tolerance=None)
    done = [*engine.step().finished, *engine.step().finished]
    with pytest.raises(error):
        engine.load_weights(Weights(1, arriving(theirs, **given), is_streamed=True))
    assert engine.version == 0
    with pytest.raises(EngineError, match="only some of its new weights"):
        engine.step()
    stopped = engine.interrupt()
    assert sorted(t.key for t in (*done, *stopped)) == [t.key for t in work]
    assert any(t.num_tokens for t in stopped)
    engine.load_weights(Weights(1, arriving(theirs), is_streamed=True))
    expected = roll_out(NativeEngine(theirs, slots=2, max_tokens=12), work)
    assert list(map(answer, roll_out(engine, work))) == list(map(answer, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_engine_rounds_the_weights_it_is_given_and_keeps_its_logits_whole(dtype):
    master, rounded = tiny_model(std=0.1), tiny_model(std=0.1).to(dtype)
    engine = NativeEngine(tiny_model(std=0.1, seed=1).to(dtype), slots=4, max_tokens=12)
    engine.load_weights(Weights(1, master.state_dict()))
    written = roll_out(engine, fresh_all((3, 9, 20)))
    expected = roll_out(NativeEngine(rounded, slots=4, max_tokens=12), fresh_all((3, 9, 20)))
    assert list(map(answer, written)) == list(map(answer, expected))
    for trajectory in written:
        assert trajectory.logprobs == pytest.approx(plain_logprobs(rounded, trajectory), abs=0.1)
    assert any(torch.tensor(t.logprobs).to(dtype).tolist() != t.logprobs for t in written)
