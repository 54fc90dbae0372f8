"""A sharded trainer in a checkpoint: the files of one process, or one file per rank.

    full                         sharded
      model/                       model/         config and tokenizer only
      optimiser.safetensors        shards/        one file per rank: model, optimiser, critic
      critic...safetensors         shards.json    who has which rows
      held.bin                     held.bin

A full one is what the trainer of one process writes and reads; the first rank gathers one file
after the other in its main memory. A sharded one is written by all ranks at once into a folder
that all of them see, and read by any number of ranks, or by one process (`read_joined`).

The functions are called by all ranks together, and written inside `save` of `training.checkpoint`,
which makes the folder and seals it. A rank that cannot write says so only after it has done its
part of what all do together; then all of them raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sortedrl.errors import CheckpointError
from sortedrl.models.quiet import without_bars
from sortedrl.training.checkpoint import refuse_not_finite, write_tensors
from sortedrl.training.sharded.ranks import Ranks
from sortedrl.training.sharded.shards import Shards, write_shard
from sortedrl.training.sharded.trainer import ShardedTrainer
from sortedrl.training.sharded.weights import on_first, part_of, rows_of
from sortedrl.training.trainer import PolicyTrainer
from sortedrl.training.trainer_files import (
    read_trainer,
    trainer_counters,
    trainer_tensors,
    write_held,
)

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
            write_held(trainer.trainer, folder)
    del weights
    for name, tensors in trainer_tensors(trainer.trainer).items():
        whole = on_first(tensors, ranks)
        with failure:
            if ranks.is_first:
                write_tensors(folder, name, tensors=whole)
        del whole
    failure.tell(ranks, folder)
    return trainer_counters(trainer.trainer)


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

    read_trainer(trainer.trainer, folder, counters, read=read)


def write_sharded(trainer: ShardedTrainer, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Write what this rank has of model and trainer; gives the counters."""
    model, ranks = trainer.model, trainer.ranks
    _refuse_not_finite(trainer)
    failure = _Failure()
    groups = {_MODEL: _model_tensors(model), **trainer_tensors(trainer.trainer)}
    with failure, without_bars():
        write_shard(folder, groups, rank=ranks.rank, world=ranks.world)
        if ranks.is_first:
            model.config.save_pretrained(folder / _MODEL)
            tokenizer.save_pretrained(folder / _MODEL)
            write_held(trainer.trainer, folder)
    failure.tell(ranks, folder)
    return trainer_counters(trainer.trainer)


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
    read_trainer(trainer.trainer, folder, counters, read=read)


def read_joined(
    trainer: PolicyTrainer, folder: Path, *, model: PreTrainedModel, counters: Mapping[str, Any]
) -> None:
    """Go on from a sharded checkpoint in one process; the model is read too."""
    shards = Shards(folder)
    _load_model(model, shards.whole(_MODEL), folder)
    read_trainer(trainer, folder, counters, read=lambda _, group: shards.whole(group))


def refuse_broken_model(trainer: ShardedTrainer) -> None:
    """Raise on all ranks where the weights are not finite."""
    _refuse_parts(dict(trainer.model.named_parameters()), trainer.ranks)


def _refuse_not_finite(trainer: ShardedTrainer) -> None:
    refuse_broken_model(trainer)
    for tensors in trainer_tensors(trainer.trainer).values():
        _refuse_parts(tensors, trainer.ranks)


def _refuse_parts(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    own = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    refuse_not_finite(own, together=lambda flags: ranks.summed(flags.to(ranks.device)))


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
        num_failed = int(ranks.summed(failed))
        if self._error is not None:
            raise self._error
        if num_failed:
            raise CheckpointError(
                f"{folder}: {num_failed} of {ranks.world} ranks could not write their part; see "
                "their errors, and resume"
            )
