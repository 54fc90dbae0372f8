"""Weights from elsewhere into the engine's module: checked by name and shape, then copied.

A rollout copy is often stored in 16 bits while the master weights are in 32. Plain rounding then
moves a few weights by a whole unit in the last place at every update, far more than the update
itself, and with them the answers. A weight can be *held* instead: it keeps its rounded value while
the master stays within `hold_ulps` units of it. 0.5 is plain rounding; at 1 the copy is at most
one unit off, and a weight that goes back and forth across a rounding boundary stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sortedrl.errors import DataError, ModelError

PLAIN_ROUNDING = 0.5
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of every `.safetensors` file of a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise DataError(path, "holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except Exception as error:
            raise DataError(file, f"is not a readable safetensors file: {error}") from error
    return tensors


def copy_weights(
    model: nn.Module, tensors: Mapping[str, object], *, hold_ulps: float = PLAIN_ROUNDING
) -> None:
    """Copy named tensors into a model's parameters; nothing is copied unless all of them fit."""
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
    fitting = {name: _fitting(name, tensors[name], parameter) for name, parameter in own.items()}
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(held(parameter, fitting[name], hold_ulps=hold_ulps))


def held(old: Tensor, master: Tensor, *, hold_ulps: float) -> Tensor:
    """The master rounded to the old tensor's type, except where the old value is near enough."""
    master = master.to(old.device)
    bits = _MANTISSA_BITS.get(old.dtype)
    if bits is None or hold_ulps <= PLAIN_ROUNDING or master.dtype == old.dtype:
        return master
    before = old.float()
    _, exponents = torch.frexp(before)
    reach = torch.ldexp(torch.full_like(before, hold_ulps), exponents - 1 - bits)
    return torch.where((master - before).abs() <= reach, before, master)


def _fitting(name: str, tensor: object, parameter: Tensor) -> Tensor:
    if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
        return tensor
    given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    raise ModelError(f"{name} must be a tensor of shape {tuple(parameter.shape)}, got {given}")
