"""Offloading of tensors: engine and trainer that share a GPU release their memory in turn.

The tensors stay the same objects, so whoever holds one need not know. Between `rest` and `wake`
nobody may read or write them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Resting:
    """Some tensors at rest."""

    def __init__(self, *, keeps: bool) -> None:
        """With `keeps` the values wait in main memory; without, the tensors wake as zeros."""
        self._keeps = keeps
        self._at_rest: list[tuple[Tensor, int, Tensor | None]] = []

    @property
    def is_at_rest(self) -> bool:
        """Whether there is anything to wake."""
        return bool(self._at_rest)

    @torch.no_grad()
    def rest(self, tensors: Iterable[Tensor]) -> None:
        """Let go of the memory of these tensors; views of one another count once."""
        assert not self._at_rest, "what rests already must be woken first"
        seen: set[int] = set()
        on_gpu = False
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            storage = own.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            whole = torch.empty(0, dtype=torch.uint8, device=own.device).set_(storage)
            self._at_rest.append((whole, storage.nbytes(), _copy(whole) if self._keeps else None))
            on_gpu = on_gpu or own.is_cuda
        for whole, _, _ in self._at_rest:
            whole.untyped_storage().resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def wake(self) -> None:
        """Give the memory back, with the values that were kept."""
        for whole, size, kept in self._at_rest:
            whole.untyped_storage().resize_(size)
            if kept is None:
                whole.zero_()
            else:
                whole.copy_(kept)
        self._at_rest.clear()


def _copy(whole: Tensor) -> Tensor:
    kept = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
    kept.copy_(whole)
    return kept
