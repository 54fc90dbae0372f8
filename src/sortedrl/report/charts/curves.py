"""Lines over a common axis: how a number of each run changes over the run.

The axis includes 0, every line ends with its value, and every dot has a tooltip with its own.
A line that stands for several runs has a band behind it, from their minimum to their maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.axes import WIDTH, Frame, neighbours, round_marks, round_steps, short
from sortedrl.report.charts.svg import Canvas, Scheme, clipped, text_width
from sortedrl.report.charts.svg import series as series_class

MAX_POINTS = 240
"""Dots of one line; where there are more, a dot is the mean of several neighbours."""

_PLOT_HEIGHT = 240
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


def curves(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str,
    is_share: bool = False,
    scheme: Scheme | None = None,
    width: int = WIDTH,
) -> str:
    """The lines as a picture `width` pixels wide; shares are shown as percentages.

    Without a scheme it is part of a page, with one the content of a file. A series without points
    keeps its colour and is named as having none.
    """
    edge = 0 if scheme is None else 8  # space above the title
    lines = [_thinned(line.points) for line in series]
    bands = [_thinned(line.band) for line in series]
    key = _key(series, width=width)
    rows = 1 + max((row for row, *_ in key), default=-1)
    corners = [(x, y) for row in (*lines, *bands) for _, (x, *ys) in row for y in ys]
    frame = _frame(
        corners, top=edge + _TITLE + _KEY_PITCH * rows + _AIR, width=width, is_share=is_share
    )
    label = percent if is_share else _precise
    canvas = Canvas(width, frame.floor + _BOTTOM, label=title)
    canvas.text(_LEFT if width == WIDTH else 18, edge + 18, content=title, css="title")
    for place, (row, x, text) in enumerate(key):
        baseline = edge + _TITLE + _KEY_PITCH * row + 14
        _draw_key(canvas, series[place], place=place, x=x, baseline=baseline, text=text)
    has_whole_x = all(x == int(x) for x, _ in corners)
    places = [
        m
        for m in round_steps(frame.x_end, count=8 * width // WIDTH)
        if m == int(m) or not has_whole_x
    ]
    heights = round_marks(frame.y_start, frame.y_end, count=6)
    unit = (lambda mark: f"{short(100 * mark)} %") if is_share else short
    frame.draw_heights(canvas, [(mark, unit(mark)) for mark in heights], gap=10)
    frame.draw_places(canvas, [(mark, short(mark)) for mark in places], label=x_label)
    frame.draw_y_label(canvas, y_label)
    if not any(lines):
        middle, y = (frame.left + frame.right) / 2, (frame.top + frame.floor) / 2
        canvas.text(middle, y, content="no data yet", css="muted", anchor="middle")
    for place in reversed(range(len(series))):
        _draw_band(canvas, [row for _, row in bands[place]], frame=frame, css=series_class(place))
    # the first line comes last: where lines lie on each other, it is the one that shows
    for place in reversed(range(len(series))):
        name, css = series[place].name, series_class(place)
        with canvas.group(title=name):
            dots = [(frame.x(x), frame.y(y)) for _, (x, y) in lines[place]]
            canvas.path(dots, css=f"{css} curve")
        spread = {x: (low, high) for x, low, high in series[place].band}
        radius = 3.5 if len(dots) <= _FEW else 2
        for (count, (x, y)), (left, top) in zip(lines[place], dots, strict=True):
            text = f"{name}: {y_label} {label(y)}{_spread(count, spread.get(x), label)}"
            tooltip = f"{text} at {_precise(x)}"
            canvas.circle(left, top, radius=radius, css=css, title=tooltip)
    label_ends(canvas, [line[-1][1] for line in lines if line], frame=frame, label=label)
    return canvas.inline() if scheme is None else canvas.svg(scheme=scheme)


def _thinned(rows: Sequence[tuple[float, ...]]) -> list[tuple[int, tuple[float, ...]]]:
    """The rows, or the means of neighbours where there are too many; each with how many it is."""
    parts = (part for _, part in neighbours(rows, most=MAX_POINTS))
    return [(len(p), tuple(sum(column) / len(p) for column in zip(*p, strict=True))) for p in parts]


def _frame(
    points: Sequence[tuple[float, float]], *, top: float, width: int, is_share: bool
) -> Frame:
    highest = max((y for _, y in points), default=0.0)
    low, high = 1.08 * min([0.0, *(y for _, y in points)]), 1.08 * max(0.0, highest)
    if is_share and highest <= 1:
        high = min(1.0, high)
    # below this, round numbers are no longer told apart
    is_flat = high - low < 1e-6
    x_end = max((x for x, _ in points), default=0.0)
    return Frame(
        left=_LEFT,
        right=width - _RIGHT,
        top=top,
        floor=top + _PLOT_HEIGHT,
        x_end=x_end if x_end > 1e-6 else 1.0,
        y_start=0.0 if is_flat else low,
        y_end=1.0 if is_flat else high,
    )


def _key(series: Sequence[Series], *, width: int) -> list[tuple[int, float, str]]:
    """For each name its row, its place in the row, and its text."""
    room = width - _LEFT - 20
    entries: list[tuple[int, float, str]] = []
    row, x = 0, float(_LEFT)
    for line in series:
        note = line.note if line.points else "none"
        text = clipped(f"{line.name} ({note})" if note else line.name, room - 20)
        wide = 20 + text_width(text) + 24
        if x > _LEFT and x + wide > _LEFT + room:
            row, x = row + 1, float(_LEFT)
        entries.append((row, x, text))
        x += wide
    return entries


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
    canvas: Canvas, band: Sequence[tuple[float, ...]], *, frame: Frame, css: str
) -> None:
    """The area between the lowest and the highest; at a single place, the line between them."""
    upper = [(frame.x(x), frame.y(high)) for x, _, high in band]
    lower = [(frame.x(x), frame.y(low)) for x, low, _ in band]
    if len(band) == 1:
        canvas.path([*upper, *lower], css=f"{css} curve")
    else:
        canvas.path([*upper, *reversed(lower)], css=f"{css} band", is_closed=True)


def _spread(count: int, ends: tuple[float, float] | None, label: Callable[[float], str]) -> str:
    """What a dot stands for: the mean of so many neighbours, or of values between two ends."""
    if count > 1:
        return f" (mean of {count})"
    return f" ({label(ends[0])} to {label(ends[1])})" if ends is not None else ""


def label_ends(
    canvas: Canvas,
    ends: Sequence[tuple[float, ...]],
    *,
    frame: Frame,
    label: Callable[[float], str],
) -> None:
    """The last value of each line beside its end, none over another.

    Labels that would touch give way towards the emptier half of the plot, as far as it goes.
    """
    heights = [frame.y(y) for _, y in ends]
    is_high = sum(heights) < len(heights) * (frame.top + frame.floor) / 2
    way = 1 if is_high else -1
    taken: list[tuple[float, float]] = []
    for end in sorted(ends, key=lambda end: -way * end[1]):
        x, y = frame.x(end[0]) + 9, frame.y(end[1]) + 4
        for other_x, other_y in taken:
            if abs(x - other_x) < _RIGHT and way * y < way * other_y + _LABEL_PITCH:
                y = other_y + way * _LABEL_PITCH
        taken.append((x, y))
        if frame.top - _AIR < y < frame.floor + 6:
            canvas.text(x, y, content=label(end[1]), css="head")


def _precise(value: float) -> str:
    """A number to about three digits, for tooltips and ends of lines."""
    if 0 < abs(value) < 0.001:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
