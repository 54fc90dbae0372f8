"""Whole tensors of a model that is spread over ranks, a bucket at a time.

No rank ever holds more than its part of the model and one bucket. All ranks must go through the
buckets together, to the end, and each sees all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from sortedrl.config import require
from sortedrl.training.sharded.ranks import Ranks

Bucket = list[tuple[str, Tensor]]
_BUCKET_BYTES = 256 << 20


def buckets(model: nn.Module, *, max_bytes: int) -> Iterator[Bucket]:
    """The weights by name, in parts of at most `max_bytes`.

    A larger tensor has a bucket of its own. Names of one tensor stand next to each other.
    """
    # Asking for the state makes every layer let go of what it gathered.
    yield from gathered(model.state_dict(keep_vars=True), max_bytes=max_bytes)


def gathered(tensors: Mapping[str, Tensor], *, max_bytes: int) -> Iterator[Bucket]:
    """The same of any tensors."""
    require(max_bytes >= 1, f"a bucket must have room for at least 1 byte, got {max_bytes}")
    bucket: Bucket = []
    size = 0
    for names in _by_tensor(tensors.items()):
        part = tensors[names[0]]
        num_bytes = part.numel() * part.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        tensor = whole(part)
        bucket += [(name, tensor) for name in names]
        size += num_bytes
    if bucket:
        yield bucket


def on_first(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The whole tensors in the main memory of the first rank; nothing on the others."""
    found: dict[str, Tensor] = {}
    for bucket in gathered(tensors, max_bytes=_BUCKET_BYTES):
        if ranks.is_first:
            found.update((name, tensor.cpu()) for name, tensor in bucket)
    return found


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this rank has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def rows_of(size: int, *, rank: int, world: int) -> tuple[int, int]:
    """The first row of a rank's part of a tensor with so many rows, and the one after its last.

    >>> [rows_of(5, rank=rank, world=4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = -(-size // world)
    return min(rank * most, size), min((rank + 1) * most, size)


def part_of(own: Tensor, ranks: Ranks, *, shape: torch.Size) -> DTensor:
    """A spread tensor of this shape, of which this rank's rows are given."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        own.to(ranks.device),
        ranks.mesh,
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=strides,
    )


def _by_tensor(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """Names of the same tensor together, in the order in which tensors are first named."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
