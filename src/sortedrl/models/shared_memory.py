"""Memory that several processes of a machine share: tensors by their addresses, and buffers.

An address of a tensor on a GPU has a CUDA IPC handle: plain numbers, strings and bytes, so nothing
is unpickled and no weight is copied on the way. The owner keeps its tensors, unchanged, until every
reader has dropped its own.

A worker can read buffers of the sender of weights in place, instead of receiving a copy:

    sender                         worker
    empty, handle      -- JSON ->  opened
    fill, synchronize  -- size ->  copy, synchronize
                       <- reply -
    close              <- reply -  close

This is how weights can pass between two processes on one GPU, which cannot form an NCCL group. The
sender synchronizes before it announces a buffer, and fills it again when all readers have their
copies. Readers close before the sender does.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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


class BufferSharing(Protocol):
    """One end of memory that processes share."""

    @property
    def place(self) -> str:
        """The name of the memory: ends of the same place can open each other's buffers."""

    def empty(self, size: int) -> Tensor:
        """A new buffer of so many bytes."""

    def handle(self, buffer: Tensor) -> str:
        """What another end opens this buffer with."""

    def opened(self, handle: str) -> Tensor:
        """The buffer of another end."""

    def synchronize(self) -> None:
        """Wait until what was written to buffers, or copied from them, is there."""

    def close(self) -> None:
        """Free the buffers, or those of others: nothing else refers to them any more."""


class CudaSharing:
    """Buffers on one GPU, shared as CUDA IPC handles."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is shared yet."""
        self._device = device
        self._given: list[Address] = []

    @property
    def place(self) -> str:
        """The UUID of the GPU."""
        return gpu_name(self._device)

    def empty(self, size: int) -> Tensor:
        """Memory of the GPU."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def handle(self, buffer: Tensor) -> str:
        """Its address, with bytes in hexadecimal."""
        (address,) = addresses({"buffer": buffer})
        self._given.append(address)
        return json.dumps(address, default=lambda raw: {"hex": raw.hex()})

    def opened(self, handle: str) -> Tensor:
        """The memory of another process on the same GPU."""
        address = json.loads(handle, object_hook=lambda coded: bytes.fromhex(coded["hex"]))
        ((_, buffer),) = tensors_at([address])
        return buffer

    def synchronize(self) -> None:
        """Wait for the stream on which buffers are packed and copied."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Give the memory back, also to the other processes on the GPU."""
        release(self._given)
        self._given.clear()
        free_unused_memory()


class FileSharing:
    """Buffers in files that are mapped into memory: the same between processes without a GPU.

    Tests and checks use it; in a run CPU processes broadcast.
    """

    def __init__(self, folder: Path) -> None:
        """Ends with the same folder share."""
        self._folder = folder
        self._files: list[Path] = []

    @property
    def place(self) -> str:
        """The folder."""
        return f"cpu {self._folder}"

    def empty(self, size: int) -> Tensor:
        """A new file, mapped into memory."""
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            self._files.append(Path(file.name))
        return self._mapped(self._files[-1], size)

    def handle(self, buffer: Tensor) -> str:
        """The path and the size of its file."""
        filename = buffer.untyped_storage().filename
        return json.dumps([filename, buffer.numel()])

    def opened(self, handle: str) -> Tensor:
        """The same file, mapped here."""
        path, size = json.loads(handle)
        return self._mapped(Path(path), size)

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def close(self) -> None:
        """Remove the files."""
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files.clear()

    def _mapped(self, path: Path, size: int) -> Tensor:
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


IPC_SWITCH = "SORTEDRL_CUDA_IPC"


def sharing_on(device: torch.device) -> BufferSharing | None:
    """How processes on this device share buffers; `None` if they do not.

    `SORTEDRL_CUDA_IPC=1` switches it on for GPUs: the check on a GPU has not passed yet.
    """
    is_on = device.type == "cuda" and os.environ.get(IPC_SWITCH) == "1"
    return CudaSharing(device) if is_on else None
