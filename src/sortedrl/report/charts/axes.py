"""Axes and plot areas: round numbers, short labels, and where values lie on the canvas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sortedrl.report.charts.svg import Canvas, text_width

WIDTH = 860
"""Pixels across a picture."""
HEADING = 26
"""Pixels above a panel for its name."""
FOOT = 46
"""Pixels below the last panel for its marks and what they count."""

_SWATCH, _LEAST = 18, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A plot area, by its edges in pixels."""

    left: float
    right: float
    top: float
    floor: float

    def x(self, share: float) -> float:
        """The place of a share of the width."""
        return self.left + (self.right - self.left) * share

    def y(self, share: float) -> float:
        """The height of a share of the height, counted from below."""
        return self.floor - (self.floor - self.top) * share

    def draw_name(self, canvas: Canvas, name: str, *, note: str, css: str) -> None:
        """The name above the panel with its colour, and a note behind it."""
        y = self.top - 10
        room = self.right - self.left - _SWATCH - 10 - text_width(note, size=13)
        shown = clipped(name, max(_LEAST, room), size=14)
        with canvas.group(title=f"{name}: {note}" if note else name):
            canvas.rect(self.left, y - 9, width=11, height=10, css=css)
            canvas.text(self.left + _SWATCH, y, content=shown, css="head", tail=note)

    def draw_heights(self, canvas: Canvas, marks: Iterable[tuple[float, str]]) -> None:
        """A rule across the panel at each mark, with its words to the left."""
        for share, words in marks:
            y = self.y(share)
            canvas.line(self.left, y, x2=self.right, y2=y, css="rule" if share else "axis")
            canvas.text(self.left - 8, y + 4, content=words, css="small", anchor="end")

    def draw_places(
        self, canvas: Canvas, marks: Iterable[tuple[float, str]], *, label: str
    ) -> None:
        """Words below the panel at each mark, and below them what they count."""
        for share, words in marks:
            x = self.x(share)
            canvas.line(x, self.floor, x2=x, y2=self.floor + 4, css="axis")
            canvas.text(x, self.floor + 17, content=words, css="small", anchor="middle")
        middle = self.x(0.5)
        canvas.text(middle, self.floor + 36, content=label, css="muted", anchor="middle")


def clipped(text: str, width: float, *, size: float = 12) -> str:
    """The text, cut with an ellipsis where it would be wider than `width` pixels."""
    room = max(1, int(width / text_width("x", size=size)))
    return text if len(text) <= room else text[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"


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


def short(value: float) -> str:
    """A number for a label: grouped thousands, no needless digits.

    >>> short(12345.6), short(37.28), short(4.0), short(0.7), short(0.07374)
    ('12,346', '37.3', '4', '0.7', '0.074')
    """
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")
