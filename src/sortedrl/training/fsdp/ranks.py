"""The ranks of a trainer: their collective operations, and how answers are divided among them.

Collective operations must be made by all ranks in the same order: a missing rank keeps the others
waiting until the timeout. Every rank gets the same result, bit for bit, so all decide alike.

Sequences are divided so that all ranks have about the same number of tokens. Every sequence is in
exactly one share, two shares differ by at most the longest sequence, and the same sizes always give
the same shares, so each rank computes the shares of all ranks.

Axes: T values, of which ranks may have different numbers; B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from heapq import heapify, heapreplace
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from sortedrl.config.checks import require
from sortedrl.training.optimiser import total_norm


def balanced(sizes: Sequence[int], *, parts: int) -> tuple[tuple[int, ...], ...]:
    """The sequences of each part, in order: the longest first, each where there is least so far.

    >>> balanced([5, 9, 4, 5], parts=2)
    ((1, 2), (0, 3))
    """
    require(parts >= 1, f"sequences must be split into at least 1 part, got {parts}")
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    heapify(loads)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, part = loads[0]
        heapreplace(loads, (load + sizes[index], part))
        members[part].append(index)
    return tuple(tuple(sorted(part)) for part in members)


_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Ranks:
    """The ranks of a sharded trainer, as seen by one of them: a `RankGroup`."""

    def __init__(self, device: torch.device) -> None:
        """Use the process group that is open, with this rank's device."""
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.world,))

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that logs and writes for all."""
        return self.rank == 0

    def shares(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each rank, which of the sequences of these sizes it processes."""
        return balanced(sizes, parts=self.world)

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        total = values.detach().clone()
        dist.all_reduce(total)
        return total

    def all_gather(self, values_T: Tensor) -> Tensor:
        """The values of all ranks, those of rank 0 first."""
        counts = torch.zeros(self.world, dtype=torch.long, device=values_T.device)
        counts[self.rank] = len(values_T)
        sizes = self.all_reduce(counts).tolist()
        start = sum(sizes[: self.rank])
        # The backends cannot add truth values.
        dtype = torch.uint8 if values_T.dtype == torch.bool else values_T.dtype
        whole_T = torch.zeros(sum(sizes), dtype=dtype, device=values_T.device)
        whole_T[start : start + len(values_T)] = values_T.to(dtype)
        return self.all_reduce(whole_T).to(values_T.dtype)

    def broadcast(self, tensor: Tensor) -> None:
        """Give this tensor of all ranks the values that it has on the first."""
        dist.broadcast(tensor, 0)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of gradients of which every rank has a part."""
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        own = total_norm(parts).to(self.device)
        return self.all_reduce(own.double() ** 2).sqrt().float()

    def is_same(self, number: int) -> bool:
        """Whether all ranks gave this number."""
        bounds = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        highest, lowest = bounds.tolist()
        return bool(highest == -lowest)

    def wait(self) -> None:
        """A barrier."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


_MESSAGE_BYTES = 512


class Failure:
    """The first error of this rank, kept until all ranks have made their collective calls."""

    def __init__(self) -> None:
        """There is none yet."""
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Keep an error; an interrupt is raised at once."""
        if not isinstance(error, Exception):
            return False
        self._error = self._error or error
        return True

    def all_errors(self, ranks: Ranks) -> list[str]:
        """The errors of other ranks, beginning with their numbers; raises that of this rank."""
        message_B = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=ranks.device)
        if self._error is not None:
            text = f"rank {ranks.rank}: {type(self._error).__name__}: {self._error}"
            own = bytearray(text.partition("\n")[0].encode()[:_MESSAGE_BYTES])
            message_B[: len(own)] = torch.frombuffer(own, dtype=torch.uint8).to(ranks.device)
        rows = ranks.all_gather(message_B).view(ranks.world, -1).cpu()
        if self._error is not None:
            raise self._error
        texts = (bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows)
        return [text for text in texts if text]


def open_ranks(
    init_method: str,
    *,
    rank: int,
    world: int,
    device: str = "cpu",
    timeout_seconds: float = 1800.0,
) -> Ranks:
    """Join the process group at an address like `tcp://host:port` or `file:///path`.

    A rank on a GPU names it: `cuda:0`.
    """
    place = torch.device(device)
    require(
        place.type in _BACKENDS,
        f"a sharded trainer must run on one of {sorted(_BACKENDS)}, got {device!r}",
    )
    require(
        0 <= rank < world,
        f"the rank must lie in 0..{world - 1} (all ranks of the world), got {rank}",
    )
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        _BACKENDS[place.type],
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return Ranks(place)
