"""Memory that engine and trainer let go of in turns."""

import pytest
import torch

from native_worlds import fresh_all, roll_out, tiny_model
from sortedrl.engines.native import NativeEngine
from sortedrl.errors import EngineError
from sortedrl.models.offload import Offloader


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_rests_has_no_memory_and_wakes_as_it_was(dtype):
    tensors = [torch.arange(24).reshape(4, 6).to(dtype), torch.ones(3, dtype=dtype)]
    view, before = tensors[0][1:, ::2], [tensor.clone() for tensor in tensors]
    offloader = Offloader(keep_values=True)
    offloader.offload([*tensors, tensors[0].T])
    assert offloader.is_offloaded
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
    offloader.onload()
    assert not offloader.is_offloaded
    assert all(map(torch.equal, tensors, before))
    assert torch.equal(view, before[0][1:, ::2])


def test_what_is_not_kept_wakes_as_zeros():
    cache = torch.ones(5, 5)
    offloader = Offloader(keep_values=False)
    offloader.offload([cache])
    offloader.onload()
    assert torch.equal(cache, torch.zeros(5, 5))


def test_an_engine_without_its_cache_takes_it_again_when_work_comes():
    engine = NativeEngine(tiny_model(), slots=4, max_tokens=12)
    before = roll_out(engine, fresh_all([3, 5, 8, 4, 6, 7]))
    engine.sleep()
    engine.sleep()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in engine._runner._cache.tensors)
    assert roll_out(engine, fresh_all([3, 5, 8, 4, 6, 7])) == before


def test_an_engine_at_work_keeps_its_cache():
    engine = NativeEngine(tiny_model(), slots=4, max_tokens=12)
    engine.submit(fresh_all([3, 5]), tolerance=None)
    with pytest.raises(EngineError, match="must be idle"):
        engine.sleep()
