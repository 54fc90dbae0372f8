"""Compares strategies and settings: a bar chart, and a Pareto chart of cost and gain.

In the Pareto chart every setting is a dot: cost on the x axis, gain on the y axis. The front joins
the settings that no other beats in both; those below its steps are dominated. Points on the front
are numbered, and a key below the chart names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.svg import Canvas, PlotArea, Scheme, round_marks, short

_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 30, 50, 60
_INSET = 16
_KEY_PITCH = 19

Row = Mapping[str, object]
"""One row of `compare.row`."""
_NAMES = 176
_COLUMN, _BETWEEN, _LABEL = 150, 21, 48
_BARS_TOP, _PITCH, _GAP, _BARS_BOTTOM = 62, 20, 8, 14
_FAIR = 0.1
"""A length bias within this of 1 is shown as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setting; lower `x` and higher `y` are better."""

    x: float
    y: float
    label: str
    is_best: bool = False
    on_front: bool = False


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

    The key names the front, or with `names_all` all points. With `is_cropped`, axes need not start
    at 0 if all values are far from it.
    """
    if not points:
        raise ValueError("a Pareto picture needs at least one point, got none")
    xs, ys = [point.x for point in points], [point.y for point in points]
    x_start, y_start = (_start(xs), _start(ys)) if is_cropped else (0.0, 0.0)
    frame = PlotArea(
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        floor=_HEIGHT - _BOTTOM,
        inset=_INSET,
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
    heights = round_marks(frame.y_start, frame.y_end, count=5)
    places = round_marks(frame.x_start, frame.x_end, count=8)
    frame.draw_heights(canvas, [(mark, short(mark)) for mark in heights], zero_css="rule")
    frame.draw_places(canvas, [(mark, short(mark)) for mark in places], label=x_label)
    frame.draw_y_label(canvas, y_label)
    _draw_front(canvas, [point for point in named if point.on_front], frame=frame)
    for point in sorted(points, key=lambda point: (point.is_best, point.on_front)):
        x, y = frame.x(point.x), frame.y(point.y)
        tooltip = f"{point.label}: {y_label} {short(point.y)}, {x_label} {short(point.x)}"
        is_named = point.on_front or point.is_best
        css, radius = ("plain", 5.0) if is_named else ("faint", 3.5)
        canvas.circle(x, y, radius=radius, css=css, title=tooltip)
        if point.is_best:
            canvas.circle(x, y, radius=9, css="ring")
    _draw_numbers(canvas, named, frame=frame)
    heading = "least costly first" if names_all else "best choices, least costly first"
    _draw_key(canvas, named, heading=heading, x_label=x_label, y_label=y_label)
    return canvas.svg(scheme=scheme)


def _start(values: Sequence[float]) -> float:
    """Start of an axis: 0, or a little below the least value if 0 is far away."""
    low, high = min(values), max(values)
    is_far = low > 0.4 * high and high - low > 1e-6 * high
    return low - 0.25 * (high - low) if is_far else 0.0


def _end(values: Sequence[float], *, start: float, air: float) -> float:
    """End of an axis: a little above the largest value."""
    return start + air * (max(values) - start) or 1.0


def _draw_front(canvas: Canvas, front: Sequence[Point], *, frame: PlotArea) -> None:
    """Steps: everything right of a point and below it is dominated."""
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


def _draw_numbers(canvas: Canvas, named: Sequence[Point], *, frame: PlotArea) -> None:
    """Number each named dot on the side where there is room, without overlap.

    Up and left for points on the front, down and right for dominated ones.
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
        canvas.text(x, y, content=str(number), css=_text_class(point), anchor="middle")


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
        css = _text_class(point)
        canvas.text(_LEFT + 14, y, content=str(number), css=css, anchor="end")
        canvas.text(first, y, content=point.label, css=css)
        canvas.text(second, y, content=f"{point.x:,.{x_digits}f}", css=css, anchor="end")
        canvas.text(third, y, content=f"{point.y:,.{y_digits}f}", css=css, anchor="end")


def _text_class(point: Point) -> str:
    """The CSS class of a point's text: strong for the best, muted if dominated."""
    return "best" if point.is_best else "ink" if point.on_front else "muted"


def _digits(values: Sequence[float]) -> int:
    """Decimals for a column of numbers, the same in every row."""
    largest = max(values)
    return 0 if largest >= 100 else 1 if largest >= 10 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One measure: heading, values, and the start of its bars."""

    head: str
    hint: str
    values: tuple[float, ...]
    origin: float = 0.0
    format: Callable[[float], str]
    colour: Callable[[float], str]


def bar_chart(rows: Sequence[Row]) -> str:
    """The rows as one SVG, 860 pixels wide, in the order given."""
    if not rows:
        raise ValueError("a bar chart needs at least one row, got none")
    tops = _tops(rows)
    height = tops[-1] + _PITCH + _BARS_BOTTOM
    names = [str(row["name"]) for row in rows]
    canvas = Canvas(_WIDTH, height, label="Strategies compared: " + ", ".join(names))
    for name, top in zip(names, tops, strict=True):
        canvas.text(_NAMES - 12, top + 14, content=name, anchor="end")
    left = float(_NAMES)
    for column in _columns(rows):
        _draw_column(canvas, column, left=left, tops=tops)
        left += _COLUMN + _BETWEEN
    return canvas.svg()


def _columns(rows: Sequence[Row]) -> list[_Column]:
    versus = all(row.get("goodput_vs_sync") is not None for row in rows)
    speed = _Column(
        head="goodput, times sync" if versus else "goodput, tokens/s",
        hint="trained tokens per second",
        values=_values(rows, "goodput_vs_sync" if versus else "goodput"),
        format=(lambda value: f"{value:.2f} ×") if versus else short,  # noqa: RUF001
        colour=lambda _: "plain",
    )
    bubble = _Column(
        head="bubble",
        hint="idle slots during rollout",
        values=_values(rows, "bubble"),
        format=percent,
        colour=lambda _: "waiting",
    )
    biases = [
        _Column(
            head=head,
            hint=hint,
            values=_values(rows, name),
            origin=1.0,
            format=lambda value: f"{value:.2f}",
            colour=lambda value: "good" if abs(value - 1) <= _FAIR else "discarded",
        )
        for name, head, hint in (
            ("length_bias", "length bias", "trained on / generated"),
            ("early_length_bias", "early bias", "first half of the run"),
        )
    ]
    return [speed, bubble, *biases]


def _draw_column(canvas: Canvas, column: _Column, *, left: float, tops: Sequence[float]) -> None:
    canvas.text(left, 26, content=column.head, css="head")
    canvas.text(left, 43, content=column.hint, css="small")
    low = min(column.origin, *column.values)
    high = max(column.origin, *column.values)
    # leave room for the labels of bars that point left
    room = _COLUMN - _LABEL * (2 if low < column.origin else 1)
    scale = room / ((high - low) or 1.0)
    zero = left + (column.origin - low) * scale + (_LABEL if low < column.origin else 0)
    canvas.line(zero, tops[0] - 3, x2=zero, y2=tops[-1] + _PITCH + 3, css="rule")
    for value, top in zip(column.values, tops, strict=True):
        width = abs(value - column.origin) * scale
        points_left = value < column.origin
        x = zero - width if points_left else zero
        label = column.format(value)
        css = column.colour(value)
        canvas.rect(x, top + 3, width=max(width, 1), height=_PITCH - 6, css=css, radius=1)
        edge = x - 5 if points_left else x + max(width, 1) + 5
        canvas.text(edge, top + 14, content=label, anchor="end" if points_left else "start")


def _tops(rows: Sequence[Row]) -> list[float]:
    """The top of each row, with a gap between strategies."""
    tops: list[float] = []
    top = float(_BARS_TOP)
    for index, row in enumerate(rows):
        if index and row["strategy"] != rows[index - 1]["strategy"]:
            top += _GAP
        tops.append(top)
        top += _PITCH
    return tops


def _values(rows: Sequence[Row], name: str) -> tuple[float, ...]:
    values = []
    for row in rows:
        value = row[name]
        if not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number in every row, got {value!r}")
        values.append(float(value))
    return tuple(values)
