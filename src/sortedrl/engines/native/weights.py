"""Weights from elsewhere into the engine's module: checked by name and shape, then copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sortedrl.errors import DataError, ModelError


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of every `.safetensors` file of a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise DataError(path, "holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise DataError(file, f"is not a readable safetensors file: {error}") from error
    return tensors


def checked_weights(model: nn.Module, tensors: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors for each parameter of a model, or a `ModelError`."""
    own = dict(model.named_parameters())
    tied = model.state_dict().keys() - own.keys()
    missing = sorted(own.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - own.keys() - tied)
    if missing or unknown:
        raise ModelError(
            "the weights must be those of this model; "
            f"missing: {', '.join(missing[:3]) or 'none'}; "
            f"unknown: {', '.join(unknown[:3]) or 'none'}"
        )
    return {name: _fitting(name, tensors[name], parameter) for name, parameter in own.items()}


def copy_weights(model: nn.Module, tensors: Mapping[str, object]) -> None:
    """Copy named tensors into a model's parameters; nothing is copied unless all of them fit."""
    fitting = checked_weights(model, tensors)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(fitting[name])


def _fitting(name: str, tensor: object, parameter: Tensor) -> Tensor:
    if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
        return tensor
    given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    raise ModelError(f"{name} must be a tensor of shape {tuple(parameter.shape)}, got {given}")
