"""Lines over a common axis: how a number of each run changes while it goes on.

The axis holds 0, every line ends with its value, and every dot tells its own when pointed at.
A line that stands for several runs has a band behind it, from the least of them to the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.axes import Frame, neighbours, round_marks, round_steps, short
from sortedrl.report.charts.svg import Canvas, Scheme, clipped, text_width
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


def curves(
    series: Sequence[Series], *, x_label: str, y_label: str, title: str, is_share: bool = False
) -> str:
    """The lines as a picture for a page, 860 pixels wide; shares are shown as percentages.

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
    bands = [_thinned(line.band) for line in series]
    key = _key(series)
    rows = 1 + max((row for row, *_ in key), default=-1)
    top = edge + _TITLE + _KEY_PITCH * rows + _AIR
    dots = [dot for line in lines for dot in line]
    edges = [_Dot(x=x, y=y, count=1) for band in bands for x, *ends in band for y in ends]
    frame = _frame([*dots, *edges], top=top, is_share=is_share)
    label = percent if is_share else _figure
    canvas = Canvas(_WIDTH, frame.floor + _BOTTOM, label=title)
    canvas.text(_LEFT, edge + 18, content=title, css="title")
    for place, (row, x, text) in enumerate(key):
        baseline = edge + _TITLE + _KEY_PITCH * row + 14
        _draw_key(canvas, series[place], place=place, x=x, baseline=baseline, text=text)
    has_whole_x = all(dot.x == int(dot.x) for dot in [*dots, *edges])
    frame.draw_axes(
        canvas,
        x_marks=[m for m in round_steps(frame.x_end, count=8) if m == int(m) or not has_whole_x],
        y_marks=[
            (mark, f"{short(100 * mark)} %" if is_share else short(mark))
            for mark in round_marks(frame.y_start, frame.y_end, count=6)
        ],
        x_label=x_label,
        y_label=y_label,
        zero_css="axis",
        gap=10,
    )
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
        tooltip = f"{series[place].name}: {y_label}"
        spread = {x: (low, high) for x, low, high in series[place].band}
        css = series_class(place)
        _draw_dots(
            canvas, lines[place], frame=frame, css=css, tooltip=tooltip, spread=spread, label=label
        )
    _label_ends(canvas, [line[-1] for line in lines if line], frame=frame, label=label)
    return canvas


def _dots(points: Sequence[tuple[float, float]]) -> list[_Dot]:
    """The points, or means of neighbours where there are too many."""
    parts = [part for _, part in neighbours(points, most=MAX_POINTS)]
    return [_Dot(x=x, y=y, count=len(part)) for part in parts for x, y in [_means(part)]]


def _thinned(
    band: Sequence[tuple[float, float, float]],
) -> list[tuple[float, float, float]]:
    """The band, or means of neighbours where it has too many places."""
    means = (_means(part) for _, part in neighbours(band, most=MAX_POINTS))
    return [(x, low, high) for x, low, high in means]


def _means(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The mean of each column."""
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))


def _frame(dots: Sequence[_Dot], *, top: float, is_share: bool) -> Frame:
    highest = max((dot.y for dot in dots), default=0.0)
    low, high = 1.08 * min([0.0, *(dot.y for dot in dots)]), 1.08 * max(0.0, highest)
    if is_share and highest <= 1:
        high = min(1.0, high)
    # below this, round numbers are no longer told apart
    is_flat = high - low < 1e-6
    x_end = max((dot.x for dot in dots), default=0.0)
    return Frame(
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=top,
        floor=top + _PLOT_HEIGHT,
        x_end=x_end if x_end > 1e-6 else 1.0,
        y_start=0.0 if is_flat else low,
        y_end=1.0 if is_flat else high,
    )


def _key(series: Sequence[Series]) -> list[tuple[int, float, str]]:
    """For each name its row, its place in the row, and its text."""
    room = _WIDTH - _LEFT - 20
    entries: list[tuple[int, float, str]] = []
    row, x = 0, float(_LEFT)
    for line in series:
        text = clipped(_key_text(line), room - 20)
        width = 20 + text_width(text) + 24
        if x > _LEFT and x + width > _LEFT + room:
            row, x = row + 1, float(_LEFT)
        entries.append((row, x, text))
        x += width
    return entries


def _key_text(line: Series) -> str:
    """What the key says of a line."""
    if not line.points:
        return f"{line.name} (none)"
    return f"{line.name} ({line.note})" if line.note else line.name


def _draw_key(
    canvas: Canvas, line: Series, *, place: int, x: float, baseline: float, text: str
) -> None:
    """A name with its colour; a line with a band shows as one."""
    css = series_class(place)
    with canvas.group(title=line.name):
        if line.band:
            canvas.rect(x, baseline - 9, width=14, height=10, css=f"{css} band")
            canvas.rect(x, baseline - 5, width=14, height=2, css=css)
        else:
            canvas.rect(x, baseline - 9, width=14, height=10, css=css)
        canvas.text(x + 20, baseline, content=text, css="muted")


def _draw_band(
    canvas: Canvas, band: Sequence[tuple[float, float, float]], *, frame: Frame, css: str
) -> None:
    """The area between the lowest and the highest; at a single place, the stretch between them."""
    upper = [(frame.x(x), frame.y(high)) for x, _, high in band]
    lower = [(frame.x(x), frame.y(low)) for x, low, _ in band]
    if len(band) == 1:
        canvas.path([*upper, *lower], css=f"{css} curve")
    else:
        canvas.path([*upper, *reversed(lower)], css=f"{css} band", is_closed=True)


def _draw_dots(
    canvas: Canvas,
    dots: Sequence[_Dot],
    *,
    frame: Frame,
    css: str,
    tooltip: str,
    spread: Mapping[float, tuple[float, float]],
    label: Callable[[float], str],
) -> None:
    radius = 3.5 if len(dots) <= _FEW else 2
    for dot in dots:
        mean = f" (mean of {dot.count})" if dot.count > 1 else ""
        if dot.count == 1 and dot.x in spread:
            mean = " ({} to {})".format(*(label(end) for end in spread[dot.x]))
        text = f"{tooltip} {label(dot.y)}{mean} at {_figure(dot.x)}"
        canvas.circle(frame.x(dot.x), frame.y(dot.y), radius=radius, css=css, title=text)


def _label_ends(
    canvas: Canvas, ends: Sequence[_Dot], *, frame: Frame, label: Callable[[float], str]
) -> None:
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
            canvas.text(x, y, content=label(dot.y), css="head")


def _figure(value: float) -> str:
    """A number to at least three digits, for tooltips and ends of lines."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
