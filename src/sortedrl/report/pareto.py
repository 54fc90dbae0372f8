"""Candidate settings as dots: what each costs to the right, what it gives upwards.

The front joins the settings that no other beats in both; what lies below its steps is beaten.
Points of the front carry numbers, and a key below the picture names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.report.axis import round_steps, short
from sortedrl.report.svg import Canvas

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

    x_end: float
    y_end: float

    def x(self, value: float) -> float:
        """The place of a cost; 0 keeps a little off the axis."""
        return _LEFT + _INSET + (_WIDTH - _LEFT - _RIGHT - _INSET) * value / self.x_end

    def y(self, value: float) -> float:
        """The height of a gain."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.y_end


def pareto(points: Sequence[Point], *, x_label: str, y_label: str, title: str = "") -> str:
    """The points as one SVG, 860 pixels wide; values are 0 or more."""
    if not points:
        raise ValueError("a Pareto picture needs at least one point, got none")
    frame = _Frame(
        x_end=1.04 * max(point.x for point in points) or 1.0,
        y_end=1.08 * max(point.y for point in points) or 1.0,
    )
    named = sorted((p for p in points if p.on_front or p.is_best), key=lambda p: (p.x, p.y))
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
    _draw_key(canvas, named, x_label=x_label, y_label=y_label)
    return canvas.svg()


def _draw_axes(canvas: Canvas, frame: _Frame, *, x_label: str, y_label: str) -> None:
    floor = _HEIGHT - _BOTTOM
    for value in round_steps(frame.y_end, count=5):
        y = frame.y(value)
        canvas.line(_LEFT, y, x2=_WIDTH - _RIGHT, y2=y, css="rule")
        canvas.text(_LEFT - 8, y + 4, content=short(value), css="small", anchor="end")
    for value in round_steps(frame.x_end, count=8):
        x = frame.x(value)
        canvas.line(x, floor, x2=x, y2=floor + 4, css="rule")
        canvas.text(x, floor + 18, content=short(value), css="small", anchor="middle")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    canvas.text(middle, floor + 40, content=x_label, css="muted", anchor="middle")
    upright = (_TOP + floor) / 2
    canvas.text(18, upright, content=y_label, css="muted", anchor="middle", is_upright=True)


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
    """A number up and left of each named dot, where the front leaves room; none over another."""
    taken: list[tuple[float, float]] = []
    for number, point in enumerate(named, start=1):
        reach = 11 if point.is_best else 8
        x, y = frame.x(point.x) - reach, frame.y(point.y) - reach + 2
        while any(abs(x - other_x) < 13 and abs(y - other_y) < 12 for other_x, other_y in taken):
            y -= 4
        taken.append((x, y))
        css = "best" if point.is_best else "ink"
        canvas.text(x, y, content=str(number), css=css, anchor="middle")


def _draw_key(canvas: Canvas, named: Sequence[Point], *, x_label: str, y_label: str) -> None:
    if not named:
        return
    y = _HEIGHT + 8.0
    first, second, third = _LEFT + 26, 590, _WIDTH - _RIGHT
    canvas.text(first, y, content="best choices, least costly first", css="small")
    canvas.text(second, y, content=x_label, css="small", anchor="end")
    canvas.text(third, y, content=y_label, css="small", anchor="end")
    x_digits, y_digits = _digits([p.x for p in named]), _digits([p.y for p in named])
    for number, point in enumerate(named, start=1):
        y += _KEY_PITCH
        css = "best" if point.is_best else "ink"
        canvas.text(_LEFT + 14, y, content=str(number), css=css, anchor="end")
        canvas.text(first, y, content=point.label, css=css)
        canvas.text(second, y, content=f"{point.x:,.{x_digits}f}", css=css, anchor="end")
        canvas.text(third, y, content=f"{point.y:,.{y_digits}f}", css=css, anchor="end")


def _digits(values: Sequence[float]) -> int:
    """Decimals for a column of numbers, the same in every row."""
    largest = max(values)
    return 0 if largest >= 100 else 1 if largest >= 10 else 2
