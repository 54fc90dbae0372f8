"""Shares of each update as shades: update by update along the axis, staleness upwards.

The shares of one column add up to 1. A dot in each column is the mean over the column's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.evaluation.tables import percent
from sortedrl.report.axis import round_steps, short
from sortedrl.report.panel import FOOT, HEADING, WIDTH, Panel
from sortedrl.report.svg import SHADES, Canvas, series

_LEFT, _RIGHT = 76, 20
_ROW, _LEAST = 16, 3
_BETWEEN = 20
_KEY, _KEY_STEP = 34, 86
_GAP, _WIDE = 1, 6
_DOT = 3.0
_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Neighbouring updates: how many answers of each staleness, and their tokens' mean."""

    first: int
    last: int
    answers: tuple[int, ...]
    """How many answers have the staleness 0, 1, 2, ..."""
    mean: float
    """Mean staleness of the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """The columns of one run in order."""

    name: str
    note: str
    columns: tuple[Column, ...]
    place: int
    """The place of the run among those of the page, for its colour."""

    @property
    def depth(self) -> int:
        """How many neighbouring values of staleness make one row."""
        most = max(len(column.answers) for column in self.columns)
        widths = (m * 10**power for power in range(9) for m in (1, 2, 5))
        return int(next(width for width in widths if most <= _ROWS * width))

    @property
    def num_rows(self) -> int:
        """Rows of the map."""
        most = max(len(column.answers) for column in self.columns)
        return max(_LEAST, math.ceil(most / self.depth))

    def values(self, row: int, *, to: str) -> str:
        """The staleness that a row stands for, with `to` between first and last."""
        first = row * self.depth
        return str(first) if self.depth == 1 else f"{first}{to}{first + self.depth - 1}"


def heat_maps(maps: Sequence[HeatMap], *, title: str) -> str:
    """Maps that have columns, below each other as a picture for a page, 860 pixels wide."""
    updates = max(run.columns[-1].last for run in maps)
    heights = [run.num_rows * _ROW for run in maps]
    whole = _KEY + sum(heights) + (HEADING + _BETWEEN) * len(maps) - _BETWEEN + FOOT
    canvas = Canvas(WIDTH, whole, label=title)
    _draw_key(canvas)
    top = float(_KEY)
    for run, height in zip(maps, heights, strict=True):
        top += HEADING
        panel = Panel(left=_LEFT, right=WIDTH - _RIGHT, top=top, floor=top + height)
        panel.draw_name(canvas, run.name, note=run.note, css=series(run.place))
        _draw_map(canvas, run, panel=panel, updates=updates)
        top += height + _BETWEEN
    places = [mark for mark in round_steps(updates, count=8) if mark == int(mark) and mark >= 1]
    marks = [((mark - 0.5) / updates, short(mark)) for mark in places]
    panel.draw_places(canvas, marks, label="update")
    return canvas.inline()


def shade(share: float) -> str:
    """The class of a share above 0: the ramp in even steps.

    >>> shade(0.01), shade(0.17), shade(1.0)
    ('shade0', 'shade1', 'shade5')
    """
    return f"shade{min(SHADES - 1, int(share * SHADES))}"


def _draw_key(canvas: Canvas) -> None:
    canvas.text(_LEFT, 20, content="share of the answers:", css="small")
    left = _LEFT + 124
    for step in range(SHADES):
        low, high = (100 * edge / SHADES for edge in (step, step + 1))
        x = left + _KEY_STEP * step
        canvas.rect(x, 11, width=12, height=11, css=f"shade{step}")
        canvas.text(x + 16, 20, content=f"{low:.0f} to {high:.0f} %", css="small")
    x = left + _KEY_STEP * SHADES + 8
    canvas.circle(x, 16, radius=3, css="ink")
    canvas.text(x + 8, 20, content="mean of its tokens", css="small")


def _draw_map(canvas: Canvas, run: HeatMap, *, panel: Panel, updates: int) -> None:
    for row in range(run.num_rows):
        y = panel.y((row + 0.5) / run.num_rows) + 4
        words = run.values(row, to="\N{EN DASH}")
        canvas.text(panel.left - 8, y, content=words, css="small", anchor="end")
    canvas.line(panel.left, panel.floor, x2=panel.right, y2=panel.floor, css="axis")
    for column in run.columns:
        left, right = (panel.x(edge / updates) for edge in (column.first - 1, column.last))
        _draw_column(canvas, column, run=run, panel=panel, left=left, right=right)


def _draw_column(
    canvas: Canvas, column: Column, *, run: HeatMap, panel: Panel, left: float, right: float
) -> None:
    """The shades of a column and its mean; nothing where no answer was trained on."""
    whole = sum(column.answers)
    if not whole:
        return
    when = f"update {column.first:,}"
    if column.first < column.last:
        when = f"updates {column.first:,} to {column.last:,}"
    is_wide = right - left >= _WIDE
    for row in range(run.num_rows):
        count = sum(column.answers[row * run.depth : (row + 1) * run.depth])
        if not count:
            continue
        share = f"{percent(count / whole)} of the answers, {count:,} of {whole:,}"
        canvas.rect(
            left,
            panel.y((row + 1) / run.num_rows),
            width=right - left - (_GAP if is_wide else 0),
            height=_ROW - _GAP,
            css=shade(count / whole),
            title=f"{when}, staleness {run.values(row, to=' to ')}: {share}",
        )
    y = panel.y((column.mean + 0.5) / run.depth / run.num_rows)
    radius = _DOT if is_wide else _DOT / 2
    with canvas.group(title=f"{when}: mean staleness of the tokens {column.mean:.2f}"):
        canvas.circle((left + right) / 2, y, radius=radius + 1, css="paper")
        canvas.circle((left + right) / 2, y, radius=radius, css="ink")
