"""Mean and spread over the tokens of the last updates, to whiten what one update cannot.

Update batches come sorted by length. Where length and reward go together, the answers of a batch
are alike, and whitened among themselves they do not show that long ones did better than short
ones. Over as many updates as a group has, all lengths are in it.

Equal values give exactly 0, as they do within one batch. Axes: V values of one update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """The moments of the values of one update."""

    size: int
    mean: float
    squares: float
    """Sum of the squared distances from the mean."""


class RunningMoments:
    """The moments of the last `window` updates."""

    def __init__(self, window: int) -> None:
        """Nothing seen yet."""
        self._last: deque[Moments] = deque(maxlen=window)

    def whitened(self, values_V: Tensor, *, floor: float) -> Tensor:
        """The values of a new update, less the mean and over the spread of the window with it.

        Values that are not all finite give NaN, and the window forgets them.
        """
        # Above the lowest value, so that equal values are exactly 0 and not rounding errors.
        lowest = float(values_V.min())
        above_V = values_V - lowest
        mean = float(above_V.mean())
        squares = float(((above_V - mean) ** 2).sum())
        if not math.isfinite(squares):
            # Remembered, it would spoil every update of the window.
            return values_V * math.nan
        self._last.append(Moments(len(values_V), lowest + mean, squares))
        whole = _pooled(self._last)
        if whole.size < 2:
            return above_V
        return (values_V - whole.mean) / (math.sqrt(whole.squares / (whole.size - 1)) + floor)

    def state(self) -> list[list[float]]:
        """What a checkpoint keeps."""
        return [list(moments) for moments in self._last]

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from a checkpoint."""
        self._last.clear()
        self._last.extend(Moments(int(count), mean, squares) for count, mean, squares in state)


def _pooled(parts: Sequence[Moments] | deque[Moments]) -> Moments:
    """The moments of all values together."""
    first, count = parts[0].mean, sum(part.size for part in parts)
    mean = first + sum(part.size * (part.mean - first) for part in parts) / count
    squares = sum(part.squares + part.size * (part.mean - mean) ** 2 for part in parts)
    return Moments(count, mean, squares)
