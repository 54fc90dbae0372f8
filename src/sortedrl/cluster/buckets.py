"""Tensors as plain bytes, in parts of a few hundred megabytes: what travels as weights.

Bytes and not arrays, because numpy has no bfloat16. Only names, dtypes, shapes and bytes travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sortedrl.errors import ModelError

_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: np.ndarray


Bucket = tuple[Packed, ...]


def parts(
    tensors: Iterable[tuple[str, object]], *, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, in parts of about so many bytes; at least one tensor in each.

    They are taken one after the other, so they may be gathered while they are asked for.
    """
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, given in tensors:
        tensor = as_tensor(name, given)
        if part and size + tensor.nbytes > bucket_bytes:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part


def buckets(
    tensors: Mapping[str, object], *, bucket_bytes: int = _BUCKET_BYTES
) -> Iterator[Bucket]:
    """The same as bytes, on the CPU."""
    for part in parts(tensors.items(), bucket_bytes=bucket_bytes):
        yield bucket(part)


def bucket(part: Iterable[tuple[str, Tensor]]) -> Bucket:
    """One part as bytes, on the CPU."""
    return tuple(_packed(name, tensor) for name, tensor in part)


def unpacked(parts: Iterable[Bucket]) -> dict[str, Tensor]:
    """The tensors, over the very same bytes: they must be read only."""
    return {packed.name: _tensor(packed) for part in parts for packed in part}


def num_bytes(part: Bucket) -> int:
    """Bytes of all tensors of a part."""
    return sum(packed.buffer.nbytes for packed in part)


def as_tensor(name: str, given: object) -> Tensor:
    """What was given under this name, which must be a tensor."""
    if not isinstance(given, Tensor):
        raise ModelError(f"{name} must be a tensor to travel, got {type(given).__name__}")
    return given


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in a row; where it lies in a row, they are its own."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """What a dtype is called on its way."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name."""
    dtype: torch.dtype = torch.__dict__[name]
    return dtype


def _packed(name: str, tensor: Tensor) -> Packed:
    return Packed(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        buffer=as_bytes(tensor.detach().cpu()).numpy(),
    )


def _tensor(packed: Packed) -> Tensor:
    dtype = dtype_named(packed.dtype)
    if not packed.buffer.nbytes:
        return torch.empty(packed.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The bytes lie in shared memory and are not ours to write; nobody does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        held = torch.from_numpy(packed.buffer)
    return held.view(dtype).reshape(packed.shape)
