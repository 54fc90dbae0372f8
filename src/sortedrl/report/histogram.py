"""Lengths of answers as shares in bins: what was trained on against what the policy writes.

What was trained on is a filled area, what the policy writes an outline over it, so that the two
are told apart without colour. All panels of a picture share their bins and their scales.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sortedrl.report.axis import round_steps, short
from sortedrl.report.panel import FOOT, HEADING, WIDTH, Panel
from sortedrl.report.svg import Canvas, series

_LEFT, _RIGHT, _ASIDE = 52, 16, 40
_TALL, _HEADROOM = 150, 36
_MOST = 48
_SPREAD = 12.0
"""From this many times the typical length on, the longest is told on a logarithmic axis."""

Shares = tuple[float, ...]
"""For each bin the share of the answers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Neighbouring bins: bin `i` holds the lengths from `edges[i]` to below `edges[i + 1]`."""

    edges: tuple[int, ...]
    is_log: bool

    def x(self, length: float) -> float:
        """The place of a length on the axis, 0 to 1."""
        first, last = self.edges[0], self.edges[-1]
        if self.is_log:
            return math.log(length / first) / math.log(last / first)
        return (length - first) / (last - first)

    def shares(self, weights: Iterable[tuple[int, float]]) -> Shares:
        """The sums of the weights of lengths in each bin."""
        sums = [0.0] * (len(self.edges) - 1)
        for length, weight in weights:
            sums[bisect_right(self.edges, length) - 1] += weight
        return tuple(sums)

    def marks(self) -> list[int]:
        """Round lengths on the axis."""
        first, last = self.edges[0], self.edges[-1]
        if not self.is_log:
            return [int(mark) for mark in round_steps(last, count=6) if mark >= first]
        steps = [m * 10**power for power in range(9) for m in (1, 2, 5)]
        marks = [step for step in steps if first <= step <= last]
        return marks if len(marks) <= 7 else marks[::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The lengths of one run; each mean belongs to shares that are not all 0."""

    name: str
    note: str
    written: Shares
    written_mean: float
    trained: Shares
    trained_mean: float


def length_bins(*, shortest: int, typical: float, longest: int) -> Bins:
    """Bins for all these lengths: round and even ones, or of even ratio where some are huge."""
    shortest = max(1, shortest)
    if longest <= _SPREAD * typical:
        widths = (m * 10**power for power in range(9) for m in (1, 2, 5))
        width = next(width for width in widths if longest < _MOST * width)
        return Bins(edges=tuple(range(0, longest + width + 1, width)), is_log=False)
    ratio = ((longest + 1) / shortest) ** (1 / _MOST)
    edges = {round(shortest * ratio**place) for place in range(_MOST)}
    return Bins(edges=(*sorted(edges - {longest + 1}), longest + 1), is_log=True)


def histograms(shapes: Sequence[Shape], *, bins: Bins, title: str) -> str:
    """The lengths of runs, two beside each other, as a picture for a page, 860 pixels wide."""
    across = 1 if len(shapes) == 1 else 2
    wide = (WIDTH - (across - 1) * _ASIDE) / across
    pitch = HEADING + _HEADROOM + _TALL + FOOT
    canvas = Canvas(WIDTH, pitch * math.ceil(len(shapes) / across), label=title)
    most = max((share for s in shapes for share in (*s.written, *s.trained)), default=0.0) or 1.0
    for place, shape in enumerate(shapes):
        left = (wide + _ASIDE) * (place % across)
        top = pitch * (place // across) + HEADING
        frame = Panel(left=left, right=left + wide - _RIGHT, top=top, floor=top + 1)
        frame.draw_name(canvas, shape.name, note=shape.note, css=series(place))
        panel = Panel(
            left=left + _LEFT,
            right=left + wide - _RIGHT,
            top=top + _HEADROOM,
            floor=top + _HEADROOM + _TALL,
        )
        heights = round_steps(100 * most, count=3)
        panel.draw_heights(canvas, [(mark / 100 / most, f"{short(mark)} %") for mark in heights])
        places = [(bins.x(mark), short(mark)) for mark in bins.marks()]
        label = "tokens, on a logarithmic scale" if bins.is_log else "tokens"
        panel.draw_places(canvas, places, label=label)
        _draw_shape(canvas, shape, bins=bins, panel=panel, most=most, css=series(place))
    return canvas.inline()


def _draw_shape(
    canvas: Canvas, shape: Shape, *, bins: Bins, panel: Panel, most: float, css: str
) -> None:
    edges = [panel.x(bins.x(edge)) for edge in bins.edges]
    outline = [(edges[0], panel.floor)]
    for place, written in enumerate(shape.written):
        trained = shape.trained[place]
        first, last = bins.edges[place], bins.edges[place + 1] - 1
        told = f"{first:,} to {last:,} tokens" if first < last else f"{first:,} tokens"
        outline += [(x, panel.y(written / most)) for x in edges[place : place + 2]]
        if trained:
            canvas.rect(
                edges[place],
                panel.y(trained / most),
                width=edges[place + 1] - edges[place],
                height=panel.floor - panel.y(trained / most),
                css=css,
                title=f"{told}: {100 * trained:.1f} % of the answers trained on, "
                f"{100 * written:.1f} % of what the policy writes",
            )
    with canvas.group(title=f"{shape.name}: what the policy writes"):
        canvas.path([*outline, (edges[-1], panel.floor)], css="curve whisker")
    if any(shape.written):
        _draw_mean(
            canvas, "written", shape.written_mean, bins=bins, panel=panel, row=1, css="whisker"
        )
    if any(shape.trained):
        _draw_mean(
            canvas, "trained", shape.trained_mean, bins=bins, panel=panel, row=2, css="guide"
        )


def _draw_mean(
    canvas: Canvas, what: str, mean: float, *, bins: Bins, panel: Panel, row: int, css: str
) -> None:
    """A line at the mean from its words down to the axis; each kind has its own row of words."""
    x = panel.x(bins.x(mean))
    y = panel.top - _HEADROOM + 15 * row
    is_left = x < panel.x(0.5)
    words = f"mean {what} {short(mean)}"
    canvas.line(x, y - 9, x2=x, y2=panel.floor, css=css)
    canvas.text(
        x + (5 if is_left else -5),
        y,
        content=words,
        css="head",
        anchor="start" if is_left else "end",
    )
