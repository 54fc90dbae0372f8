"""A worker extension of vLLM that loads weights directly from the GPU memory of the trainer.

A tensor is sent as a CUDA IPC handle: plain numbers, strings and bytes, so nothing is copied on the
way and nothing is unpickled. The trainer keeps its tensors unchanged until the worker has replied.
vLLM imports the extension by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

Address = Sequence[Any]
"""Name, dtype, shape, stride, offset, GPU, and the IPC handle of the storage."""


def addresses(tensors: Mapping[str, Tensor]) -> list[Address]:
    """IPC handles of tensors on a GPU, for another process of this machine."""
    torch.cuda.synchronize()
    return [_address(name, tensor) for name, tensor in tensors.items()]


class WeightReceiver:
    """A mixin of vLLM's worker, which has `reload_weights`."""

    reload_weights: Any
    model_runner: Any

    def read_weights(self, folder: str) -> None:
        """Read the weights of a folder into the model."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=folder)
        # On a CPU every layer computes with a packed copy of its weights. vLLM does not renew that
        # of an output layer which is tied to the embedding.
        for module in self.model_runner.model.modules():
            if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)

    def receive_weights(self, given: Sequence[Address]) -> None:
        """Copy the tensors at these addresses into the model."""
        devices = {_gpu(index): index for index in range(torch.cuda.device_count())}
        self.reload_weights(weights_iterator=_tensors(given, devices))
        # The trainer may change its tensors as soon as this returns.
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _address(name: str, tensor: Tensor) -> Address:
    # The first field is the device index, which may differ in another process.
    _, *storage = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    shape, stride = list(tensor.shape), list(tensor.stride())
    gpu = _gpu(tensor.device.index)
    return (name, str(tensor.dtype), shape, stride, tensor.storage_offset(), gpu, storage)


def _tensors(given: Sequence[Address], devices: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    for name, dtype, shape, stride, offset, gpu, storage in given:
        if gpu not in devices:
            raise ValueError(f"{name} is on GPU {gpu}, which this vLLM worker does not see")
        handle, size_bytes, offset_bytes, *synchronisation = storage
        tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            Tensor,
            torch.Size(shape),
            tuple(stride),
            offset,
            torch.UntypedStorage,
            _DTYPES[dtype],
            devices[gpu],
            handle,
            size_bytes,
            offset_bytes,
            False,
            *synchronisation,
        )
        yield name, tensor


def _gpu(index: int) -> str:
    """The UUID of a GPU, the same in every process."""
    return str(torch.cuda.get_device_properties(index).uuid)


RECEIVER = "sortedrl.engines.vllm.worker_extension.WeightReceiver"
