"""Candidate settings as dots: what each costs to the right, what it gives upwards.

The front joins the settings that no other beats in both; what lies below its steps is beaten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.report.axis import round_steps, short
from sortedrl.report.svg import Anchor, Canvas, text_width

_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 30, 50, 56


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
    y_start: float
    y_end: float

    def place(self, point: Point) -> tuple[float, float]:
        """Where a point lies."""
        return self.x(point.x), self.y(point.y)

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.x_end

    def y(self, value: float) -> float:
        share = (value - self.y_start) / (self.y_end - self.y_start)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


@dataclass(frozen=True, slots=True)
class _Box:
    """A part of the picture that is taken."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        """Whether they overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def pareto(points: Sequence[Point], *, x_label: str, y_label: str, title: str = "") -> str:
    """The points as one SVG, 860 pixels wide."""
    if not points:
        raise ValueError("a Pareto picture needs at least one point, got none")
    high = max(point.y for point in points)
    low = min(0.0, *(point.y for point in points))
    frame = _Frame(
        x_end=1.08 * max(point.x for point in points) or 1.0,
        y_start=low,
        y_end=high + 0.1 * (high - low) or 1.0,
    )
    canvas = Canvas(_WIDTH, _HEIGHT, label=title or f"{y_label} against {x_label}")
    canvas.text(_LEFT, 26, content=title or f"{len(points)} settings", css="title")
    _draw_axes(canvas, frame, x_label=x_label, y_label=y_label)
    front = sorted((p for p in points if p.on_front), key=lambda point: (point.x, point.y))
    _draw_front(canvas, front, frame=frame)
    for point in sorted(points, key=lambda point: (point.is_best, point.on_front)):
        x, y = frame.place(point)
        words = f"{point.label}: {y_label} {short(point.y)}, {x_label} {short(point.x)}"
        css = "plain" if point.on_front or point.is_best else "faint"
        radius = 5 if point.on_front or point.is_best else 3.5
        canvas.circle(x, y, radius=radius, css=css, title=words)
        if point.is_best:
            canvas.circle(x, y, radius=9, css="ring")
    _draw_labels(canvas, points, frame=frame)
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
    canvas.text(middle, _HEIGHT - 16, content=x_label, css="muted", anchor="middle")
    canvas.text(
        18, (_TOP + floor) / 2, content=y_label, css="muted", anchor="middle", is_upright=True
    )


def _draw_front(canvas: Canvas, front: Sequence[Point], *, frame: _Frame) -> None:
    """Steps: right of a point and below it, everything is beaten by it."""
    if not front:
        return
    corners: list[tuple[float, float]] = []
    for point in front:
        x, y = frame.place(point)
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    corners.append((_WIDTH - _RIGHT, corners[-1][1]))
    canvas.path(corners, css="front")


def _draw_labels(canvas: Canvas, points: Sequence[Point], *, frame: _Frame) -> None:
    """Name the best and the points of the front where there is room; the rest have tooltips."""
    taken = []
    for point in points:
        if point.on_front or point.is_best:
            x, y = frame.place(point)
            taken.append(_Box(x - 6, y - 6, x + 6, y + 6))
    named = [point for point in points if point.on_front or point.is_best]
    for point in sorted(named, key=lambda point: (not point.is_best, -point.y)):
        x, y = frame.place(point)
        width = text_width(point.label, size=13 if point.is_best else 12)
        reach = 13 if point.is_best else 9
        for dx, dy, anchor in _offsets(reach):
            box = _box(x + dx, y + dy, width=width, anchor=anchor)
            if _is_inside(box) and not any(box.meets(other) for other in taken):
                css = "best" if point.is_best else "ink"
                canvas.text(x + dx, y + dy, content=point.label, css=css, anchor=anchor)
                taken.append(box)
                break


def _offsets(reach: float) -> tuple[tuple[float, float, Anchor], ...]:
    """Places for a label around a dot, the nicest first."""
    return (
        (0, -reach, "middle"),
        (reach, -reach + 4, "start"),
        (-reach, -reach + 4, "end"),
        (reach, 16, "start"),
        (-reach, 4, "end"),
        (0, reach + 12, "middle"),
        (reach, 30, "start"),
        (reach, -24, "start"),
    )


def _box(x: float, y: float, *, width: float, anchor: Anchor) -> _Box:
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return _Box(left, y - 11, left + width, y + 4)


def _is_inside(box: _Box) -> bool:
    return box.left >= _LEFT + 2 and box.right <= _WIDTH - 6 and box.top >= _TOP - 18
