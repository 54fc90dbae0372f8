"""What coupling.py can be told, and the two sizes it comes in."""

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
"""The learning rate that a tolerance is recommended for, and what it admits is shown at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    model: Path
    """A Hugging Face folder; without a tokenizer in it, all answers begin at the first token."""
    quick: bool = False
    """A small study for a CPU: the defaults of the other flags are smaller."""
    device: str | None = None
    """cpu or cuda; the GPU if there is one."""
    precisions: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "bf16-in-fp32")
    """What the rollout weights are stored and computed in; bf16-in-fp32 rounds only the weights, so
    that it tells apart what rounding them does and what rounding everything else does."""
    holds: tuple[float, ...] = (0.5, 1.0)
    """How far the master may move away from a 16-bit rollout weight before it follows, in units in
    the last place; 0.5 is plain rounding."""
    start: Start = "running"
    """running: the weights are where they are in the middle of a run. checkpoint: as they are in
    the folder, which is often on the 16-bit grid, where rounding hides the first updates."""
    rates: tuple[float, ...] = (1e-7, 1e-6, 1e-5)
    """Learning rates."""
    updates: tuple[int, ...] = (1, 2, 4, 8)
    """Measure after so many updates."""
    tolerances: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
    """Nats by which a kept token may fall short."""
    questions: int = 32
    """Prompts."""
    samples: int = 4
    """Cached answers to each prompt."""
    max_tokens: int = 512
    """Tokens of an answer at most."""
    update_batch: int = 64
    """Answers of one update."""
    micro_batch: int = 16
    """Answers of one backward pass."""
    seeds: tuple[int, ...] = (0, 1)
    """Each is a study of its own: noise, advantages, and where the weights start."""
    slots: int = 128
    """Answers written at the same time."""
    compiled: bool = True
    """On a GPU, compile the decoder layers."""
    threads: int | None = None
    """Threads of torch; as many as it likes if not given."""
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
        """Answers that the updates of one learning rate use up."""
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
    """The flags, over the defaults of the size they ask for."""
    kind = QuickSettings if "--quick" in arguments else Settings
    return tyro.cli(kind, args=arguments, description=description)
