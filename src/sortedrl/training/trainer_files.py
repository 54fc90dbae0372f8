"""A trainer in a checkpoint: its tensors in safetensors files, its counters in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sortedrl.buffer import BufferState
from sortedrl.buffer_store import load_buffer, save_buffer
from sortedrl.training.checkpoint import read_tensors, write_tensors
from sortedrl.training.trainer import PolicyTrainer

_HELD = "held.bin"


def write_trainer(trainer: PolicyTrainer, folder: Path) -> dict[str, Any]:
    """Write everything but the model; gives the counters."""
    tensors, values = trainer.optimiser.state()
    write_tensors(folder, "optimiser", tensors=tensors)
    counters: dict[str, Any] = {
        "version": trainer.version,
        "num_bad": trainer.num_bad,
        "optimiser": values,
    }
    if trainer.moments is not None:
        counters["moments"] = trainer.moments.state()
    if trainer.critic is not None:
        write_tensors(folder, "critic", tensors=trainer.critic.critic.tensors())
        tensors, values = trainer.critic.optimiser.state()
        write_tensors(folder, "critic_optimiser", tensors=tensors)
        counters["critic_optimiser"] = values
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
    return counters


def read_trainer(trainer: PolicyTrainer, folder: Path, counters: Mapping[str, Any]) -> None:
    """Bring a new trainer to where the saved one stood; its model is loaded already."""
    trainer.version = counters["version"]
    trainer.num_bad = counters["num_bad"]
    trainer.optimiser.load_state(read_tensors(folder, "optimiser"), counters["optimiser"])
    if trainer.moments is not None:
        trainer.moments.load_state(counters["moments"])
    if trainer.critic is not None:
        trainer.critic.critic.load(read_tensors(folder, "critic"))
        trainer.critic.optimiser.load_state(
            read_tensors(folder, "critic_optimiser"), counters["critic_optimiser"]
        )
    trainer.held = load_buffer(folder / _HELD).ready
