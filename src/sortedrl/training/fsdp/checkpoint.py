"""Checkpoints of a sharded trainer: the files of one process, or the files of every rank.

    full                         sharded
      model/                       model/         config and tokenizer only
      optimiser.safetensors        shards/        the rows of each rank: model, optimiser, critic
      critic...safetensors
      held.bin                     held.bin

A full one is what the trainer of one process writes and reads; the ranks gather one tensor after
the other, and the first writes it at its place in the file. A sharded one is written by all ranks
at once into a folder that all of them see, and read by any number of ranks, or by one process
(`read_joined`). It is a `torch.distributed.checkpoint` in safetensors: a tensor is called
`group/name`, and the header of each file says which rows it has, so there is no index, and no
pickle.

Where adapters are trained, the `model/` of a full one is the merged model, and the adapters are a
file of their own; a sharded one has the adapters alone.

The functions are called by all ranks together, and written inside `save` of `training.checkpoint`,
which makes the folder and seals it. A rank that cannot write reports it only after its part of
the collective operations; then all ranks raise.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from sortedrl.errors import CheckpointError
from sortedrl.models.loading import names_by_tensor, without_bars
from sortedrl.models.offload import in_buckets
from sortedrl.training.checkpoint import TensorFile, refuse_not_finite
from sortedrl.training.fsdp.model import part_of, rows_of, size_of, whole
from sortedrl.training.fsdp.ranks import Failure, Ranks
from sortedrl.training.fsdp.trainer import ShardedTrainer
from sortedrl.training.lora import (
    ADAPTER_FILE,
    adapter_names,
    adapter_scale,
    adapters_among,
    merged_weight,
    plain_name,
    plain_skeleton,
)
from sortedrl.training.trainer import PolicyTrainer

_FOLDER = "shards"
# The writer makes two copies of what a file has.
_FILE_BYTES = 128 << 20
_USE_ANOTHER = "use another checkpoint"


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint was written by ranks, each its part."""
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
        size += size_of(tensor) // ranks.world
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
# As large as the files of most models on the hub.
_MODEL_FILE_BYTES = 5 << 30


def write_full(trainer: ShardedTrainer, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Write model and trainer as one process does; gives the counters."""
    model, ranks = trainer.model, trainer.ranks
    _refuse_not_finite(trainer)
    failure = Failure()
    _write_model(model, folder / _MODEL, ranks, tokenizer=tokenizer, failure=failure)
    with failure:
        if ranks.is_first:
            trainer.trainer.write_held(folder)
    files = trainer.trainer.tensors()
    if model._hf_peft_config_loaded:
        files[ADAPTER_FILE] = adapters_among(model.state_dict(keep_vars=True))
    for name, tensors in files.items():
        _write_file(folder / f"{name}.safetensors", tensors, ranks, failure=failure)
    _raise_together(failure, ranks, folder)
    return trainer.trainer.counters()


def export_whole(
    trainer: ShardedTrainer,
    folder: Path,
    *,
    tokenizer: Any,  # noqa: ANN401
    file_bytes: int = _MODEL_FILE_BYTES,
) -> None:
    """Write the trained model as one process does, adapters merged, in files of that size."""
    model, ranks = trainer.model, trainer.ranks
    _refuse_parts(dict(model.named_parameters()), ranks)
    failure = Failure()
    _write_model(model, folder, ranks, tokenizer=tokenizer, failure=failure, file_bytes=file_bytes)
    _raise_together(failure, ranks, folder)


def _write_model(
    model: PreTrainedModel,
    folder: Path,
    ranks: Ranks,
    *,
    tokenizer: Any,  # noqa: ANN401
    failure: Failure,
    file_bytes: int = _MODEL_FILE_BYTES,
) -> None:
    """Write a Hugging Face folder, one weight at a time in memory."""
    tensors = model.state_dict(keep_vars=True)
    adapters = adapters_among(tensors)
    own = {plain_name(n): t for n, t in _first_names(tensors).items() if n not in adapters}
    scale = adapter_scale(model) if adapters else 1.0

    def merged(name: str) -> Tensor:
        parts = {part: whole(adapters[part]) for part in adapter_names(name) if part in adapters}
        return merged_weight(name, whole(own[name]), parts, scale=scale)

    plain = plain_skeleton(model)
    if get_model_conversion_mapping(plain, add_legacy=False):
        # Its files have other tensors, made of several weights: transformers must see all of them.
        gathered, files = _on_first(own, ranks, whole_of=merged), {}
    else:
        gathered, files = {}, _files_of(own, file_bytes)
    with failure, without_bars():
        if ranks.is_first:
            plain.save_pretrained(folder, state_dict=gathered)
            tokenizer.save_pretrained(folder)
            if len(files) > 1:
                _write_index(folder, own, files)
    for file, names in files.items():
        tensors = {name: own[name] for name in names}
        _write_file(folder / file, tensors, ranks, whole_of=merged, failure=failure)


def _on_first(
    names: Iterable[str], ranks: Ranks, *, whole_of: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Whole tensors in the main memory of the first rank; nothing on the others."""
    found = {}
    for name in names:
        tensor = whole_of(name)
        if ranks.is_first:
            found[name] = tensor.cpu()
    return found


def _files_of(tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, list[str]]:
    """The names in each file of a model, as the hub calls the files."""
    sized = ((name, size_of(tensor)) for name, tensor in tensors.items())
    groups = list(in_buckets(sized, max_bytes=file_bytes))
    if len(groups) == 1:
        return {SAFE_WEIGHTS_NAME: groups[0]}
    stem = SAFE_WEIGHTS_NAME.removesuffix(".safetensors")
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _write_index(
    folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, list[str]]
) -> None:
    size = sum(map(size_of, tensors.values()))
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    failure: Failure,
    whole_of: Callable[[str], Tensor] | None = None,
) -> None:
    """Write one file: all ranks gather one tensor after the other, the first writes it.

    `whole_of` gives the whole tensor of a name, where it is not the gathered one.
    """
    file = None
    with failure:
        if ranks.is_first:
            file = TensorFile(path, tensors)
    for name, part in tensors.items():
        tensor = whole(part) if whole_of is None else whole_of(name)
        with failure:
            if file is not None:
                file.add(name, tensor)
        del tensor
    with failure:
        if file is not None:
            file.close()


def read_full(trainer: ShardedTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Continue from a full checkpoint, whose model is loaded already; adapters are read."""
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

    if trainer.model._hf_peft_config_loaded:
        _load_model(trainer.model, read(folder, ADAPTER_FILE), folder)
    trainer.trainer.load(folder, counters, read=read)


def write_sharded(trainer: ShardedTrainer, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Write what this rank has of model and trainer; gives the counters."""
    model, ranks = trainer.model, trainer.ranks
    _refuse_not_finite(trainer)
    failure = Failure()
    groups = {_group(model): _saved_tensors(model), **trainer.trainer.tensors()}
    with failure:
        _write_shards(folder, groups, ranks)
    with failure, without_bars():
        if ranks.is_first:
            model.config.save_pretrained(folder / _MODEL)
            tokenizer.save_pretrained(folder / _MODEL)
            trainer.trainer.write_held(folder)
    _raise_together(failure, ranks, folder)
    return trainer.trainer.counters()


def read_sharded(trainer: ShardedTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Continue from a sharded checkpoint of any number of ranks; the model is read too."""
    shards, ranks = Shards(folder), trainer.ranks
    _load_model(trainer.model, shards.read(_group(trainer.model), ranks), folder)
    trainer.trainer.load(folder, counters, read=lambda _, group: shards.read(group, ranks))


def read_joined(trainer: PolicyTrainer, folder: Path, *, counters: Mapping[str, Any]) -> None:
    """Continue from a sharded checkpoint in one process; the model is read too."""
    shards = Shards(folder)
    _load_model(trainer.model, shards.read(_group(trainer.model), None), folder)
    trainer.load(folder, counters, read=lambda _, group: shards.read(group, None))


def _refuse_not_finite(trainer: ShardedTrainer) -> None:
    _refuse_parts(dict(trainer.model.named_parameters()), trainer.ranks)
    for tensors in trainer.trainer.tensors().values():
        _refuse_parts(tensors, trainer.ranks)


def _refuse_parts(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    own = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    refuse_not_finite(own, together=lambda flags: ranks.all_reduce(flags.to(ranks.device)))


def _group(model: PreTrainedModel) -> str:
    """What a sharded checkpoint calls what it has of a model."""
    return ADAPTER_FILE if model._hf_peft_config_loaded else _MODEL


def _saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The live tensors that a checkpoint has of a model: its adapters, or else all of them."""
    tensors = model.state_dict(keep_vars=True)
    return adapters_among(tensors) or _first_names(tensors)


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor by the first of its names."""
    return {names[0]: tensors[names[0]] for names in names_by_tensor(tensors)}


@torch.no_grad()
def _load_model(model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    own = _saved_tensors(model)
    what = "adapters" if model._hf_peft_config_loaded else "model"
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise CheckpointError(
                f"{folder}: its {what} must be that of the run, but they differ in {name!r}; "
                "resume with the settings of its run"
            )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _raise_together(failure: Failure, ranks: Ranks, folder: Path) -> None:
    """Raise on all ranks if one of them failed."""
    errors = failure.all_errors(ranks)
    if errors:
        raise CheckpointError(
            f"{folder}: {len(errors)} of {ranks.world} ranks could not write their part; "
            f"{errors[0]}; fix this, and resume"
        )
