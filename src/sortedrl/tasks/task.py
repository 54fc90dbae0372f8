"""A task: rows, the reward that scores their answers, and when an answer counts as right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.data.row import Row
from sortedrl.rewards.source import RewardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rows and their reward under one name."""

    name: str
    rows: Sequence[Row]
    reward: RewardSource
    correct_from: float = 1.0
    """The reward from which an answer counts as right, where the reward has no part `correct`."""
