"""Axes and plot areas: round numbers, short labels, and where values lie on the canvas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from sortedrl.report.charts.svg import Canvas, clipped, text_width

WIDTH = 860
"""Pixels across a picture."""
NARROW = 400
"""Pixels across a picture for a phone."""
HEADING = 26
"""Pixels above a panel for its name."""
FOOT = 46
"""Pixels below the last panel for its marks and what they count."""

Value = TypeVar("Value")

_SWATCH, _LEAST = 18, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A plot area by its edges in pixels, and the values at them; by default shares from 0 to 1."""

    left: float
    right: float
    top: float
    floor: float
    inset: float = 0.0
    """Pixels between the left edge and the least value."""
    x_start: float = 0.0
    x_end: float = 1.0
    y_start: float = 0.0
    y_end: float = 1.0

    def x(self, value: float) -> float:
        """The pixel of a value along the lower edge."""
        share = (value - self.x_start) / (self.x_end - self.x_start)
        return self.left + self.inset + (self.right - self.left - self.inset) * share

    def y(self, value: float) -> float:
        """The pixel of a value along the left edge, counted from below."""
        share = (value - self.y_start) / (self.y_end - self.y_start)
        return self.floor - (self.floor - self.top) * share

    def draw_name(self, canvas: Canvas, name: str, *, note: str, css: str) -> None:
        """The name above the area with its colour, and a note behind it."""
        y = self.top - 10
        room = self.right - self.left - _SWATCH - 10 - text_width(note, size=13)
        shown = clipped(name, max(_LEAST, room), size=14)
        with canvas.group(title=f"{name}: {note}" if note else name):
            canvas.rect(self.left, y - 9, width=11, height=10, css=css)
            canvas.text(self.left + _SWATCH, y, content=shown, css="head", tail=note)

    def draw_heights(
        self,
        canvas: Canvas,
        marks: Iterable[tuple[float, str]],
        *,
        zero_css: str = "axis",
        gap: float = 8,
    ) -> None:
        """A rule across the area at each mark, with its label to the left."""
        for value, label in marks:
            y = self.y(value)
            canvas.line(self.left, y, x2=self.right, y2=y, css="rule" if value else zero_css)
            canvas.text(self.left - gap, y + 4, content=label, css="small", anchor="end")
        if self.y_start > 0:
            canvas.line(self.left, self.floor, x2=self.right, y2=self.floor, css="rule")

    def draw_places(
        self, canvas: Canvas, marks: Iterable[tuple[float, str]], *, label: str
    ) -> None:
        """Ticks with their labels below the area, and below them what they count."""
        for value, text in marks:
            x = self.x(value)
            canvas.line(x, self.floor, x2=x, y2=self.floor + 4, css="rule")
            canvas.text(x, self.floor + 18, content=text, css="small", anchor="middle")
        middle = (self.left + self.right) / 2
        canvas.text(middle, self.floor + 40, content=label, css="muted", anchor="middle")

    def draw_y_label(self, canvas: Canvas, label: str) -> None:
        """What the heights are, upright at the left edge of the picture."""
        middle = (self.top + self.floor) / 2
        canvas.text(18, middle, content=label, css="muted", anchor="middle", is_upright=True)


def round_steps(end: float, *, count: int) -> list[float]:
    """About `count` round numbers from 0 to at most `end`.

    >>> round_steps(2475, count=6)
    [0.0, 500.0, 1000.0, 1500.0, 2000.0]
    >>> round_steps(0.9, count=5)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    if end <= 0:
        return [0.0]
    rough = end / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [round(index * step, 10) for index in range(int(end / step * (1 + 1e-9)) + 1)]


def round_marks(start: float, end: float, *, count: int) -> list[float]:
    """About `count` round numbers from `start` to `end`."""
    steps = round_steps(end - start, count=count)
    if not start or len(steps) < 2:
        return steps
    first, last = math.ceil(start / steps[1] - 1e-9), math.floor(end / steps[1] + 1e-9)
    return [round(index * steps[1], 10) for index in range(first, last + 1)]


def round_width(count: int, *, bins: int) -> int:
    """The smallest of 1, 2, 5, 10, 20 and so on with which `bins` bins hold `count` values.

    >>> round_width(48, bins=48), round_width(49, bins=48), round_width(1000, bins=12)
    (1, 2, 100)
    """
    widths = (digit * int(10**power) for power in range(9) for digit in (1, 2, 5))
    return next(width for width in widths if count <= bins * width)


def short(value: float) -> str:
    """A number for a label: grouped thousands, no needless digits.

    >>> short(12345.6), short(37.28), short(4.0), short(0.7), short(0.07374), short(2.5e-6)
    ('12,346', '37.3', '4', '0.7', '0.074', '2.5e-06')
    """
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.2g}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def stride(count: int, *, most: int) -> int:
    """How many neighbours are drawn as one, so that `count` of them give at most `most`."""
    return math.ceil(count / most) or 1


def neighbours(values: Sequence[Value], *, most: int) -> list[tuple[int, Sequence[Value]]]:
    """The values in order in at most `most` even parts, each with the place of its first value.

    >>> neighbours("abcde", most=3)
    [(0, 'a'), (1, 'bc'), (3, 'de')]
    """
    count = min(most, len(values))
    edges = [part * len(values) // count for part in range(count + 1)] if count else []
    return [(start, values[start:end]) for start, end in pairwise(edges)]
