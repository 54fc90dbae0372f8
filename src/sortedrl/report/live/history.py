"""A number over a whole run in bounded memory: a learning curve as small as a word.

Values are kept one by one at first. Whenever there are too many, neighbours are joined to their
mean, and from then on every kept value stands for twice as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST = 256


class History:
    """The course of one number."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.last: float | None = None
        self._values: list[float] = []
        self._open: list[float] = []
        self._stride = 1

    def add(self, value: float) -> None:
        """Take in the next value; one that is not finite cannot be drawn and is left out."""
        if not math.isfinite(value):
            return
        self.last = value
        self._open.append(value)
        if len(self._open) == self._stride:
            self._values.append(_mean(self._open))
            self._open.clear()
        if len(self._values) == _MOST:
            self._values = squeezed(self._values, _MOST // 2)
            self._stride *= 2

    def values(self) -> tuple[float, ...]:
        """The course so far."""
        return (*self._values, _mean(self._open)) if self._open else tuple(self._values)


def squeezed(values: Sequence[float], most: int) -> list[float]:
    """At most `most` values, each the mean of its share of them.

    >>> squeezed([1, 3, 5, 7, 9, 11], 3)
    [2.0, 6.0, 10.0]
    """
    count = len(values)
    if count <= most:
        return list(values)
    ends = [part * count // most for part in range(most + 1)]
    return [_mean(values[ends[part] : ends[part + 1]]) for part in range(most)]


def _mean(values: Sequence[float]) -> float:
    # Divided first: the sum of great finite numbers may not be finite.
    return sum(value / len(values) for value in values)
