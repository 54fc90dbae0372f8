"""Pictures of an evaluation: bars with intervals, pass@k curves, lengths of answers.

Each is about as wide as a phone. Series have the classes `series0`, `series1`, ... and are told
apart by their order as well as by their colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.evaluation.statistics import Answer, Estimate
from sortedrl.evaluation.tables import percent, points
from sortedrl.report.charts.axes import Frame, round_steps, short
from sortedrl.report.charts.curves import label_ends
from sortedrl.report.charts.svg import Canvas, clipped, series

_WIDTH = 400
_NAMES, _VALUES = 126, 58
_THIN, _THICK, _AIR = 12, 16, 8
_HEAD, _FOOT = 12, 26
_BINS = 24
_CURVE_HEIGHT = 220
_HALF = 84
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One row of a bar chart: a name and an estimate of each series, where it has one."""

    name: str
    rates: Sequence[Estimate | None]
    is_quiet: bool = False
    """Whether its name is set back, as that of a level below its task."""


def rate_bars(groups: Sequence[Group], *, label: str) -> str:
    """Rates from 0 to 100 % as bars, each with its interval and its value."""
    count = max(len(group.rates) for group in groups)
    pitch = _THICK if count == 1 else _THIN
    tall = count * pitch + _AIR
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
                _draw_rate(canvas, rate, y=top + place * pitch, height=pitch, css=series(place))
    return canvas.inline()


def change_marks(groups: Sequence[Group], *, label: str) -> str:
    """Differences as dots with intervals around a line at 0; filled where 0 lies outside."""
    rates = [(group, rate) for group in groups for rate in group.rates if rate is not None]
    reach = max(0.01, *(max(abs(rate.low), abs(rate.high)) for _, rate in rates))
    tall = _THICK + _AIR
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
    frame = Frame(
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
        canvas.path(upper + lower, css=f"{series(place)} band", is_closed=True)
        canvas.path(dots, css=f"{series(place)} curve")
        for (k, rate), (x, y) in zip(rates, dots, strict=True):
            tooltip = f"pass@{k}: {percent(rate.value)}, {_interval(rate)}"
            canvas.circle(x, y, radius=3.5, css=series(place), title=tooltip)
        ends.append((math.log(rates[-1][0]), rates[-1][1].value))
    label_ends(canvas, ends, frame=frame, label=lambda share: f"{100 * share:.1f}")
    return canvas.inline()


def length_histograms(sides: Sequence[Sequence[Answer]], *, label: str) -> list[str]:
    """For each side its answers by length: right ones upwards, wrong ones downwards.

    Heights are shares of the side's answers; all pictures have the same scales.
    """
    longest = max(answer.num_tokens for answers in sides for answer in answers)
    width = max(1, math.ceil((longest + 1) / _BINS))
    shares = [_length_shares(answers, width=width) for answers in sides]
    most = max(share for bins in shares for half in bins for share in half)
    return [_length_histogram(bins, most=most, width=width, label=label) for bins in shares]


def _length_shares(answers: Sequence[Answer], *, width: int) -> tuple[list[float], list[float]]:
    """For each bin the share of right answers in it, and that of wrong ones."""
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
