"""A TRL job: a training with the settings of `sortedrl train`, and its prompts.

Both processes import it, so it is plain Python, sent as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training with TRL, with the settings of `sortedrl train`."""

    model: str
    """The folder of the initial model."""
    rows: str
    """A file with a line per prompt, in order: text, tokens, fields."""
    out: str
    """A folder for the metrics and the weights."""
    seed: int
    device: str
    threads: int | None
    is_bf16: bool
    samples_per_prompt: int
    update_batch: int
    updates: int
    max_tokens: int
    temperature: float
    clip: float
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_norm: float
    evaluate_every: int
    reward: str
    """The address of the reward function."""
    reward_options: Mapping[str, Any]
    options: Mapping[str, Any]
    """Additional arguments of `GRPOConfig`, for generation."""

    def to_json(self) -> str:
        """The job as one line."""
        return json.dumps(asdict(self))

    @property
    def metrics(self) -> Path:
        """The metrics of each update."""
        return Path(self.out) / "metrics.jsonl"

    def weights(self, update: int) -> Path:
        """The weights after an update, if saved."""
        return Path(self.out) / f"weights-{update}.safetensors"

    @property
    def evaluated(self) -> list[int]:
        """The updates after which weights are saved."""
        every = range(self.evaluate_every, self.updates + 1, self.evaluate_every)
        return sorted({*every, self.updates})


@dataclass(frozen=True, slots=True)
class AskedRow:
    """A prompt, formatted as in `sortedrl train`."""

    text: str
    tokens: Sequence[int]
    fields: Mapping[str, object]


def write_rows(rows: Sequence[AskedRow], path: Path) -> None:
    """Write the rows to a file, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"text": row.text, "tokens": list(row.tokens), "fields": dict(row.fields)})
        for row in rows
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_rows(path: Path) -> list[AskedRow]:
    """The rows of a file, in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [AskedRow(**json.loads(line)) for line in lines]
