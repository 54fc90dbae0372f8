"""Tensors on a GPU by their addresses: CUDA IPC handles, for other processes of the machine.

An address is plain numbers, strings and bytes, so nothing is unpickled and no weight is copied on
the way. The owner keeps its tensors, unchanged, until every reader has dropped its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

_DTYPES = {
    str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
}

Address = Sequence[Any]
"""Name, dtype, shape, stride, offset, GPU, and the IPC handle of the storage."""


def addresses(tensors: Mapping[str, Tensor]) -> list[Address]:
    """IPC handles of tensors on a GPU, for another process of this machine."""
    torch.cuda.synchronize()
    return [_address(name, tensor) for name, tensor in tensors.items()]


def tensors_at(given: Sequence[Address]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of another process at these addresses, which must be on GPUs that are visible."""
    devices = {gpu_name(index): index for index in range(torch.cuda.device_count())}
    for name, dtype, shape, stride, offset, gpu, storage in given:
        if gpu not in devices:
            raise ValueError(f"{name} is on GPU {gpu}, which this process does not see")
        handle, size_bytes, offset_bytes, *synchronisation = storage
        tensor = rebuild_cuda_tensor(
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


def release(given: Sequence[Address]) -> None:
    """Take these addresses back: torch keeps the memory of a reader that died for ever."""
    for *_, storage in given:
        *_, counter, offset, _, _ = storage
        torch.UntypedStorage._release_ipc_counter(counter, offset)


def free_unused_memory() -> None:
    """Give memory that nothing refers to any more back to the GPU, for its other processes."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def gpu_name(device: torch.device | int) -> str:
    """The UUID of a GPU: the same in every process, and no other GPU has it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _address(name: str, tensor: Tensor) -> Address:
    # The first field is the device index, which may differ in another process.
    _, *storage = tensor.untyped_storage()._share_cuda_()
    shape, stride = list(tensor.shape), list(tensor.stride())
    gpu = gpu_name(tensor.device)
    return (name, str(tensor.dtype), shape, stride, tensor.storage_offset(), gpu, storage)
