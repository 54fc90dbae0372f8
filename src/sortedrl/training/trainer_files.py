"""A trainer in a checkpoint: its tensors in safetensors files, its counters in JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sortedrl.buffer import BufferState
from sortedrl.buffer_store import load_buffer, save_buffer
from sortedrl.training.checkpoint import read_tensors, refuse_not_finite, write_tensors
from sortedrl.training.trainer import PolicyTrainer

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
