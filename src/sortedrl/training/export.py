"""A trained model as a folder that transformers reads, with its tokenizer; adapters folded in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sortedrl.models.quiet import without_bars
from sortedrl.training.adapters import folded
from sortedrl.training.checkpoint import refuse_not_finite


def export_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401
    """Write weights, config and tokenizer; no pickle, and no weights that are not finite."""
    plain = _plain(model)
    refuse_not_finite(dict(plain.named_parameters()))
    with without_bars():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    if not model._hf_peft_config_loaded:
        return model
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.load_state_dict(folded(model))
    plain.generation_config = model.generation_config
    return plain


def plain_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by the names of the plain model, adapters folded in: what an engine is given."""
    return folded(model) if model._hf_peft_config_loaded else model.state_dict()
