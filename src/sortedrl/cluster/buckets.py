"""Weights as buckets of bytes: their format for every transport.

A bucket holds tensors of up to a few hundred megabytes together. Only names, dtypes, shapes and
bytes travel; bytes and not arrays, because numpy has no bfloat16. In a broadcast a bucket is one
flat tensor of bytes, after a small tensor with its sizes:

    sizes   bytes of the header, bytes of header and tensors; 0, 0 is the end
    flat    header | tensor | tensor ...     each begins at a multiple of 16 bytes

The header has names, dtypes and shapes, as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sortedrl.errors import ModelError
from sortedrl.models.offload import in_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedTensor:
    """One tensor as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: np.ndarray


Bucket = tuple[SerializedTensor, ...]


def parts(
    tensors: Iterable[tuple[str, object]], *, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, in parts of about so many bytes; at least one tensor in each.

    They are taken one after the other, so they may be gathered during the iteration.
    """
    named = ((name, as_tensor(name, given)) for name, given in tensors)
    return in_buckets(((pair, pair[1].nbytes) for pair in named), max_bytes=bucket_bytes)


def bucket(part: Iterable[tuple[str, Tensor]]) -> Bucket:
    """One part as bytes, on the CPU."""
    return tuple(_packed(name, tensor) for name, tensor in part)


def unpacked(parts: Iterable[Bucket]) -> dict[str, Tensor]:
    """The tensors, over the very same bytes: they must be read only."""
    return {packed.name: _tensor(packed) for part in parts for packed in part}


def as_tensor(name: str, given: object) -> Tensor:
    """What was given under this name, which must be a tensor."""
    if not isinstance(given, Tensor):
        raise ModelError(f"{name} must be a tensor to be sent, got {type(given).__name__}")
    return given


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat; a contiguous tensor is not copied."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a message."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name."""
    dtype: torch.dtype = torch.__dict__[name]
    return dtype


def _packed(name: str, tensor: Tensor) -> SerializedTensor:
    return SerializedTensor(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        buffer=as_bytes(tensor.detach().cpu()).numpy(),
    )


def _tensor(packed: SerializedTensor) -> Tensor:
    dtype = dtype_named(packed.dtype)
    if not packed.buffer.nbytes:
        return torch.empty(packed.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The bytes are in shared memory, which is read only; nothing writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        held = torch.from_numpy(packed.buffer)
    return held.view(dtype).reshape(packed.shape)


_ALIGNMENT = 16

Part = Sequence[tuple[str, Tensor]]


class Buffer:
    """Memory that one bucket after the other is packed into."""

    def __init__(self, empty: Callable[[int], Tensor]) -> None:
        """`empty` allocates memory of so many bytes, when a bucket is larger than those before."""
        self._empty = empty
        self._flat: Tensor | None = None

    def packed(self, part: Part) -> tuple[Tensor, Tensor]:
        """The sizes of a part, on the CPU, and its bytes."""
        rows = [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in part]
        header = json.dumps(rows).encode()
        places, size = _offsets([tensor.nbytes for _, tensor in part], start=len(header))
        if self._flat is None or self._flat.numel() < size:
            self._flat = self._empty(size)
        flat = self._flat[:size]
        flat[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for (_, tensor), place in zip(part, places, strict=True):
            flat[place : place + tensor.nbytes].copy_(as_bytes(tensor))
        return bucket_sizes(header_bytes=len(header), size=size), flat


def bucket_sizes(*, header_bytes: int = 0, size: int = 0) -> Tensor:
    """What is sent before a bucket; by default the end of all buckets."""
    return torch.tensor([header_bytes, size], dtype=torch.int64)


def tensors_of_bucket(flat: Tensor, *, header_bytes: int) -> dict[str, Tensor]:
    """The tensors over these very bytes."""
    rows = json.loads(flat[:header_bytes].cpu().numpy().tobytes())
    dtypes = [dtype_named(dtype) for _, dtype, _ in rows]
    sizes = [
        dtype.itemsize * torch.Size(shape).numel()
        for dtype, (_, _, shape) in zip(dtypes, rows, strict=True)
    ]
    places, _ = _offsets(sizes, start=header_bytes)
    return {
        name: flat[place : place + size].view(dtype).reshape(shape)
        for (name, _, shape), dtype, size, place in zip(rows, dtypes, sizes, places, strict=True)
    }


def _offsets(sizes: Iterable[int], *, start: int) -> tuple[list[int], int]:
    """Where tensors of these sizes begin behind `start`, and where the last one ends."""
    places = []
    end = start
    for size in sizes:
        place = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(place)
        end = place + size
    return places, end
