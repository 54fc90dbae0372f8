"""Low-rank adapters through peft: added to a model in place, merged for the engine and for export.

A model with and without adapters is exported alike: as the plain model, in a folder that
transformers reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sortedrl.config.train import Lora
from sortedrl.errors import CheckpointError, ConfigError
from sortedrl.models.loading import without_bars
from sortedrl.training.checkpoint import read_tensors, refuse_not_finite

_NAME = "default"
_PART = ".lora_"
ADAPTER_FILE = "adapters"


def add_adapters(model: PreTrainedModel, lora: Lora, *, seed: int) -> None:
    """Add adapters initialised to no change; only they are trained from now on.

    They have values even where the model has no weights yet.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            "lora.rank needs the package peft; install it with pip install 'sortedrl[lora]'"
        ) from error
    assert lora.rank is not None, "without a rank there are no adapters"
    targets = lora.targets[0] if lora.targets == ("all-linear",) else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    with torch.random.fork_rng(), _as_with_weights(model):
        torch.random.manual_seed(seed)
        try:
            model.add_adapter(config, _NAME)
        except ValueError as error:
            raise ConfigError(f"lora.targets {list(lora.targets)}: {error}") from error
    _refuse_other_layers(model)


@contextmanager
def _as_with_weights(model: PreTrainedModel) -> Iterator[None]:
    """Weights without memory look like CPU weights, which decide the device of the adapters."""
    without = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.is_meta
    ]
    for module, name, weight in without:
        shown = torch.empty(1, dtype=weight.dtype).expand(weight.shape)
        module.register_parameter(name, nn.Parameter(shown))
    try:
        yield
    finally:
        for module, name, weight in without:
            weight.requires_grad_(module.get_parameter(name).requires_grad)
            module.register_parameter(name, weight)


def plain_name(name: str) -> str:
    """The name of a weight with adapters in the plain model."""
    return name.replace(".base_layer.", ".")


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
        plain_name(name): (tensor + deltas[name].to(tensor.dtype)) if name in deltas else tensor
        for name, tensor in model.state_dict().items()
        if _PART not in name
    }


def refuse_transposed_layers(model: PreTrainedModel) -> None:
    """Refuse adapters of layers with transposed weights: they are merged by name only."""
    from peft.tuners.lora import Linear

    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.fan_in_fan_out:
            raise ConfigError(
                f"lora.rank over trainer ranks needs plain linear layers, got {name} of "
                f"{type(model).__name__}; set cluster.trainer_ranks to 0"
            )


def adapter_scale(model: PreTrainedModel) -> float:
    """The factor of the product of an adapter's two parts."""
    from peft.tuners.lora import Linear

    scales = (module.scaling[_NAME] for module in model.modules() if isinstance(module, Linear))
    return float(next(scales))


def adapters_among(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of these tensors that are of adapters."""
    return {name: tensor for name, tensor in tensors.items() if _PART in name}


def adapter_names(name: str) -> tuple[str, str]:
    """The names of the two parts of the adapter of a weight, if it has one."""
    layer = name.removesuffix(".weight")
    return f"{layer}{_PART}A.{_NAME}.weight", f"{layer}{_PART}B.{_NAME}.weight"


def merged_weight(
    name: str, weight: Tensor, adapters: Mapping[str, Tensor], *, scale: float
) -> Tensor:
    """A weight of the plain model, by its name, with its adapter merged if it has one.

    What `merged_tensors` gives, where base and adapters come from different places.
    """
    if not all(part in adapters for part in adapter_names(name)):
        return weight
    down, up = (adapters[part] for part in adapter_names(name))
    delta = (up @ down) * scale
    return weight + delta.to(weight.device, weight.dtype)


class MergedWeights(Mapping[str, Tensor]):
    """The weights of the plain model: those that a run began with, with adapters merged.

    A weight is merged whenever it is read, and not kept.
    """

    def __init__(
        self, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], *, scale: float
    ) -> None:
        """Nothing is merged yet."""
        self._base = base
        self._adapters = adapters
        self._scale = scale

    def __getitem__(self, name: str) -> Tensor:
        """The merged weight, where the base is: a GPU may have no room for whole weights."""
        return merged_weight(name, self._base[name], self._adapters, scale=self._scale)

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._base)

    def __len__(self) -> int:
        """The number of weights."""
        return len(self._base)


def plain_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by the names of the plain model, adapters merged: what an engine is given."""
    return merged_tensors(model) if model._hf_peft_config_loaded else model.state_dict()


def plain_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or a plain one without memory for its weights."""
    if not model._hf_peft_config_loaded:
        return model
    with torch.device("meta"):
        plain: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.generation_config = model.generation_config
    return plain


def export_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401
    """Write weights, config and tokenizer; no pickle, and no weights that are not finite."""
    export_tensors(plain_skeleton(model), plain_tensors(model), folder, tokenizer=tokenizer)


def export_tensors(
    plain: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    tokenizer: Any,  # noqa: ANN401
) -> None:
    """Write these weights of a plain model, by its names, as `export_model` writes its own."""
    refuse_not_finite(tensors)
    with without_bars():
        plain.save_pretrained(folder, state_dict=dict(tensors))
        tokenizer.save_pretrained(folder)


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
