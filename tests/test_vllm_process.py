"""What vLLM is asked to do, and in which order; the engine itself is a stand-in."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sortedrl.cluster.weight_transport import ReceivedWeights
from sortedrl.engines.generation import TokenScores
from sortedrl.engines.streaming import backend as streams
from sortedrl.engines.streaming.backend import BackendLimits, Streams
from sortedrl.engines.streaming.weight_files import (
    refuse_other_scores,
    trial_row,
    weight_buckets,
)
from sortedrl.engines.vllm import vllm_process
from sortedrl.engines.vllm.vllm_process import VllmProcess
from sortedrl.errors import EngineError
from sortedrl.types import Weights


class FakeVllm:
    """Writes down what it is asked."""

    model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 32)
    errored = False

    def __init__(self, *, broken_at=None):
        self.calls = []
        self.broken_at = broken_at

    async def sleep(self, level):
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")

    async def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        if self.calls.count(method) == self.broken_at:
            raise ValueError("out of memory")

    async def reset_prefix_cache(self):
        self.calls.append("reset")
        return True

    def shutdown(self, timeout):
        self.calls.append("shutdown")


def tensors():
    return {f"layer.{n}": torch.full((100,), float(n)) for n in range(5)}


def loaded(engine, *, can_sleep):
    async def run():
        backend = VllmProcess(engine, name="vLLM", slots=2, can_sleep=can_sleep)
        try:
            is_dropped = await backend.sleep()
            await backend.load_weights(Weights(1, tensors()))
            await backend.load_weights(Weights(2, tensors()))
        finally:
            await backend.close()
        return is_dropped

    return asyncio.run(run())


def test_an_engine_that_slept_wakes_its_weights_loads_them_and_then_wakes_its_cache(monkeypatch):
    monkeypatch.setattr(vllm_process, "_BUCKET_BYTES", 1000)
    engine = FakeVllm()
    assert loaded(engine, can_sleep=True)
    load = ["begin_weights", "read_weights", "read_weights", "read_weights", "finish_weights"]
    assert engine.calls == [
        *("sleep 2", "wake weights", *load, "wake kv_cache", "reset"),
        *(*load, "reset", "shutdown"),
    ]


def test_an_engine_with_a_gpu_of_its_own_never_sleeps():
    engine = FakeVllm()
    assert not loaded(engine, can_sleep=False)
    assert not any(call.startswith(("sleep", "wake")) for call in engine.calls)


def test_a_load_that_fails_is_ended_so_that_the_next_one_begins_anew(monkeypatch):
    monkeypatch.setattr(vllm_process, "_BUCKET_BYTES", 1000)
    engine = FakeVllm(broken_at=2)
    with pytest.raises(EngineError, match="refused: out of memory"):
        loaded(engine, can_sleep=False)
    assert engine.calls == [
        *("begin_weights", "read_weights", "read_weights", "finish_weights", "shutdown")
    ]


def test_an_engine_whose_load_fails_while_it_wakes_wakes_its_weights_only_once(monkeypatch):
    monkeypatch.setattr(vllm_process, "_BUCKET_BYTES", 1000)
    engine = FakeVllm(broken_at=3)

    async def run():
        backend = VllmProcess(engine, name="vLLM", slots=2, can_sleep=True)
        await backend.sleep()
        with pytest.raises(EngineError, match="refused: out of memory"):
            await backend.load_weights(Weights(1, tensors()))
        await backend.load_weights(Weights(1, tensors()))
        await backend.close()

    asyncio.run(run())
    load = ["begin_weights", "read_weights", "read_weights", "read_weights", "finish_weights"]
    assert engine.calls == [
        *("sleep 2", "wake weights", *load, *load, "wake kv_cache", "reset", "shutdown")
    ]


def test_buckets_hold_every_tensor_once_and_tied_ones_under_their_first_name():
    named = tensors()
    named["tied"] = named["layer.1"]
    buckets = list(weight_buckets(Weights(1, named), bucket_bytes=900))
    assert [list(bucket) for bucket in buckets] == [
        ["layer.0", "layer.1"],
        ["layer.2", "layer.3"],
        ["layer.4"],
    ]
    tiny = list(weight_buckets(Weights(1, named), bucket_bytes=1))
    assert [len(bucket) for bucket in tiny] == [1] * 5


def test_weights_that_arrive_in_memory_that_was_freed_are_not_taken_for_tied_ones():
    memory = [bytearray(4000) for _ in range(4)]

    def arriving():
        for number in range(12):
            # The memory of a tensor is used again once it was dropped, as an allocator does it.
            tensor = torch.frombuffer(memory[number % len(memory)], dtype=torch.float32)
            tensor.fill_(float(number))
            yield {f"layer.{number}": tensor}
            del tensor

    found = {}
    weights = Weights(1, ReceivedWeights(arriving()), is_streamed=True)
    for bucket in weight_buckets(weights, bucket_bytes=4000):
        found |= {name: float(tensor[0]) for name, tensor in bucket.items()}
        del bucket
    assert found == {f"layer.{number}": float(number) for number in range(12)}


def test_a_bucket_is_not_held_while_the_next_one_is_filled(monkeypatch):
    monkeypatch.setattr(vllm_process, "_BUCKET_BYTES", 400)
    storages, held = [], []

    def arriving():
        for number in range(6):
            held.append(sum(not storage.expired() for storage in storages))
            tensor = torch.full((100,), float(number))
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            yield {f"layer.{number}": tensor}
            del tensor

    async def run():
        backend = VllmProcess(FakeVllm(), name="vLLM", slots=2)
        await backend.load_weights(Weights(1, ReceivedWeights(arriving()), is_streamed=True))
        await backend.close()

    asyncio.run(run())
    # A tensor that fits into no bucket any more is there when that one is loaded.
    assert held == [0, 1, 1, 1, 1, 1]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_weights_that_arrive_on_a_gpu_are_passed_on_by_address_and_not_as_a_file(monkeypatch):
    monkeypatch.setattr(vllm_process, "_BUCKET_BYTES", 1000)
    monkeypatch.setattr(vllm_process, "addresses", list)
    given = []

    class Taking(FakeVllm):
        async def collective_rpc(self, method, kwargs):
            given.extend(kwargs.get("given", ()))
            await super().collective_rpc(method, kwargs)

    def arriving():
        yield {name: tensor.as_subclass(OnGpu) for name, tensor in tensors().items()}

    async def run():
        backend = VllmProcess(engine, name="vLLM", slots=2)
        await backend.load_weights(Weights(1, ReceivedWeights(arriving()), is_streamed=True))
        await backend.close()

    engine = Taking()
    asyncio.run(run())
    assert given == list(tensors())
    assert engine.calls[1:-3] == ["receive_weights"] * 3


# --- opens that fail ------------------------------------------------------------------------------


class Opened:
    name = "opened"
    limits = BackendLimits(slots=1, context=8, vocabulary=8)

    def __init__(self):
        self.is_closed = False

    async def close(self):
        self.is_closed = True


def test_a_backend_that_is_still_starting_when_its_caller_is_interrupted_is_closed(monkeypatch):
    backend = Opened()

    async def opening():
        await asyncio.sleep(0.2)
        return backend

    call = streams.EventLoop.call

    def interrupted(self, work, *, seconds=None):
        if seconds is None and work.__name__ == "open_backend":
            asyncio.run_coroutine_threadsafe(work, self._loop)
            raise KeyboardInterrupt
        return call(self, work, seconds=seconds)

    monkeypatch.setattr(streams.EventLoop, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Streams(opening)
    assert backend.is_closed


# --- the model of a worker ------------------------------------------------------------------------


class Workers:
    def __init__(self, **scores):
        self._scores = scores

    def scores(self, trajectories):
        return self._scores


def test_workers_must_compute_the_log_probabilities_of_the_trainer():
    rows = [trial_row(range(10), 0), trial_row([3], 1)]
    assert [row.prompt.tokens for row in rows] == [tuple(range(5)), (3,)]
    assert [row.tokens for row in rows] == [[5, 6, 7, 8, 9], [3]]
    expected = [[-1.0] * 5, [-2.0]]
    close = [TokenScores([-1.01] * 5), TokenScores([-2.0])]
    refuse_other_scores(Workers(a=close, native=None), rows, expected)
    far = [TokenScores([-2.0] * 5), TokenScores([-2.0])]
    with pytest.raises(EngineError, match=r"b must have the trained model, .* 0\.83 nats"):
        refuse_other_scores(Workers(a=close, b=far), rows, expected)
