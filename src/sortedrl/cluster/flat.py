"""A bucket of tensors as one row of bytes, with a small front that says how long it is.

    front   bytes of the header, bytes of header and tensors; 0, 0 is the end
    flat    header | tensor | tensor ...     each begins at a multiple of 16 bytes

The header has names, dtypes and shapes, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sortedrl.cluster.buckets import as_bytes, dtype_name, dtype_named

_ALIGNMENT = 16

Part = Sequence[tuple[str, Tensor]]


class Buffer:
    """Bytes that one bucket after the other is packed into."""

    def __init__(self, device: torch.device) -> None:
        """Bytes on this device; they are taken as they are needed."""
        self._device = device
        self._flat: Tensor | None = None

    def packed(self, part: Part) -> tuple[Tensor, Tensor]:
        """The front of a part, and its bytes."""
        rows = [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in part]
        header = json.dumps(rows).encode()
        places, size = _places([tensor.nbytes for _, tensor in part], start=len(header))
        if self._flat is None or self._flat.numel() < size:
            self._flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        flat = self._flat[:size]
        flat[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for (_, tensor), place in zip(part, places, strict=True):
            flat[place : place + tensor.nbytes].copy_(as_bytes(tensor))
        return front(self._device, header_bytes=len(header), size=size), flat


def front(device: torch.device, *, header_bytes: int = 0, size: int = 0) -> Tensor:
    """What is said before a bucket; by default, that there is none."""
    return torch.tensor([header_bytes, size], dtype=torch.int64).to(device)


def unpacked(flat: Tensor, *, header_bytes: int) -> dict[str, Tensor]:
    """The tensors over these very bytes."""
    rows = json.loads(flat[:header_bytes].cpu().numpy().tobytes())
    dtypes = [dtype_named(dtype) for _, dtype, _ in rows]
    sizes = [
        dtype.itemsize * torch.Size(shape).numel()
        for dtype, (_, _, shape) in zip(dtypes, rows, strict=True)
    ]
    places, _ = _places(sizes, start=header_bytes)
    return {
        name: flat[place : place + size].view(dtype).reshape(shape)
        for (name, _, shape), dtype, size, place in zip(rows, dtypes, sizes, places, strict=True)
    }


def _places(sizes: Iterable[int], *, start: int) -> tuple[list[int], int]:
    """Where tensors of these sizes begin behind `start`, and where the last one ends."""
    places = []
    end = start
    for size in sizes:
        place = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(place)
        end = place + size
    return places, end
