"""The models of a training run, from its settings."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from sortedrl.models.loading import load_model
from sortedrl.training.adapters import add_adapters
from sortedrl.training.settings import TrainSettings
from sortedrl.training.supervision import SupervisedSettings

PRECISIONS = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def trained_model(
    settings: TrainSettings | SupervisedSettings,
    *,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> PreTrainedModel:
    """The model that is trained, with new adapters if it has any.

    It is that of the settings, unless another source, precision or device is given.
    """
    model = load_model(
        source or settings.model,
        dtype=dtype or PRECISIONS[settings.precision],
        device=device or settings.device,
    )
    if settings.lora.rank is not None:
        add_adapters(model, settings.lora, seed=settings.seed)
    if settings.passes.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def first_model(
    settings: TrainSettings, *, dtype: torch.dtype | None = None, device: str | None = None
) -> PreTrainedModel:
    """The model that the run began with, once more."""
    return load_model(
        settings.model,
        dtype=dtype or PRECISIONS[settings.precision],
        device=device or settings.device,
    )


def total_steps(settings: TrainSettings, *, num_rows: int) -> int:
    """Steps of the optimiser in the whole run, to which the learning rate is stretched."""
    updates = settings.updates_expected(num_rows=num_rows)
    return updates * settings.optimiser.steps * settings.optimiser.epochs
