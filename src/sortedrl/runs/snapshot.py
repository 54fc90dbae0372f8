"""What a checkpoint of a training run holds, written at an update boundary, when nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sortedrl.buffer_store import save_buffer
from sortedrl.build.training import TrainingParts
from sortedrl.data.chat import Tokenizer
from sortedrl.training.adapters import write_adapters
from sortedrl.training.checkpoint import write_state
from sortedrl.training.export import export_model
from sortedrl.training.settings import TrainSettings
from sortedrl.training.trainer_files import write_trainer


def write_snapshot(
    folder: Path,
    parts: TrainingParts,
    *,
    settings: TrainSettings,
    tokenizer: Tokenizer,
    counters: Mapping[str, Any],
) -> None:
    """Fill the folder of a checkpoint; `counters` are those of the run itself."""
    export_model(parts.model, tokenizer, folder / "model")
    if settings.lora.rank is not None:
        write_adapters(parts.model, folder)
    save_buffer(parts.loop.buffer.state(), folder / "buffer.bin")
    write_state(
        folder,
        {
            **counters,
            "trainer": write_trainer(parts.trainer, folder),
            "journal": parts.loop.journal.state().to_json(),
            "engine_version": parts.engine.version,
            "position": parts.prompts.position,
            "fingerprint": parts.prompts.fingerprint,
        },
    )
