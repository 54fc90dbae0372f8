"""What a reward function gives, checked.

A function may return a number, or named parts:

    {"format": 1.0, "answer": 2.0}                    the reward is the sum of the parts
    {"reward": 3.0, "length": 112, "correct": 1.0}    `reward` is the reward, the rest is logged

A part named `correct` says whether the answer counts as right in an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NO_PARTS: Mapping[str, float] = MappingProxyType({})


class NoScoreError(ValueError):
    """What a function returned is no reward."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and the named parts it came with."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=lambda: _NO_PARTS)

    def is_correct(self, threshold: float) -> bool:
        """Whether the answer counts as right: its part `correct`, or a reward that high."""
        if "correct" in self.parts:
            return self.parts["correct"] >= 0.5
        return self.reward >= threshold


def checked_score(returned: object) -> Score:
    """The score a function returned; a `NoScoreError` says why it is none."""
    if not isinstance(returned, Mapping):
        return Score(_number(returned, "a reward"))
    if not returned:
        raise NoScoreError("a reward with named parts must have at least one, got {}")
    for name in returned:
        if not isinstance(name, str):
            raise NoScoreError(f"the parts of a reward must have names, got {name!r}")
    parts = {name: _number(value, f"part {name!r}") for name, value in returned.items()}
    reward = parts.pop("reward") if "reward" in parts else math.fsum(parts.values())
    return Score(reward, parts)


def _number(value: object, what: str) -> float:
    """A finite number; also one of numpy or torch, which can be turned into a float."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoScoreError(f"{what} must be a number or named parts, got {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise NoScoreError(f"{what} must be a finite number, got {number}")
    return number
