"""The settings of station 5: which workers score, how long they may take, what a failure means."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from sortedrl.config import require
from sortedrl.rewards.score import LARGEST_REWARD

OnFailure = Literal["score", "skip", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """The pool of processes that run a reward function."""

    workers: int | None = None
    """Worker processes; by default half of the cores, at least 2 and at most 8."""
    time_limit_seconds: float = 10.0
    """How long one call may take; a call that takes longer is ended, with its worker."""
    memory_gib: float | None = 4.0
    """Memory that a worker and the processes it starts may take beyond what loading the function
    took, shared memory included (on Linux)."""
    on_failure: OnFailure = "score"
    """What becomes of an answer whose call ran into a limit, or killed its worker twice.
    score: it gets failure_reward. skip: it gets no reward and is not trained on.
    stop: the run stops. Failures are counted, written down and warned of in any case."""
    failure_reward: float | None = None
    """The reward of such an answer; by default the lowest one that the function says it gives
    (as those of the built-in tasks do), and never more than 0."""
    batch: int = 32
    """Answers that a batched function is given at once, at most; they share one time limit, and if
    they fail together, each is tried again alone."""
    concurrency: int = 16
    """Calls of an async function that one worker has under way, at most."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        counts = {"workers": self.workers, "batch": self.batch, "concurrency": self.concurrency}
        for name, value in counts.items():
            require(value is None or value >= 1, f"rewards.{name} must be at least 1, got {value}")
        require(
            self.time_limit_seconds > 0 and math.isfinite(self.time_limit_seconds),
            f"rewards.time_limit_seconds must be a positive number, got {self.time_limit_seconds}",
        )
        require(
            self.memory_gib is None or self.memory_gib > 0,
            f"rewards.memory_gib must be positive, got {self.memory_gib}; "
            "leave it out for no limit",
        )
        require(
            self.failure_reward is None or abs(self.failure_reward) <= LARGEST_REWARD,
            f"rewards.failure_reward must lie between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, "
            f"got {self.failure_reward}",
        )

    @property
    def num_workers(self) -> int:
        """Worker processes to start."""
        return self.workers or min(8, max(2, (os.cpu_count() or 2) // 2))
