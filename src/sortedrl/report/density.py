"""How many slots write answers of which length, column by column: a run too big for single bars.

The values of one column are shares of the slots during the rollout seconds of that column; what
they leave open to 1 is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sortedrl.report.lanes import Bar, Lanes

DISCARDED = "discarded"
"""The layer of the tokens that were thrown away later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """Shares of the slots, one row per layer, one value per column."""

    edges: tuple[float, ...]
    """The seconds between which the columns lie: one more than there are columns."""
    layers: dict[str, tuple[float, ...]]


def density(
    lanes: Lanes, *, columns: int, names: Sequence[str], layer: Callable[[Bar], str]
) -> Density:
    """The shares of the layers `names` and `DISCARDED`; `layer` names the one of a bar."""
    width = (lanes.end - lanes.start) / columns or 1.0
    rollout = [0.0] * columns
    busy = {name: [0.0] * columns for name in (*names, DISCARDED)}
    for band in lanes.bands:
        if band.kind == "rollout":
            _spread(rollout, band.start - lanes.start, band.end - lanes.start, width=width)
    for bar in lanes.bars:
        start, end = bar.start - lanes.start, bar.end - lanes.start
        middle = bar.discarded_from - lanes.start
        _spread(busy[layer(bar)], start, middle, width=width)
        _spread(busy[DISCARDED], middle, end, width=width)
    return Density(
        edges=tuple(lanes.start + index * width for index in range(columns + 1)),
        layers={
            name: tuple(
                seconds / (lanes.slots * whole) if whole else 0.0
                for seconds, whole in zip(row, rollout, strict=True)
            )
            for name, row in busy.items()
        },
    )


def _spread(row: list[float], start: float, end: float, *, width: float) -> None:
    """Add the seconds from `start` to `end` to the columns they fall in."""
    first, last = int(start / width), min(int(end / width), len(row) - 1)
    for column in range(first, last + 1):
        overlap = min(end, (column + 1) * width) - max(start, column * width)
        row[column] += max(0.0, overlap)
