"""Line charts of runs over training, and the charts of an evaluation.

The axis of `curves` includes 0, every line ends with its value, and every dot has a tooltip. A line
for several runs has a band behind it, from minimum to maximum. The charts of an evaluation (bars
with intervals, pass@k curves, answer lengths) are about as wide as a phone. Series have the
classes `series0`, `series1`, ... and are distinguished by order as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sortedrl.evaluation.statistics import Answer, Estimate
from sortedrl.evaluation.tables import percent, points
from sortedrl.report.charts.svg import (
    WIDTH,
    Canvas,
    PlotArea,
    Scheme,
    clipped,
    neighbours,
    round_marks,
    round_steps,
    series_class,
    short,
    text_width,
)

MAX_POINTS = 240
"""Dots per line; beyond this, a dot is the mean of several neighbours."""

_PLOT_HEIGHT = 240
_LEFT, _RIGHT, _BOTTOM = 78, 66, 56
_TITLE, _KEY_PITCH, _AIR = 26, 20, 18
_LABEL_PITCH = 14
_FEW = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line: finite values over positions of 0 or more, in order."""

    name: str
    points: tuple[tuple[float, float], ...]
    note: str = ""
    """Shown after the name in the key: what the line averages, what its band shows."""
    band: tuple[tuple[float, float, float], ...] = ()
    """Positions in order, each with the lowest and the highest value there."""


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
    """The lines as a chart `width` pixels wide; shares are shown as percentages.

    Without a scheme it is inline SVG for a page, otherwise the content of a file. A series without
    points keeps its colour and is listed as having none.
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
    # the first line is drawn last, so that it is on top where lines overlap
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
    """The rows, or means of neighbours if there are too many; each with the number of rows."""
    parts = (part for _, part in neighbours(rows, most=MAX_POINTS))
    return [(len(p), tuple(sum(column) / len(p) for column in zip(*p, strict=True))) for p in parts]


def _frame(
    points: Sequence[tuple[float, float]], *, top: float, width: int, is_share: bool
) -> PlotArea:
    highest = max((y for _, y in points), default=0.0)
    low, high = 1.08 * min([0.0, *(y for _, y in points)]), 1.08 * max(0.0, highest)
    if is_share and highest <= 1:
        high = min(1.0, high)
    # below this, round numbers cannot be distinguished
    is_flat = high - low < 1e-6
    x_end = max((x for x, _ in points), default=0.0)
    return PlotArea(
        left=_LEFT,
        right=width - _RIGHT,
        top=top,
        floor=top + _PLOT_HEIGHT,
        x_end=x_end if x_end > 1e-6 else 1.0,
        y_start=0.0 if is_flat else low,
        y_end=1.0 if is_flat else high,
    )


def _key(series: Sequence[Series], *, width: int) -> list[tuple[int, float, str]]:
    """For each name its row, its position in the row, and its text."""
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
    """A name with its colour; a line with a band also shows a band."""
    css = series_class(place)
    with canvas.group(title=line.name):
        if line.band:
            canvas.rect(x, baseline - 9, width=14, height=10, css=f"{css} band")
            canvas.rect(x, baseline - 5, width=14, height=2, css=css)
        else:
            canvas.rect(x, baseline - 9, width=14, height=10, css=css)
        canvas.text(x + 20, baseline, content=text, css="muted")


def _draw_band(
    canvas: Canvas, band: Sequence[tuple[float, ...]], *, frame: PlotArea, css: str
) -> None:
    """The area between lowest and highest; at a single position, the line between them."""
    upper = [(frame.x(x), frame.y(high)) for x, _, high in band]
    lower = [(frame.x(x), frame.y(low)) for x, low, _ in band]
    if len(band) == 1:
        canvas.path([*upper, *lower], css=f"{css} curve")
    else:
        canvas.path([*upper, *reversed(lower)], css=f"{css} band", is_closed=True)


def _spread(count: int, ends: tuple[float, float] | None, label: Callable[[float], str]) -> str:
    """What a dot stands for: the mean of several neighbours, or of values in a range."""
    if count > 1:
        return f" (mean of {count})"
    return f" ({label(ends[0])} to {label(ends[1])})" if ends is not None else ""


def label_ends(
    canvas: Canvas,
    ends: Sequence[tuple[float, ...]],
    *,
    frame: PlotArea,
    label: Callable[[float], str],
) -> None:
    """Label the end of each line with its last value, without overlap.

    Overlapping labels move towards the emptier half of the plot.
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
    """A number to about three digits, for tooltips and line ends."""
    if 0 < abs(value) < 0.001:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


_WIDTH = 400
_NAMES, _VALUES = 126, 58
_THIN, _THICK, _RATE_AIR = 12, 16, 8
_HEAD, _FOOT = 12, 26
_BINS = 24
_CURVE_HEIGHT = 220
_HALF = 84
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One row of a bar chart: a name, and an estimate of each series that has one."""

    name: str
    rates: Sequence[Estimate | None]
    is_quiet: bool = False
    """Whether its name is muted, as that of a level below its task."""


def rate_bars(groups: Sequence[Group], *, label: str) -> str:
    """Bars of rates from 0 to 100 %, each with its interval and its value."""
    count = max(len(group.rates) for group in groups)
    pitch = _THICK if count == 1 else _THIN
    tall = count * pitch + _RATE_AIR
    floor = _HEAD + tall * len(groups)
    canvas = Canvas(_WIDTH, floor + _FOOT, label=label)
    right = _WIDTH - _VALUES
    for share in _QUARTERS:
        x = _place(share)
        canvas.line(x, _HEAD - 4, x2=x, y2=floor, css="rule")
        canvas.text(x, floor + 16, content=f"{100 * share:.0f}", css="small", anchor="middle")
    canvas.text(right + 14, floor + 16, content="%", css="small")
    for row, group in enumerate(groups):
        top = _HEAD + row * tall
        middle = top + count * pitch / 2 + 4
        with canvas.group(title=group.name):
            canvas.text(_NAMES - 8, middle, content=_clipped_name(group.name), anchor="end")
        for place, rate in enumerate(group.rates):
            if rate is not None:
                _draw_rate(
                    canvas, rate, y=top + place * pitch, height=pitch, css=series_class(place)
                )
    return canvas.inline()


def change_marks(groups: Sequence[Group], *, label: str) -> str:
    """Differences as dots with intervals around 0; filled if the interval excludes 0."""
    rates = [(group, rate) for group in groups for rate in group.rates if rate is not None]
    reach = max(0.01, *(max(abs(rate.low), abs(rate.high)) for _, rate in rates))
    tall = _THICK + _RATE_AIR
    floor = _HEAD + tall * len(rates)
    canvas = Canvas(_WIDTH, floor + _FOOT, label=label)
    half = (_WIDTH - _VALUES - _NAMES) / 2
    zero = _NAMES + half
    for size in round_steps(100 * reach, count=2):
        for sign in (-1, 1) if size else (1,):
            x = zero + sign * half * size / 100 / reach
            canvas.line(x, _HEAD - 4, x2=x, y2=floor, css="rule" if size else "axis")
            label = points(sign * size / 100).removesuffix(".0")
            canvas.text(x, floor + 16, content=label, css="small", anchor="middle")
    for row, (group, rate) in enumerate(rates):
        y = _HEAD + row * tall + _THICK / 2
        ends = [zero + half * value / reach for value in (rate.low, rate.value, rate.high)]
        is_clear = rate.low > 0 or rate.high < 0
        css = "muted" if group.is_quiet else "head"
        with canvas.group(title=f"{group.name}: {points(rate.value)} points, {_interval(rate)}"):
            canvas.text(_NAMES - 8, y + 4, content=_clipped_name(group.name), css=css, anchor="end")
            canvas.line(ends[0], y, x2=ends[2], y2=y, css="whisker")
            canvas.circle(ends[1], y, radius=4.5, css="dot" if is_clear else "dot open")
            canvas.text(_WIDTH - 2, y + 4, content=points(rate.value), anchor="end")
    return canvas.inline()


def pass_curves(curves: Sequence[Mapping[int, Estimate]], *, label: str) -> str:
    """pass@k over k, with k on a logarithmic axis."""
    sizes = sorted({k for curve in curves for k in curve})
    canvas = Canvas(_WIDTH, _CURVE_HEIGHT, label=label)
    frame = PlotArea(
        left=44,
        right=_WIDTH - 46,
        top=_HEAD,
        floor=_CURVE_HEIGHT - 46,
        inset=12,
        x_end=math.log(sizes[-1]),
    )
    frame.draw_heights(canvas, [(share, f"{100 * share:.0f} %") for share in _QUARTERS])
    frame.draw_places(canvas, [(math.log(k), str(k)) for k in sizes], label="k")
    ends = []
    for place, curve in enumerate(curves):
        rates = sorted(curve.items())
        dots = [(frame.x(math.log(k)), frame.y(rate.value)) for k, rate in rates]
        upper = [(frame.x(math.log(k)), frame.y(rate.high)) for k, rate in rates]
        lower = [(frame.x(math.log(k)), frame.y(rate.low)) for k, rate in reversed(rates)]
        canvas.path(upper + lower, css=f"{series_class(place)} band", is_closed=True)
        canvas.path(dots, css=f"{series_class(place)} curve")
        for (k, rate), (x, y) in zip(rates, dots, strict=True):
            tooltip = f"pass@{k}: {percent(rate.value)}, {_interval(rate)}"
            canvas.circle(x, y, radius=3.5, css=series_class(place), title=tooltip)
        ends.append((math.log(rates[-1][0]), rates[-1][1].value))
    label_ends(canvas, ends, frame=frame, label=lambda share: f"{100 * share:.1f}")
    return canvas.inline()


def length_histograms(sides: Sequence[Sequence[Answer]], *, label: str) -> list[str]:
    """A histogram of answers by length for each side: right ones upwards, wrong ones downwards.

    Heights are shares of the side's answers; all histograms share their scales.
    """
    longest = max(answer.num_tokens for answers in sides for answer in answers)
    width = max(1, math.ceil((longest + 1) / _BINS))
    shares = [_length_shares(answers, width=width) for answers in sides]
    most = max(share for bins in shares for half in bins for share in half)
    return [_length_histogram(bins, most=most, width=width, label=label) for bins in shares]


def _length_shares(answers: Sequence[Answer], *, width: int) -> tuple[list[float], list[float]]:
    """For each bin the share of right answers, and that of wrong ones."""
    right, wrong = [0.0] * _BINS, [0.0] * _BINS
    for answer in answers:
        half = right if answer.is_correct else wrong
        half[answer.num_tokens // width] += 1 / len(answers)
    return right, wrong


def _length_histogram(
    bins: tuple[list[float], list[float]], *, most: float, width: int, label: str
) -> str:
    middle, floor = _HEAD + _HALF, _HEAD + 2 * _HALF
    canvas = Canvas(_WIDTH, floor + 42, label=label)
    left, right = 44.0, _WIDTH - 12.0
    step = (right - left) / _BINS
    for sign, name, half in ((-1, "right", bins[0]), (1, "wrong", bins[1])):
        for mark in round_steps(100 * most, count=2)[1:]:
            y = middle + sign * _HALF * mark / 100 / most
            canvas.line(left, y, x2=right, y2=y, css="rule")
            canvas.text(left - 6, y + 4, content=f"{short(mark)} %", css="small", anchor="end")
        for place, share in enumerate(half):
            if not share:
                continue
            height = max(_HALF * share / most, 1)
            tokens = f"{place * width:,} to {(place + 1) * width - 1:,} tokens"
            canvas.rect(
                left + place * step + 0.5,
                middle - height if sign < 0 else middle,
                width=step - 1,
                height=height,
                css=name,
                title=f"{percent(share)} of the answers: {name}, {tokens}",
            )
        edge = _HEAD + 8 if sign < 0 else floor - 2
        canvas.text(right, edge, content=name, css="head", anchor="end")
    canvas.line(left, middle, x2=right, y2=middle, css="axis")
    for tokens_mark in round_steps(width * _BINS, count=4):
        x = left + (right - left) * tokens_mark / (width * _BINS)
        canvas.text(x, floor + 16, content=short(tokens_mark), css="small", anchor="middle")
    canvas.text((left + right) / 2, floor + 34, content="tokens", css="small", anchor="middle")
    return canvas.inline()


def _draw_rate(canvas: Canvas, rate: Estimate, *, y: float, height: float, css: str) -> None:
    """A bar, its interval and its value."""
    low, end, high = (_place(share) for share in (rate.low, rate.value, rate.high))
    middle = y + height / 2
    with canvas.group(title=f"{percent(rate.value)}, {_interval(rate)}"):
        canvas.rect(_NAMES, y + 1, width=end - _NAMES, height=height - 2, css=css)
        canvas.line(low, middle, x2=high, y2=middle, css="whisker")
        for x in (low, high):
            canvas.line(x, middle - 3, x2=x, y2=middle + 3, css="whisker")
        canvas.text(_WIDTH - 2, middle + 4, content=percent(rate.value), anchor="end")


def _place(share: float) -> float:
    return _NAMES + (_WIDTH - _VALUES - _NAMES) * share


def _interval(rate: Estimate) -> str:
    return (
        f"95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f}, {rate.num_prompts:,} prompts"
    )


def _clipped_name(name: str) -> str:
    return clipped(name, _NAMES - 8, size=15)  # bold letters are wider
