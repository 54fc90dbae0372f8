"""Checkpoints of a sharded trainer: the files of one process, or the files of every rank.

    full                         sharded
      model/                       model/         config and tokenizer only
      optimiser.safetensors        shards/        the rows of each rank: model, optimiser, critic
      critic...safetensors
      held.bin                     held.bin

A full one is what the trainer of one process writes and reads; the first rank gathers one file
after the other in its main memory. A sharded one is written by all ranks at once into a folder
that all of them see, and read by any number of ranks, or by one process (`read_joined`). It is a
`torch.distributed.checkpoint` in safetensors: a tensor is called `group/name`, and the header of
each file says which rows it has, so there is no index, and no pickle.

The functions are called by all ranks together, and written inside `save` of `training.checkpoint`,
which makes the folder and seals it. A rank that cannot write says so only after it has done its
part of the collective operations; then all of them raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

from sortedrl.errors import CheckpointError
from sortedrl.models.loading import without_bars
from sortedrl.training.checkpoint import refuse_not_finite, write_tensors
from sortedrl.training.fsdp.model import on_first, part_of, rows_of
from sortedrl.training.fsdp.ranks import Ranks
from sortedrl.training.fsdp.trainer import ShardedTrainer
from sortedrl.training.trainer import PolicyTrainer

_FOLDER = "shards"
_OLD_INDEX = "shards.json"
_FILE_BYTES = 1 << 30
_USE_ANOTHER = "use another checkpoint"


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint was written by ranks, each its part."""
    if (folder / _OLD_INDEX).exists():
        raise CheckpointError(
            f"{folder}: its shards must be in the format of torch.distributed.checkpoint, but "
            "are older; resume it with the version of sortedrl that wrote it"
        )
    return (folder / _FOLDER).is_dir()


def _write_shards(folder: Path, groups: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> None:
    """Write what this rank has; one file at a time is in main memory."""
    tensors = {
        f"{group}/{name}": tensor.detach()
        for group, members in groups.items()
        for name, tensor in members.items()
    }
    files, size = {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // _FILE_BYTES
        size += tensor.numel() * tensor.element_size() // ranks.world
    writer = HuggingFaceStorageWriter(str(folder / _FOLDER), files, save_distributed=True)
    try:
        save_shards(tensors, storage_writer=writer)
    except CheckpointException as error:
        failure, _ = error.failures.get(ranks.rank) or next(iter(error.failures.values()))
        raise failure from error


class Shards:
    """The shards of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read what there is."""
        self._folder = folder
        try:
            found = self._reader().read_metadata().state_dict_metadata
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder / _FOLDER}: cannot be read ({error!r}); {_USE_ANOTHER}"
            ) from error
        self._tensors = {n: t for n, t in found.items() if isinstance(t, TensorStorageMetadata)}
        # What no file holds would be left as it was, without an error.
        for name, tensor in self._tensors.items():
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise CheckpointError(
                    f"{folder / _FOLDER}: rows of {name!r} are missing; {_USE_ANOTHER}"
                )

    def shapes(self, group: str) -> dict[str, torch.Size]:
        """The shapes of a group's whole tensors, by name."""
        start = f"{group}/"
        found = {n.removeprefix(start): t for n, t in self._tensors.items() if n.startswith(start)}
        if not found:
            raise CheckpointError(
                f"{self._folder}: has no {group}; it was saved by a run with other settings, "
                "resume with those"
            )
        return {name: tensor.size for name, tensor in found.items()}

    def read(self, group: str, ranks: Ranks | None) -> dict[str, Tensor]:
        """The tensors of a group, by name: whole, or with the rows of this rank."""
        tensors = {
            f"{group}/{name}": self._empty(f"{group}/{name}", shape, ranks)
            for name, shape in self.shapes(group).items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                load_shards(tensors, storage_reader=self._reader(), no_dist=ranks is None)
            except CheckpointException as error:
                failure, _ = next(iter(error.failures.values()))
                raise CheckpointError(
                    f"{self._folder / _FOLDER}: cannot be read ({failure!r}); {_USE_ANOTHER}"
                ) from error
        return {name.removeprefix(f"{group}/"): tensor for name, tensor in tensors.items()}

    def _empty(self, name: str, shape: torch.Size, ranks: Ranks | None) -> Tensor:
        dtype = self._tensors[name].properties.dtype
        if ranks is None:
            return torch.empty(shape, dtype=dtype)
        start, stop = rows_of(shape[0], rank=ranks.rank, world=ranks.world)
        own = torch.empty((stop - start, *shape[1:]), dtype=dtype, device=ranks.device)
        return part_of(own, ranks, shape=shape)

    def _reader(self) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(str(self._folder / _FOLDER))


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
    """Continue from a full checkpoint, whose model is loaded already."""
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
    with failure:
        _write_shards(folder, groups, ranks)
    with failure, without_bars():
        if ranks.is_first:
            model.config.save_pretrained(folder / _MODEL)
            tokenizer.save_pretrained(folder / _MODEL)
            trainer.trainer.write_held(folder)
    failure.tell(ranks, folder)
    return trainer.trainer.counters()


def read_sharded(trainer: ShardedTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Continue from a sharded checkpoint of any number of ranks; the model is read too."""
    shards, ranks = Shards(folder), trainer.ranks
    _load_model(trainer.model, shards.read(_MODEL, ranks), folder)
    trainer.trainer.load(folder, counters, read=lambda _, group: shards.read(group, ranks))


def read_joined(trainer: PolicyTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Continue from a sharded checkpoint in one process; the model is read too."""
    shards = Shards(folder)
    _load_model(trainer.model, shards.read(_MODEL, None), folder)
    trainer.load(folder, counters, read=lambda _, group: shards.read(group, None))


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
    """The live tensors of a model, each by the first of its names."""
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
    """The first error of this rank, kept until all ranks have made their collective calls."""

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
        """Keep an error; an interrupt is raised at once."""
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
                "their errors, then resume"
            )
