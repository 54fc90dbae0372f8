"""Candidate settings as dots: what each costs to the right, what it gives upwards.

The front joins the settings that no other beats in both; what lies below its steps is beaten.
Points of the front carry numbers, and a key below the picture names them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.report.axis import round_steps, short
from sortedrl.report.svg import Canvas, Scheme

_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 30, 50, 60
_INSET = 16
_KEY_PITCH = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate: lower `x` and higher `y` are better."""

    x: float
    y: float
    label: str
    is_best: bool = False
    on_front: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Values to pixels."""

    x_start: float
    x_end: float
    y_start: float
    y_end: float

    def x(self, value: float) -> float:
        """The place of a cost; the least keeps a little off the axis."""
        share = (value - self.x_start) / (self.x_end - self.x_start)
        return _LEFT + _INSET + (_WIDTH - _LEFT - _RIGHT - _INSET) * share

    def y(self, value: float) -> float:
        """The height of a gain."""
        share = (value - self.y_start) / (self.y_end - self.y_start)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def pareto(
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    scheme: Scheme = "auto",
    names_all: bool = False,
    is_cropped: bool = False,
) -> str:
    """The points as one SVG, 860 pixels wide; values are 0 or more.

    The key names the best choices, or all points where those are few and each of them matters.
    Where it is cropped, axes need not begin at 0, if all values are far from it.
    """
    if not points:
        raise ValueError("a Pareto picture needs at least one point, got none")
    xs, ys = [point.x for point in points], [point.y for point in points]
    x_start, y_start = (_start(xs), _start(ys)) if is_cropped else (0.0, 0.0)
    frame = _Frame(
        x_start=x_start,
        x_end=_end(xs, start=x_start, air=1.04),
        y_start=y_start,
        y_end=_end(ys, start=y_start, air=1.08),
    )
    best = [point for point in points if names_all or point.on_front or point.is_best]
    named = sorted(best, key=lambda point: (point.x, point.y))
    height = _HEIGHT + _KEY_PITCH * (len(named) + 1) + 10 if named else _HEIGHT
    canvas = Canvas(_WIDTH, height, label=title or f"{y_label} against {x_label}")
    canvas.text(_LEFT, 26, content=title or f"{len(points)} settings", css="title")
    _draw_axes(canvas, frame, x_label=x_label, y_label=y_label)
    _draw_front(canvas, [point for point in named if point.on_front], frame=frame)
    for point in sorted(points, key=lambda point: (point.is_best, point.on_front)):
        x, y = frame.x(point.x), frame.y(point.y)
        words = f"{point.label}: {y_label} {short(point.y)}, {x_label} {short(point.x)}"
        is_named = point.on_front or point.is_best
        css, radius = ("plain", 5.0) if is_named else ("faint", 3.5)
        canvas.circle(x, y, radius=radius, css=css, title=words)
        if point.is_best:
            canvas.circle(x, y, radius=9, css="ring")
    _draw_numbers(canvas, named, frame=frame)
    heading = "least costly first" if names_all else "best choices, least costly first"
    _draw_key(canvas, named, heading=heading, x_label=x_label, y_label=y_label)
    return canvas.svg(scheme=scheme)


def _draw_axes(canvas: Canvas, frame: _Frame, *, x_label: str, y_label: str) -> None:
    floor = _HEIGHT - _BOTTOM
    for value in _marks(frame.y_start, frame.y_end, count=5):
        y = frame.y(value)
        canvas.line(_LEFT, y, x2=_WIDTH - _RIGHT, y2=y, css="rule")
        canvas.text(_LEFT - 8, y + 4, content=short(value), css="small", anchor="end")
    if frame.y_start:
        canvas.line(_LEFT, floor, x2=_WIDTH - _RIGHT, y2=floor, css="rule")
    for value in _marks(frame.x_start, frame.x_end, count=8):
        x = frame.x(value)
        canvas.line(x, floor, x2=x, y2=floor + 4, css="rule")
        canvas.text(x, floor + 18, content=short(value), css="small", anchor="middle")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    canvas.text(middle, floor + 40, content=x_label, css="muted", anchor="middle")
    upright = (_TOP + floor) / 2
    canvas.text(18, upright, content=y_label, css="muted", anchor="middle", is_upright=True)


def _start(values: Sequence[float]) -> float:
    """Where an axis begins: at 0, or a little below the least value if 0 is far away."""
    low, high = min(values), max(values)
    is_far = low > 0.4 * high and high - low > 1e-6 * high
    return low - 0.25 * (high - low) if is_far else 0.0


def _end(values: Sequence[float], *, start: float, air: float) -> float:
    """Where an axis ends: a little above the most."""
    return start + air * (max(values) - start) or 1.0


def _marks(start: float, end: float, *, count: int) -> list[float]:
    """About so many round numbers on an axis."""
    steps = round_steps(end - start, count=count)
    if not start or len(steps) < 2:
        return steps
    first, last = math.ceil(start / steps[1] - 1e-9), math.floor(end / steps[1] + 1e-9)
    return [round(index * steps[1], 10) for index in range(first, last + 1)]


def _draw_front(canvas: Canvas, front: Sequence[Point], *, frame: _Frame) -> None:
    """Steps: right of a point and below it, everything is beaten by it."""
    if not front:
        return
    corners: list[tuple[float, float]] = []
    for point in front:
        x, y = frame.x(point.x), frame.y(point.y)
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    corners.append((_WIDTH - _RIGHT, corners[-1][1]))
    canvas.path(corners, css="front")


def _draw_numbers(canvas: Canvas, named: Sequence[Point], *, frame: _Frame) -> None:
    """A number beside each named dot, on the side where the front leaves room; none over another.

    That is up and left of what lies on it, down and right of what it beats.
    """
    taken: list[tuple[float, float]] = []
    for number, point in enumerate(named, start=1):
        reach = 11 if point.is_best else 8
        is_beaten = not (point.on_front or point.is_best)
        way = 1 if is_beaten else -1
        x, y = frame.x(point.x) + way * reach, frame.y(point.y) + way * reach + 2
        while any(abs(x - other_x) < 13 and abs(y - other_y) < 12 for other_x, other_y in taken):
            y += 4 * way
        taken.append((x, y))
        canvas.text(x, y, content=str(number), css=_voice(point), anchor="middle")


def _draw_key(
    canvas: Canvas, named: Sequence[Point], *, heading: str, x_label: str, y_label: str
) -> None:
    if not named:
        return
    y = _HEIGHT + 8.0
    first, second, third = _LEFT + 26, 590, _WIDTH - _RIGHT
    canvas.text(first, y, content=heading, css="small")
    canvas.text(second, y, content=x_label, css="small", anchor="end")
    canvas.text(third, y, content=y_label, css="small", anchor="end")
    x_digits, y_digits = _digits([p.x for p in named]), _digits([p.y for p in named])
    for number, point in enumerate(named, start=1):
        y += _KEY_PITCH
        css = _voice(point)
        canvas.text(_LEFT + 14, y, content=str(number), css=css, anchor="end")
        canvas.text(first, y, content=point.label, css=css)
        canvas.text(second, y, content=f"{point.x:,.{x_digits}f}", css=css, anchor="end")
        canvas.text(third, y, content=f"{point.y:,.{y_digits}f}", css=css, anchor="end")


def _voice(point: Point) -> str:
    """The class of a point's words: loud for the best, quiet for what is beaten."""
    return "best" if point.is_best else "ink" if point.on_front else "muted"


def _digits(values: Sequence[float]) -> int:
    """Decimals for a column of numbers, the same in every row."""
    largest = max(values)
    return 0 if largest >= 100 else 1 if largest >= 10 else 2
