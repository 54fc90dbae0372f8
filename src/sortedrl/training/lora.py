"""Low-rank adapters through peft: added to a model in place, and merged for export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sortedrl.config.train import Lora
from sortedrl.errors import CheckpointError, ConfigError
from sortedrl.training.checkpoint import read_tensors, write_tensors

_NAME = "default"
ADAPTER_FILE = "adapters"


def add_adapters(model: PreTrainedModel, lora: Lora, *, seed: int) -> None:
    """Add adapters initialised to no change; only they are trained from now on."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            "lora.rank needs the package peft; install it with pip install 'sortedrl[lora]'"
        ) from error
    assert lora.rank is not None, "without a rank there are no adapters"
    targets = lora.targets[0] if lora.targets == ("all-linear",) else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    with torch.random.fork_rng():
        torch.random.manual_seed(seed)
        try:
            model.add_adapter(config, _NAME)
        except ValueError as error:
            raise ConfigError(f"lora.targets {list(lora.targets)}: {error}") from error
    _refuse_other_layers(model)


def _refuse_other_layers(model: PreTrainedModel) -> None:
    """Only adapters of linear layers can be merged."""
    from peft.tuners.lora import Linear, LoraLayer

    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, Linear)
    ]
    if others:
        raise ConfigError(
            f"lora.targets must name linear layers, got {', '.join(others)}; leave those out"
        )


def merged_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the plain model that computes the same, by the plain model's names."""
    from peft.tuners.lora import Linear

    deltas: dict[str, Tensor] = {
        f"{name}.base_layer.weight": module.get_delta_weight(_NAME)
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }
    return {
        name.replace(".base_layer.", "."): (tensor + deltas[name].to(tensor.dtype))
        if name in deltas
        else tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }


def plain_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by the names of the plain model, adapters merged: what an engine is given."""
    return merged_tensors(model) if model._hf_peft_config_loaded else model.state_dict()


def merged_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or a plain one with its adapters merged."""
    if not model._hf_peft_config_loaded:
        return model
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.load_state_dict(merged_tensors(model))
    plain.generation_config = model.generation_config
    return plain


def plain_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or a plain one without memory for its weights."""
    if not model._hf_peft_config_loaded:
        return model
    with torch.device("meta"):
        plain: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.generation_config = model.generation_config
    return plain


def write_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters into a checkpoint."""
    write_tensors(folder, ADAPTER_FILE, tensors=trained_parameters(model))


@torch.no_grad()
def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Load the adapters of a checkpoint."""
    tensors = read_tensors(folder, ADAPTER_FILE)
    for name, parameter in trained_parameters(model).items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise CheckpointError(
                f"{folder}: holds no adapter {name} of shape {tuple(parameter.shape)}; "
                "resume with the lora settings of its run"
            )
        parameter.copy_(tensors[name])


def trained_parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """The parameters that an update changes, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
