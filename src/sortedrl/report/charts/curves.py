"""Lines over a common axis: how a number of each run changes while it goes on.

The axis holds 0, every line ends with its value, and every dot tells its own when pointed at.
A line that stands for several runs has a band behind it, from the least of them to the most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.report.charts.axes import round_steps, short
from sortedrl.report.charts.svg import Canvas, Scheme, text_width
from sortedrl.report.charts.svg import series as series_class

MAX_POINTS = 240
"""Dots of one line; where there are more, a dot is the mean of several neighbours."""

_WIDTH, _PLOT_HEIGHT = 860, 240
_LEFT, _RIGHT, _BOTTOM = 78, 66, 56
_TITLE, _KEY_PITCH, _AIR = 26, 20, 18
_LABEL_PITCH = 14
_FEW = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line: finite values over places of 0 or more, in order."""

    name: str
    points: tuple[tuple[float, float], ...]
    note: str = ""
    """What the key adds to the name: what the line is the mean of, what its band shows."""
    band: tuple[tuple[float, float, float], ...] = ()
    """Places in order, each with the lowest and the highest value there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    """A point as it is drawn."""

    x: float
    y: float
    count: int
    """How many points it is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Values to pixels, and to words."""

    x_end: float
    has_whole_x: bool
    y_low: float
    y_high: float
    top: float
    is_share: bool

    @property
    def floor(self) -> float:
        """The lower edge of the plot."""
        return self.top + _PLOT_HEIGHT

    def x(self, value: float) -> float:
        """The place of a value."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.x_end

    def y(self, value: float) -> float:
        """The height of a value."""
        return self.floor - _PLOT_HEIGHT * (value - self.y_low) / (self.y_high - self.y_low)

    def words(self, value: float) -> str:
        """A value of the upright axis."""
        return f"{100 * value:.1f} %" if self.is_share else _figure(value)

    def y_marks(self) -> list[float]:
        """Round numbers on both sides of 0."""
        step = round_steps(self.y_high - self.y_low, count=6)[1]
        first, last = math.ceil(self.y_low / step - 1e-9), math.floor(self.y_high / step + 1e-9)
        return [step * index for index in range(first, last + 1)]

    def x_marks(self) -> list[float]:
        """Round numbers; whole ones where all places are whole."""
        marks = round_steps(self.x_end, count=8)
        return [mark for mark in marks if mark == int(mark)] if self.has_whole_x else marks


def curves(
    series: Sequence[Series], *, x_label: str, y_label: str, title: str, is_share: bool = False
) -> str:
    """The lines as a picture for a page, 860 pixels wide; shares are told as percentages.

    A series without points keeps its colour and is named as having none.
    """
    return _drawing(
        series, x_label=x_label, y_label=y_label, title=title, is_share=is_share, edge=0
    ).inline()


def curves_svg(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str,
    is_share: bool = False,
    scheme: Scheme = "auto",
) -> str:
    """The same picture as a file's content."""
    return _drawing(
        series, x_label=x_label, y_label=y_label, title=title, is_share=is_share, edge=8
    ).svg(scheme=scheme)


def _drawing(
    series: Sequence[Series], *, x_label: str, y_label: str, title: str, is_share: bool, edge: float
) -> Canvas:
    """The picture; `edge` is empty space above its title."""
    lines = [_dots(line.points) for line in series]
    bands = [_stretches(line.band) for line in series]
    key = _key(series)
    rows = 1 + max((row for row, *_ in key), default=-1)
    top = edge + _TITLE + _KEY_PITCH * rows + _AIR
    dots = [dot for line in lines for dot in line]
    edges = [_Dot(x=x, y=y, count=1) for band in bands for x, *ends in band for y in ends]
    frame = _frame([*dots, *edges], top=top, is_share=is_share)
    canvas = Canvas(_WIDTH, frame.floor + _BOTTOM, label=title)
    canvas.text(_LEFT, edge + 18, content=title, css="title")
    for place, (row, x, words) in enumerate(key):
        baseline = edge + _TITLE + _KEY_PITCH * row + 14
        _draw_key(canvas, series[place], place=place, x=x, baseline=baseline, words=words)
    _draw_axes(canvas, frame, x_label=x_label, y_label=y_label)
    if not any(lines):
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        y = (frame.top + frame.floor) / 2
        canvas.text(middle, y, content="nothing to draw yet", css="muted", anchor="middle")
    for place in reversed(range(len(series))):
        _draw_band(canvas, bands[place], frame=frame, css=series_class(place))
    # the first line comes last: where lines lie on each other, it is the one that shows
    for place in reversed(range(len(series))):
        with canvas.group(title=series[place].name):
            css = f"{series_class(place)} curve"
            canvas.path([(frame.x(dot.x), frame.y(dot.y)) for dot in lines[place]], css=css)
        told = f"{series[place].name}: {y_label}"
        spread = {x: (low, high) for x, low, high in series[place].band}
        css = series_class(place)
        _draw_dots(canvas, lines[place], frame=frame, css=css, told=told, spread=spread)
    _label_ends(canvas, [line[-1] for line in lines if line], frame=frame)
    return canvas


def _dots(points: Sequence[tuple[float, float]]) -> list[_Dot]:
    """The points, or means of neighbours where there are too many."""
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    dots = []
    for start in range(0, len(points), stride):
        part = points[start : start + stride]
        xs, ys = zip(*part, strict=True)
        dots.append(_Dot(x=sum(xs) / len(part), y=sum(ys) / len(part), count=len(part)))
    return dots


def _stretches(
    band: Sequence[tuple[float, float, float]],
) -> list[tuple[float, float, float]]:
    """The band, or means of neighbours where it has too many places."""
    stride = math.ceil(len(band) / MAX_POINTS) or 1
    parts = (band[start : start + stride] for start in range(0, len(band), stride))
    means = (tuple(sum(column) / len(part) for column in zip(*part, strict=True)) for part in parts)
    return [(x, low, high) for x, low, high in means]


def _frame(dots: Sequence[_Dot], *, top: float, is_share: bool) -> _Frame:
    highest = max((dot.y for dot in dots), default=0.0)
    low, high = 1.08 * min([0.0, *(dot.y for dot in dots)]), 1.08 * max(0.0, highest)
    if is_share and highest <= 1:
        high = min(1.0, high)
    # below this, round numbers are no longer told apart
    is_flat = high - low < 1e-6
    x_end = max((dot.x for dot in dots), default=0.0)
    return _Frame(
        x_end=x_end if x_end > 1e-6 else 1.0,
        has_whole_x=all(dot.x == int(dot.x) for dot in dots),
        y_low=0.0 if is_flat else low,
        y_high=1.0 if is_flat else high,
        top=top,
        is_share=is_share,
    )


def _key(series: Sequence[Series]) -> list[tuple[int, float, str]]:
    """For each name its row, its place in the row, and its words."""
    room = _WIDTH - _LEFT - 20
    entries: list[tuple[int, float, str]] = []
    row, x = 0, float(_LEFT)
    for line in series:
        words = _words(line)
        longest = int((room - 20) / text_width("x"))
        if len(words) > longest:
            words = words[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
        width = 20 + text_width(words) + 24
        if x > _LEFT and x + width > _LEFT + room:
            row, x = row + 1, float(_LEFT)
        entries.append((row, x, words))
        x += width
    return entries


def _words(line: Series) -> str:
    """What the key says of a line."""
    if not line.points:
        return f"{line.name} (none)"
    return f"{line.name} ({line.note})" if line.note else line.name


def _draw_key(
    canvas: Canvas, line: Series, *, place: int, x: float, baseline: float, words: str
) -> None:
    """A name with its colour; a line with a band shows as one."""
    css = series_class(place)
    with canvas.group(title=line.name):
        if line.band:
            canvas.rect(x, baseline - 9, width=14, height=10, css=f"{css} band")
            canvas.rect(x, baseline - 5, width=14, height=2, css=css)
        else:
            canvas.rect(x, baseline - 9, width=14, height=10, css=css)
        canvas.text(x + 20, baseline, content=words, css="muted")


def _draw_band(
    canvas: Canvas, band: Sequence[tuple[float, float, float]], *, frame: _Frame, css: str
) -> None:
    """The area between the lowest and the highest; at a single place, the stretch between them."""
    upper = [(frame.x(x), frame.y(high)) for x, _, high in band]
    lower = [(frame.x(x), frame.y(low)) for x, low, _ in band]
    if len(band) == 1:
        canvas.path([*upper, *lower], css=f"{css} curve")
    else:
        canvas.path([*upper, *reversed(lower)], css=f"{css} band", is_closed=True)


def _draw_axes(canvas: Canvas, frame: _Frame, *, x_label: str, y_label: str) -> None:
    for mark in frame.y_marks():
        y = frame.y(mark)
        canvas.line(_LEFT, y, x2=_WIDTH - _RIGHT, y2=y, css="rule" if mark else "axis")
        words = f"{short(100 * mark)} %" if frame.is_share else short(mark)
        canvas.text(_LEFT - 10, y + 4, content=words, css="small", anchor="end")
    for mark in frame.x_marks():
        x = frame.x(mark)
        canvas.line(x, frame.floor, x2=x, y2=frame.floor + 4, css="rule")
        canvas.text(x, frame.floor + 18, content=short(mark), css="small", anchor="middle")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    canvas.text(middle, frame.floor + 40, content=x_label, css="muted", anchor="middle")
    upright = (frame.top + frame.floor) / 2
    canvas.text(18, upright, content=y_label, css="muted", anchor="middle", is_upright=True)


def _draw_dots(
    canvas: Canvas,
    dots: Sequence[_Dot],
    *,
    frame: _Frame,
    css: str,
    told: str,
    spread: Mapping[float, tuple[float, float]],
) -> None:
    radius = 3.5 if len(dots) <= _FEW else 2
    for dot in dots:
        mean = f" (mean of {dot.count})" if dot.count > 1 else ""
        if dot.count == 1 and dot.x in spread:
            mean = " ({} to {})".format(*(frame.words(end) for end in spread[dot.x]))
        words = f"{told} {frame.words(dot.y)}{mean} at {_figure(dot.x)}"
        canvas.circle(frame.x(dot.x), frame.y(dot.y), radius=radius, css=css, title=words)


def _label_ends(canvas: Canvas, ends: Sequence[_Dot], *, frame: _Frame) -> None:
    """The last value of each line beside its end, none over another.

    Labels that would touch give way towards the emptier half of the plot, as far as it goes.
    """
    heights = [frame.y(dot.y) for dot in ends]
    is_high = sum(heights) < len(heights) * (frame.top + frame.floor) / 2
    way = 1 if is_high else -1
    taken: list[tuple[float, float]] = []
    for dot in sorted(ends, key=lambda dot: -way * dot.y):
        x, y = frame.x(dot.x) + 9, frame.y(dot.y) + 4
        for other_x, other_y in taken:
            if abs(x - other_x) < _RIGHT and way * y < way * other_y + _LABEL_PITCH:
                y = other_y + way * _LABEL_PITCH
        taken.append((x, y))
        if frame.top - _AIR < y < frame.floor + 6:
            canvas.text(x, y, content=frame.words(dot.y), css="head")


def _figure(value: float) -> str:
    """A number to at least three digits, for tooltips and ends of lines."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
