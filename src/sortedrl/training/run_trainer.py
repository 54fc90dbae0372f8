"""The trainer of a run: beyond updates, it writes checkpoints and the trained model.

`LocalTrainer` trains in this process; a cluster has one that speaks to ranks elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from sortedrl.protocols import Trainer
from sortedrl.training.adapters import write_adapters
from sortedrl.training.export import export_model
from sortedrl.training.trainer import PolicyTrainer
from sortedrl.training.trainer_files import write_trainer
from sortedrl.types import TrainBatch, Weights


class RunTrainer(Trainer, Protocol):
    """What a run asks of its trainer beyond the loop."""

    @property
    def last(self) -> Mapping[str, float]:
        """The numbers of the last update."""

    @property
    def device(self) -> str:
        """What it computes on, for a person."""

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model as a folder that transformers reads."""

    def close(self) -> None:
        """Let go of everything it holds; a second time it does nothing."""


class LocalTrainer:
    """A trainer in this process, with its model."""

    def __init__(self, trainer: PolicyTrainer, *, model: PreTrainedModel) -> None:
        """The model is the one that the trainer trains."""
        self.trainer = trainer
        self.model = model

    @property
    def version(self) -> int:
        """Number of updates behind the weights."""
        return self.trainer.version

    @property
    def last(self) -> Mapping[str, float]:
        """The numbers of the last update."""
        return self.trainer.last

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(self.model.device)

    def update(self, batch: TrainBatch) -> None:
        """Make one policy update."""
        self.trainer.update(batch)

    def weights(self) -> Weights:
        """The present weights."""
        return self.trainer.weights()

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""
        return self.trainer.flush()

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model, adapters and trainer; gives the counters."""
        export_model(self.model, tokenizer, folder / "model")
        if self.model._hf_peft_config_loaded:
            write_adapters(self.model, folder)
        return write_trainer(self.trainer, folder)

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model, adapters folded in."""
        export_model(self.model, tokenizer, folder)

    def close(self) -> None:
        """Nothing to let go of."""
