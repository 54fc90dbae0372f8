"""What a checkpoint of a training run holds, written at an update boundary, when nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sortedrl.buffer_store import save_buffer
from sortedrl.build.training import TrainingParts
from sortedrl.data.chat import Tokenizer
from sortedrl.training.checkpoint import write_state


def write_snapshot(
    folder: Path,
    parts: TrainingParts,
    *,
    tokenizer: Tokenizer,
    counters: Mapping[str, Any],
) -> None:
    """Fill the folder of a checkpoint; `counters` are those of the run itself."""
    trainer = parts.trainer.save(folder, tokenizer=tokenizer)
    save_buffer(parts.loop.buffer.state(), folder / "buffer.bin")
    write_state(
        folder,
        {
            **counters,
            "trainer": trainer,
            "journal": parts.loop.journal.state().to_json(),
            "engine_version": parts.engine.version,
            "position": parts.prompts.position,
            "fingerprint": parts.prompts.fingerprint,
        },
    )
