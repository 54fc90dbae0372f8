"""Tensors in one safetensors file per rank, and a JSON file that says who has which rows.

    shards/rank-00000.safetensors   the rows of rank 0 of every tensor, as `group/name`
    shards/rank-00001.safetensors
    shards.json                     {"groups": {"optimiser": {"first_moment.lm_head.weight":
                                        {"shape": [128, 48], "rows": [[0, 64], [64, 128]]}, ...

Any rows can be read from it, however many ranks there were, and only they are read. A tensor that
is not spread lies whole with rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from sortedrl.errors import CheckpointError
from sortedrl.training.sharded.weights import rows_of

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by the part of the trainer that they belong to."""
_INDEX = "shards.json"
_FOLDER = "shards"
_USE_ANOTHER = "use another checkpoint"


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint was written by ranks, each its part."""
    return (folder / _INDEX).exists()


def write_shard(folder: Path, groups: Groups, *, rank: int, world: int) -> None:
    """Write what this rank has; the first rank also writes the index."""
    path = _file(folder, rank)
    path.parent.mkdir(exist_ok=True)
    own = {
        f"{group}/{name}": tensor
        for group, tensors in groups.items()
        for name, tensor in _own(tensors, rank=rank).items()
    }
    save_file(own, path)
    if rank == 0:
        index = {
            group: {name: _entry(tensor, world=world) for name, tensor in tensors.items()}
            for group, tensors in groups.items()
        }
        (folder / _INDEX).write_text(json.dumps({"groups": index}, indent=1) + "\n")


class Shards:
    """The shards in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the index."""
        self._folder = folder
        path = folder / _INDEX
        try:
            self._groups: dict[str, dict[str, Any]] = json.loads(path.read_bytes())["groups"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error!r}); {_USE_ANOTHER}") from error

    def shapes(self, group: str) -> dict[str, torch.Size]:
        """The shapes of a group's whole tensors, by name."""
        if group not in self._groups:
            raise CheckpointError(
                f"{self._folder}: has no {group}; it was saved by a run with other settings, "
                "resume with those"
            )
        return {name: torch.Size(entry["shape"]) for name, entry in self._groups[group].items()}

    def rows(self, group: str, name: str, *, start: int, stop: int) -> Tensor:
        """These rows of a tensor, on the CPU."""
        key = f"{group}/{name}"
        parts: list[Tensor] = []
        for rank, (first, end) in enumerate(self._groups[group][name]["rows"]):
            low, high = max(start, first), min(stop, end)
            if low < high:
                parts.append(self._read(rank, key, slice(low - first, high - first)))
        if not parts:
            # No rows are of the same kind as others, and the first rank always has some.
            return self._read(0, key, slice(0, 0))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def whole(self, group: str) -> dict[str, Tensor]:
        """The whole tensors of a group, by name."""
        return {
            name: self.rows(group, name, start=0, stop=shape[0])
            for name, shape in self.shapes(group).items()
        }

    def _read(self, rank: int, key: str, span: slice) -> Tensor:
        path = _file(self._folder, rank)
        try:
            with safe_open(path, framework="pt") as file:
                rows: Tensor = file.get_slice(key)[span]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); {_USE_ANOTHER}") from error
        return rows


def _file(folder: Path, rank: int) -> Path:
    return folder / _FOLDER / f"rank-{rank:05d}.safetensors"


def _own(tensors: Mapping[str, Tensor], *, rank: int) -> dict[str, Tensor]:
    """The rows that this rank has of each tensor, where it has any."""
    local = {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) or rank == 0
    }
    return {name: part.detach().contiguous() for name, part in local.items() if len(part)}


def _entry(tensor: Tensor, *, world: int) -> dict[str, Any]:
    size = len(tensor)
    ranks = range(world)
    spread = [rows_of(size, rank=rank, world=world) for rank in ranks]
    whole = [(0, size) if rank == 0 else (size, size) for rank in ranks]
    rows = spread if isinstance(tensor, DTensor) else whole
    return {"shape": list(tensor.shape), "rows": rows}
