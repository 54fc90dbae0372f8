"""Validation of the values that reward functions return; and the record of one call.

A function may return a number, or named parts. A number may be of any type that has a float value,
such as a numpy scalar or a tensor of one element:

    {"format": 1.0, "answer": 2.0}                    the reward is the sum of the parts
    {"reward": 3.0, "length": 112, "correct": 1.0}    `reward` is the reward, the rest is logged

A part named `correct` decides whether the answer counts as right in an evaluation.

A batched function returns one of these for each answer, as a list, an array or a tensor, or it
returns named parts with such a column each. A reward must be finite and at most
`LARGEST_REWARD` in magnitude: one larger value would dominate a whole update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, SupportsFloat, runtime_checkable

from sortedrl.types import LARGEST_REWARD, Prompt

_NO_PARTS: Mapping[str, float] = MappingProxyType({})


class NoScoreError(ValueError):
    """A function returned an invalid reward."""


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


@runtime_checkable
class _Array(Protocol):
    """Scalars, arrays and tensors of numpy, torch and their kin, none of which is imported here."""

    def tolist(self) -> object:
        """A number, or lists of numbers."""


def checked_score(returned: object) -> Score:
    """The score that a function returned; raises `NoScoreError` if it is not valid."""
    if not isinstance(returned, Mapping):
        return Score(_reward(returned, "a reward"))
    if not returned:
        raise NoScoreError("a reward with named parts must have at least one, got {}")
    for name in returned:
        if not isinstance(name, str):
            raise NoScoreError(f"the parts of a reward must have names, got {name!r}")
    if "reward" in returned:
        parts = {name: _number(value, f"part {name!r}") for name, value in returned.items()}
        return Score(_reward(parts.pop("reward"), "part 'reward'"), parts)
    parts = {name: _reward(value, f"part {name!r}") for name, value in returned.items()}
    return Score(_reward(math.fsum(parts.values()), "the sum of the parts"), parts)


def values_of_batch(returned: object, num_answers: int) -> list[object]:
    """The value for each answer that a batched function returned, not yet validated.

    Raises `NoScoreError` if there is not one value per answer.
    """
    if isinstance(returned, Mapping) and returned:
        columns = {name: values_of_batch(column, num_answers) for name, column in returned.items()}
        return [
            {name: column[place] for name, column in columns.items()}
            for place in range(num_answers)
        ]
    # A number in the shape of an array cannot be iterated, though its type can.
    is_number = isinstance(returned, _Array) and not isinstance(returned.tolist(), list)
    if (
        not isinstance(returned, Iterable)
        or isinstance(returned, str | bytes | Mapping | Set)
        or is_number
    ):
        raise NoScoreError(
            f"a batched reward must return one score for each answer, got {returned!r:.100}"
        )
    values: list[object] = list(returned)
    if len(values) != num_answers:
        raise NoScoreError(
            f"a batched reward must return one score for each of the {num_answers} answers, "
            f"got {len(values)}"
        )
    return values


def _reward(value: object, what: str) -> float:
    number = _number(value, what)
    if abs(number) > LARGEST_REWARD:
        raise NoScoreError(
            f"{what} must lie between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, got {number:g}; "
            "scale it"
        )
    return number


def _number(value: object, what: str) -> float:
    if isinstance(value, _Array):
        # An array of one element is that element, whatever its shape.
        content = value.tolist()
        while isinstance(content, list) and len(content) == 1:
            content = content[0]
    else:
        content = value
    if not isinstance(content, SupportsFloat):
        raise NoScoreError(f"{what} must be a number or named parts, got {value!r:.100}")
    try:
        number = float(content)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoScoreError(f"{what} must be a finite number, got {number}")
    return number


Failure = Literal["timeout", "memory", "died"]
"""A call that timed out, or that twice exceeded the memory limit or ended its worker."""


@dataclass(slots=True, eq=False)
class Call:
    """An answer to be scored.

    `crashes` counts the workers that died or ran out of memory while scoring it: after the first,
    it is retried once, alone.
    """

    ticket: int
    prompt: Prompt
    sample_index: int
    response: str
    began: float = 0.0
    worker: int = 0
    """The number of the last worker that had it."""
    work: int = 0
    """Number of the function call; answers of one batch share it."""
    crashes: int = 0
    is_alone: bool = False
    is_cancelled: bool = False

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"answer {self.sample_index} to prompt {self.prompt.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The result of a call; `score` is `None` if the answer gets no reward."""

    ticket: int
    score: Score | None
    began: float
    """When it was sent to the worker, on the clock `time.monotonic`."""
    seconds: float
    worker: int
    failure: Failure | None = None
