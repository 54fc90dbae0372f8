"""Checkpoints of a sharded trainer: the files of one process, or one file per rank.

    full                         sharded
      model/                       model/         config and tokenizer only
      optimiser.safetensors        shards/        one file per rank: model, optimiser, critic
      critic...safetensors         shards.json    who has which rows
      held.bin                     held.bin

A full one is what the trainer of one process writes and reads; the first rank gathers one file
after the other in its main memory. A sharded one is written by all ranks at once into a folder
that all of them see, and read by any number of ranks, or by one process (`read_joined`):

    shards/rank-00000.safetensors   the rows of rank 0 of every tensor, as `group/name`
    shards/rank-00001.safetensors
    shards.json                     {"groups": {"optimiser": {"first_moment.lm_head.weight":
                                        {"shape": [128, 48], "rows": [[0, 64], [64, 128]]}, ...

Any rows can be read from it, however many ranks there were, and only they are read. A tensor that
is not sharded lies whole with rank 0.

The functions are called by all ranks together, and written inside `save` of `training.checkpoint`,
which makes the folder and seals it. A rank that cannot write says so only after it has done its
part of the collective operations; then all of them raise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sortedrl.errors import CheckpointError
from sortedrl.models.loading import without_bars
from sortedrl.training.checkpoint import refuse_not_finite, write_tensors
from sortedrl.training.fsdp.model import on_first, part_of, rows_of
from sortedrl.training.fsdp.ranks import Ranks
from sortedrl.training.fsdp.trainer import ShardedTrainer
from sortedrl.training.trainer import PolicyTrainer

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


_MODEL = "model"


def write_full(trainer: ShardedTrainer, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Write model and trainer as one process does; gives the counters."""
    model, ranks = trainer.model, trainer.ranks
    _refuse_not_finite(trainer)
    failure = _Failure()
    weights = on_first(model.state_dict(keep_vars=True), ranks)
    with failure, without_bars():
        if ranks.is_first:
            model.save_pretrained(folder / _MODEL, state_dict=weights)
            tokenizer.save_pretrained(folder / _MODEL)
            trainer.trainer.write_held(folder)
    del weights
    for name, tensors in trainer.trainer.tensors().items():
        whole = on_first(tensors, ranks)
        with failure:
            if ranks.is_first:
                write_tensors(folder, name, tensors=whole)
        del whole
    failure.tell(ranks, folder)
    return trainer.trainer.counters()


def read_full(trainer: ShardedTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Go on from a full checkpoint, whose model is loaded already."""
    ranks = trainer.ranks

    def read(folder: Path, name: str) -> dict[str, Tensor]:
        path = folder / f"{name}.safetensors"
        found: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (a file is no mapping)
                    part = file.get_slice(key)
                    shape = torch.Size(part.get_shape())
                    start, stop = rows_of(shape[0], rank=ranks.rank, world=ranks.world)
                    found[key] = part_of(part[start:stop], ranks, shape=shape)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); use another checkpoint"
            ) from error
        return found

    trainer.trainer.load(folder, counters, read=read)


def write_sharded(trainer: ShardedTrainer, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Write what this rank has of model and trainer; gives the counters."""
    model, ranks = trainer.model, trainer.ranks
    _refuse_not_finite(trainer)
    failure = _Failure()
    groups = {_MODEL: _model_tensors(model), **trainer.trainer.tensors()}
    with failure, without_bars():
        write_shard(folder, groups, rank=ranks.rank, world=ranks.world)
        if ranks.is_first:
            model.config.save_pretrained(folder / _MODEL)
            tokenizer.save_pretrained(folder / _MODEL)
            trainer.trainer.write_held(folder)
    failure.tell(ranks, folder)
    return trainer.trainer.counters()


def read_sharded(trainer: ShardedTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Go on from a sharded checkpoint, of as many ranks or of others; the model is read too."""
    shards, ranks = Shards(folder), trainer.ranks

    def read(_: Path, group: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, shape in shards.shapes(group).items():
            start, stop = rows_of(shape[0], rank=ranks.rank, world=ranks.world)
            own = shards.rows(group, name, start=start, stop=stop)
            found[name] = part_of(own, ranks, shape=shape)
        return found

    _load_model(trainer.model, read(folder, _MODEL), folder)
    trainer.trainer.load(folder, counters, read=read)


def read_joined(trainer: PolicyTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Go on from a sharded checkpoint in one process; the model is read too."""
    shards = Shards(folder)
    _load_model(trainer.model, shards.whole(_MODEL), folder)
    trainer.load(folder, counters, read=lambda _, group: shards.whole(group))


def refuse_broken_model(trainer: ShardedTrainer) -> None:
    """Raise on all ranks where the weights are not finite."""
    _refuse_parts(dict(trainer.model.named_parameters()), trainer.ranks)


def _refuse_not_finite(trainer: ShardedTrainer) -> None:
    refuse_broken_model(trainer)
    for tensors in trainer.trainer.tensors().values():
        _refuse_parts(tensors, trainer.ranks)


def _refuse_parts(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    own = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    refuse_not_finite(own, together=lambda flags: ranks.all_reduce(flags.to(ranks.device)))


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The living tensors of a model, each by the first of its names."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


@torch.no_grad()
def _load_model(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    own = _model_tensors(model)
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise CheckpointError(
                f"{folder}: its model must be that of the run, but they differ in {name!r}; "
                "resume with the settings of its run"
            )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


class _Failure:
    """What went wrong on this rank first, kept until all ranks can hear of it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Keep an error for later; an interrupted process has no later."""
        if not isinstance(error, Exception):
            return False
        self._error = self._error or error
        return True

    def tell(self, ranks: Ranks, folder: Path) -> None:
        """Raise on all ranks if one of them failed."""
        failed = torch.tensor(float(self._error is not None), device=ranks.device)
        num_failed = int(ranks.all_reduce(failed))
        if self._error is not None:
            raise self._error
        if num_failed:
            raise CheckpointError(
                f"{folder}: {num_failed} of {ranks.world} ranks could not write their part; see "
                "their errors, and resume"
            )
