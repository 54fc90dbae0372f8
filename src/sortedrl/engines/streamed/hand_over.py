"""Weights on their way to an engine in another process: a folder with one safetensors file.

The folder of a version is complete as soon as it is there, and the one before it is gone.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sortedrl.errors import EngineError
from sortedrl.types import Weights

_WEIGHTS = "model.safetensors"


def write_weights(weights: Weights, folder: Path) -> Path:
    """Write the tensors of a version below `folder`; gives the folder that holds them."""
    target, unfinished = folder / f"version-{weights.version}", folder / "unfinished"
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file(named_tensors(weights), unfinished / _WEIGHTS)
        for old in folder.glob("version-*"):
            _remove(old)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        _remove(unfinished)
        raise EngineError(
            f"the weights cannot be handed over through {folder}: {error}; it needs room for all "
            "weights, and every engine must be able to read it"
        ) from error
    return target


def remove_weights(folder: Path) -> None:
    """Remove what was written below `folder`, and the folder itself if nothing else is there."""
    for old in (*folder.glob("version-*"), folder / "unfinished"):
        _remove(old)
    with suppress(OSError):
        folder.rmdir()


def _remove(version: Path) -> None:
    """Remove the folder of a version; what somebody else has put there stays."""
    with suppress(OSError):
        (version / _WEIGHTS).unlink(missing_ok=True)
        version.rmdir()


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """The tensors by name, each once and in one piece."""
    assert weights.tensors is not None, "an outside engine needs the tensors themselves"
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in weights.tensors.items():
        assert isinstance(tensor, Tensor), f"{name} is no tensor"
        # Tied weights are one tensor with two names; a checkpoint has the first of them.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor.detach().contiguous()
    return tensors
