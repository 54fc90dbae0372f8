"""A call of a reward function for one answer, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sortedrl.rewards.score import Score
from sortedrl.types import Prompt

Failure = Literal["timeout", "memory", "died"]
"""A call that ran into its time limit, or twice into the memory limit or the end of its worker."""


@dataclass(slots=True, eq=False)
class Call:
    """An answer to be scored.

    `crashes` counts the workers that died, or ran out of memory, over it: after the first it is
    tried once more, alone.
    """

    ticket: int
    prompt: Prompt
    sample_index: int
    response: str
    began: float = 0.0
    worker: int = 0
    """The number of the worker that has it or had it last."""
    work: int = 0
    """Numbers the calls of the function: answers that share one have the same."""
    crashes: int = 0
    is_alone: bool = False
    is_cancelled: bool = False

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"answer {self.sample_index} to prompt {self.prompt.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a call; `score` is `None` where the answer gets no reward."""

    ticket: int
    score: Score | None
    began: float
    """When it was given to the worker, on the clock `time.monotonic`."""
    seconds: float
    worker: int
    failure: Failure | None = None
