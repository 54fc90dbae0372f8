"""Offloading tensors to main memory, for an engine and a trainer that share a GPU.

Offloaded tensors stay the same objects, so references remain valid. They must not be read or
written between `offload` and `onload`. Copies in main memory do not share storage with the
originals.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def in_buckets(sized: Iterable[tuple[T, int]], *, max_bytes: int) -> Iterator[list[T]]:
    """Group items with sizes into buckets of at most `max_bytes`; a larger item gets its own.

    Items are consumed lazily.
    """
    bucket: list[T] = []
    size = 0
    for thing, num_bytes in sized:
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(thing)
        size += num_bytes
    if bucket:
        yield bucket


class Offloader:
    """Frees the memory of tensors and restores it."""

    def __init__(self, *, keep_values: bool) -> None:
        """With `keep_values` the values move to main memory; otherwise they come back as zeros."""
        self._keep_values = keep_values
        self._offloaded: list[tuple[Tensor, int, Tensor | None]] = []

    @property
    def is_offloaded(self) -> bool:
        """Whether `onload` has anything to restore."""
        return bool(self._offloaded)

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of these tensors; views of one storage count once."""
        assert not self._offloaded, "offloaded tensors must be onloaded first"
        seen: set[int] = set()
        on_gpu = False
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            storage = own.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            whole = torch.empty(0, dtype=torch.uint8, device=own.device).set_(storage)
            self._offloaded.append(
                (whole, storage.nbytes(), _copy(whole) if self._keep_values else None)
            )
            on_gpu = on_gpu or own.is_cuda
        for whole, _, _ in self._offloaded:
            whole.untyped_storage().resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def onload(self) -> None:
        """Restore the memory, and the values if kept."""
        for whole, size, kept in self._offloaded:
            whole.untyped_storage().resize_(size)
            if kept is None:
                whole.zero_()
            else:
                whole.copy_(kept)
        self._offloaded.clear()


def _copy(whole: Tensor) -> Tensor:
    kept = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
    kept.copy_(whole)
    return kept


@torch.no_grad()
def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in main memory by the same names; tied names share one copy."""
    made: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        key = tensor.data_ptr(), tensor.dtype, tensor.shape
        if key not in made:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            made[key] = kept.copy_(tensor.detach(), non_blocking=True)
        found[name] = made[key]
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return found


def free_main_memory() -> int:
    """Bytes of main memory available without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not on Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kib << 10
