"""The trainer of a run: beyond updates, it writes checkpoints and the trained model.

`LocalTrainer` trains in this process; a cluster has one that calls ranks elsewhere. In a checkpoint
the tensors of a trainer are safetensors files and its counters JSON. The trained model is exported
as a folder that transformers reads, with its tokenizer and with adapters merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sortedrl.core.buffer import BufferState
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.core.protocols import Trainer
from sortedrl.models.loading import without_bars
from sortedrl.training.checkpoint import read_tensors, refuse_not_finite, write_tensors
from sortedrl.training.lora import folded, write_adapters
from sortedrl.training.trainer import PolicyTrainer
from sortedrl.types import TrainBatch, Weights


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


_HELD = "held.bin"


def write_trainer(trainer: PolicyTrainer, folder: Path) -> dict[str, Any]:
    """Write everything but the model; gives the counters."""
    for name, tensors in trainer_tensors(trainer).items():
        refuse_not_finite(tensors)
        write_tensors(folder, name, tensors=tensors)
    write_held(trainer, folder)
    return trainer_counters(trainer)


def trainer_tensors(trainer: PolicyTrainer) -> dict[str, dict[str, Tensor]]:
    """For each file its tensors by name; they are the living ones."""
    files = {"optimiser": trainer.optimiser.state()[0]}
    if trainer.critic is not None:
        files["critic"] = trainer.critic.critic.tensors()
        files["critic_optimiser"] = trainer.critic.optimiser.state()[0]
    return files


def trainer_counters(trainer: PolicyTrainer) -> dict[str, Any]:
    """Everything small."""
    counters: dict[str, Any] = {
        "version": trainer.version,
        "num_bad": trainer.num_bad,
        "optimiser": trainer.optimiser.state()[1],
    }
    if trainer.moments is not None:
        counters["moments"] = trainer.moments.state()
    if trainer.critic is not None:
        counters["critic_optimiser"] = trainer.critic.optimiser.state()[1]
    return counters


def write_held(trainer: PolicyTrainer, folder: Path) -> None:
    """Write the answers that are held back."""
    held = BufferState(
        unit_size=1,
        next_group=0,
        next_prompt=0,
        num_trained=0,
        fresh=(),
        returned=(),
        ready=trainer.held,
    )
    save_buffer(held, folder / _HELD)


def read_trainer(
    trainer: PolicyTrainer,
    folder: Path,
    counters: Mapping[str, Any],
    *,
    read: Callable[[Path, str], Mapping[str, Tensor]] = read_tensors,
) -> None:
    """Bring a new trainer to where the saved one stood; its model is loaded already.

    `read` gives the tensors of a file, where they are not in one by that name.
    """
    trainer.version = counters["version"]
    trainer.num_bad = counters["num_bad"]
    trainer.optimiser.load_state(read(folder, "optimiser"), counters["optimiser"])
    if trainer.moments is not None:
        trainer.moments.load_state(counters["moments"])
    if trainer.critic is not None:
        trainer.critic.critic.load(read(folder, "critic"))
        trainer.critic.optimiser.load_state(
            read(folder, "critic_optimiser"), counters["critic_optimiser"]
        )
    trainer.held = load_buffer(folder / _HELD).ready


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
