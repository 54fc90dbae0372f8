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


def buckets(
    tensors: Mapping[str, object], *, bucket_bytes: int = _BUCKET_BYTES
) -> Iterator[Bucket]:
    """The tensors in order, in parts of about so many bytes; at least one tensor in each."""
    part: list[Packed] = []
    size = 0
    for name, tensor in tensors.items():
        packed = _packed(name, tensor)
        if part and size + packed.buffer.nbytes > bucket_bytes:
            yield tuple(part)
            part, size = [], 0
        part.append(packed)
        size += packed.buffer.nbytes
    if part:
        yield tuple(part)


def unpacked(parts: Iterable[Bucket]) -> dict[str, Tensor]:
    """The tensors, over the very same bytes: they must be read only."""
    return {packed.name: _tensor(packed) for part in parts for packed in part}


def num_bytes(part: Bucket) -> int:
    """Bytes of all tensors of a part."""
    return sum(packed.buffer.nbytes for packed in part)


def _packed(name: str, tensor: object) -> Packed:
    if not isinstance(tensor, Tensor):
        raise ModelError(f"{name} must be a tensor to travel, got {type(tensor).__name__}")
    held = tensor.detach().cpu().contiguous()
    return Packed(
        name=name,
        dtype=str(held.dtype).removeprefix("torch."),
        shape=tuple(held.shape),
        buffer=held.reshape(-1).view(torch.uint8).numpy(),
    )


def _tensor(packed: Packed) -> Tensor:
    dtype: torch.dtype = torch.__dict__[packed.dtype]
    if not packed.buffer.nbytes:
        return torch.empty(packed.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The bytes lie in shared memory and are not ours to write; nobody does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        held = torch.from_numpy(packed.buffer)
    return held.view(dtype).reshape(packed.shape)
