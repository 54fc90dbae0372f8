"""Settings of coupling.py, in two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

Arithmetic = Literal["fp32", "fp16", "bf16"]
Precision = Literal["fp32", "fp16", "bf16", "bf16-in-fp32"]
Start = Literal["running", "checkpoint"]

TYPICAL_RATE = 1e-6
"""The learning rate of the recommendation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    model: Path
    """A Hugging Face folder; without a tokenizer, all answers start with the first token."""
    quick: bool = False
    """A small study for a CPU, with smaller defaults."""
    device: str | None = None
    """cpu or cuda; by default the GPU if there is one."""
    precisions: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "bf16-in-fp32")
    """Storage and compute types of the rollout weights; bf16-in-fp32 rounds only the weights, to
    separate the effect of weight rounding from that of bf16 arithmetic."""
    holds: tuple[float, ...] = (0.5, 1.0)
    """How far, in ulps, the master may move away from a 16-bit rollout weight before it follows;
    0.5 is plain rounding."""
    start: Start = "running"
    """running: weights as in the middle of a run. checkpoint: as in the folder, often on the 16-bit
    grid, where rounding hides the first updates."""
    rates: tuple[float, ...] = (1e-7, 1e-6, 1e-5)
    """Learning rates."""
    updates: tuple[int, ...] = (1, 2, 4, 8)
    """Measure after these numbers of updates."""
    tolerances: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
    """Tolerances in nats."""
    questions: int = 32
    """Prompts."""
    samples: int = 4
    """Cached answers per prompt."""
    max_tokens: int = 512
    """Maximum tokens of an answer."""
    update_batch: int = 64
    """Answers per update."""
    micro_batch: int = 16
    """Answers per backward pass."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of noise, advantages and initial weights; one study each."""
    slots: int = 128
    """Answers generated at the same time."""
    compiled: bool = True
    """On a GPU, compile the decoder layers."""
    threads: int | None = None
    """Threads of torch; by default its own choice."""
    json: Path | None = None
    """Write everything to this file."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        lists = (
            self.precisions, self.holds, self.rates, self.updates, self.tolerances, self.seeds
        )  # fmt: skip
        if not all(lists):
            raise ValueError("every list of values needs at least one")
        if list(self.updates) != sorted(set(self.updates)) or self.updates[0] < 1:
            raise ValueError(f"updates must be positive and go up, got {self.updates}")
        if list(self.tolerances) != sorted(set(self.tolerances)) or self.tolerances[0] < 0:
            raise ValueError(f"tolerances must be 0 or more and go up, got {self.tolerances}")
        if min(self.holds) < 0.5 or max(self.holds) > 2:
            raise ValueError(f"holds must lie in 0.5..2, got {self.holds}")
        if not self.model.is_dir():
            raise ValueError(f"model must be a folder, got {self.model}")

    @property
    def typical_rate(self) -> float:
        """The rate measured that is nearest to the typical one."""
        return min(self.rates, key=lambda rate: abs(rate / TYPICAL_RATE - 1))

    @property
    def training_answers(self) -> int:
        """Answers used by the updates of one learning rate."""
        return self.updates[-1] * self.update_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickSettings(Settings):
    """A small study: minutes on one core."""

    quick: bool = True
    rates: tuple[float, ...] = (1e-6, 1e-5)
    updates: tuple[int, ...] = (1, 2)
    questions: int = 6
    samples: int = 1
    max_tokens: int = 32
    update_batch: int = 3
    micro_batch: int = 3
    seeds: tuple[int, ...] = (0,)
    slots: int = 8
    threads: int | None = 1


def parse(arguments: Sequence[str], *, description: str | None) -> Settings:
    """Parse the flags over the defaults of the chosen size."""
    kind = QuickSettings if "--quick" in arguments else Settings
    return tyro.cli(kind, args=arguments, description=description)
