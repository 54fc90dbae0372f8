"""Slot timelines of runs above each other on one time axis.

Blue is decoding, darker for longer answers; the warm tint is a slot that is idle while others
decode; grey is an update. A shorter run is a shorter picture. Runs with too many bars are drawn as
shares of the slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sortedrl.report.charts.svg import SHADES, Canvas, Scheme, round_marks, short, text_width
from sortedrl.report.lanes import Bar, Lanes

Panel = tuple[str, str, Lanes]
"""Title, subtitle, lanes."""

MAX_SLOTS = 64
"""Up to this many slots, each has its own lane."""
MAX_BARS = 6000
"""Up to this many bars in all panels together, each is drawn."""

_WIDTH = 860
_LEFT, _RIGHT = 34, 24
_HEAD, _GAP, _FOOT = 30, 18, 74
_SHARES_HEIGHT = 120

DISCARDED = "discarded"
"""The layer of tokens discarded later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Maps seconds to pixels, and lengths to shades.

    Five percent of the answers may be shorter than `shortest`, and as many longer than `longest`,
    so that outliers do not use up the shades.
    """

    origin: float
    """The second of the run at the left edge."""
    end: float
    is_window: bool
    """Whether only a window of the runs is drawn, so that their lengths are not compared."""
    first_title: str
    first_end: float
    shortest: int
    longest: int

    def x(self, seconds: float) -> float:
        """The x position of a second."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.end

    def shade(self, bar: Bar) -> str:
        """The class of a bar: even steps of the log of the answer's length."""
        span = math.log(self.longest / self.shortest) or 1.0
        share = math.log(max(_length(bar), 1) / self.shortest) / span
        return f"shade{min(SHADES - 1, max(0, int(share * SHADES)))}"


def timelines(
    panels: Sequence[Panel],
    *,
    title: str = "",
    scheme: Scheme | None = "auto",
    window: tuple[float, float] | None = None,
) -> str:
    """The panels as one picture 860 pixels wide, or only a window of seconds.

    Without a scheme it is inline SVG for a page, otherwise the content of a file.
    """
    if not panels:
        raise ValueError("a timeline needs at least one panel, got none")
    if window is not None:
        panels = [(name, subtitle, _between(lanes, *window)) for name, subtitle, lanes in panels]
    bars = [bar for _, _, lanes in panels for bar in lanes.bars]
    lengths = sorted(max(_length(bar), 1) for bar in bars) or [1]
    scale = _Scale(
        origin=window[0] if window else 0.0,
        end=window[1] - window[0]
        if window
        else max(lanes.end - lanes.start for _, _, lanes in panels) or 1.0,
        is_window=window is not None,
        first_title=panels[0][0],
        first_end=panels[0][2].end - panels[0][2].start or 1.0,
        shortest=lengths[len(lengths) // 20],
        longest=lengths[-1 - len(lengths) // 20],
    )
    as_shares = len(bars) > MAX_BARS or any(lanes.slots > MAX_SLOTS for _, _, lanes in panels)
    heights = [_SHARES_HEIGHT if as_shares else _pitch(lanes) * lanes.slots for *_, lanes in panels]
    top = 38.0 if title else 8.0
    total = top + sum(heights) + len(panels) * (_HEAD + _GAP) - _GAP + _FOOT
    label = "Slot timelines: " + "; ".join(f"{name}, {subtitle}" for name, subtitle, _ in panels)
    canvas = Canvas(_WIDTH, total, label=f"{title}. {label}" if title else label)
    if title:
        canvas.text(_LEFT, 27, content=title, css="title")
    for panel, height in zip(panels, heights, strict=True):
        top += _HEAD
        _draw_panel(canvas, panel, top=top, height=height, scale=scale, as_shares=as_shares)
        top += height + _GAP
    _draw_axis(canvas, top - _GAP, scale=scale)
    _draw_legend(
        canvas,
        top - _GAP + 54,
        scale=scale,
        has_discarded=any(bar.discarded for bar in bars),
        has_weight_sync=any(
            band.kind == "weight_sync" for *_, lanes in panels for band in lanes.bands
        ),
    )
    return canvas.inline() if scheme is None else canvas.svg(scheme=scheme)


def _draw_panel(
    canvas: Canvas, panel: Panel, *, top: float, height: float, scale: _Scale, as_shares: bool
) -> None:
    title, subtitle, lanes = panel
    canvas.text(_LEFT, top - 9, content=title, css="title", tail=subtitle)
    side = f"{lanes.slots} slots" if lanes.slots > 1 else "1 slot"
    middle = top + height / 2
    canvas.text(_LEFT - 8, middle, content=side, css="small", anchor="middle", is_upright=True)
    for band in lanes.bands:
        if band.kind == "rollout":
            x, width = _span(lanes, band.start, band.end, scale=scale)
            canvas.rect(x, top, width=width, height=height, css="idle")
    if as_shares:
        _draw_shares(canvas, lanes, top=top, height=height, scale=scale)
    else:
        _draw_lanes(canvas, lanes, top=top, scale=scale)
    for band in lanes.bands:
        if band.kind != "rollout":
            x, width = _span(lanes, band.start, band.end, scale=scale)
            seconds = f"{band.kind.replace('_', ' ')}, {short(band.end - band.start)} s"
            canvas.rect(x, top, width=width, height=height, css="update", title=seconds)
    _draw_end(canvas, lanes, middle=middle, scale=scale)


def _draw_lanes(canvas: Canvas, lanes: Lanes, *, top: float, scale: _Scale) -> None:
    pitch = _pitch(lanes)
    gap = 1.0 if pitch >= 6 else 0.4
    for slot, lane in enumerate(lanes.lanes):
        y, height = top + slot * pitch + gap / 2, pitch - gap
        for bar in lane:
            x, width = _span(lanes, bar.start, bar.end, scale=scale)
            # the thin gap between one answer and the next
            width = max(width - 0.7, 0.4 * width)
            trained = width * (1 - bar.discarded / bar.decoded) if bar.discarded else width
            with canvas.group(title=_tooltip(bar)):
                if trained > 0:
                    css = scale.shade(bar)
                    canvas.rect(x, y, width=trained, height=height, css=css)
                if trained < width:
                    canvas.rect(x + trained, y, width=width - trained, height=height, css="hatched")


def _draw_shares(canvas: Canvas, lanes: Lanes, *, top: float, height: float, scale: _Scale) -> None:
    """Stacked layers, the longest answers at the bottom."""
    columns = max(1, int(2 * (scale.x(lanes.end - lanes.start) - _LEFT)))
    names = [f"shade{step}" for step in reversed(range(SHADES))]
    shares = density(lanes, columns=columns, names=names, layer=scale.shade)
    xs = [scale.x(edge - lanes.start) for edge in shares.edges]
    heights = [0.0] * columns
    ceilings: list[tuple[str, list[float]]] = []
    for name in (*names, DISCARDED):
        heights = [low + share for low, share in zip(heights, shares.layers[name], strict=True)]
        ceilings.append((name, heights))
    # each layer reaches down to the floor, so that no hairline shows between two of them
    for name, ceiling in reversed(ceilings):
        if not any(shares.layers[name]):
            continue
        outline = _outline(xs, ceiling, top=top, height=height)
        outline += [(xs[-1], top + height), (xs[0], top + height)]
        canvas.path(outline, css="hatch" if name == DISCARDED else name, is_closed=True)


def _outline(
    xs: Sequence[float], shares: Sequence[float], *, top: float, height: float
) -> list[tuple[float, float]]:
    """The upper edge of a layer as steps, left to right, equal neighbours joined."""
    points: list[tuple[float, float]] = []
    for (left, right), share in zip(pairwise(xs), shares, strict=True):
        y = round(top + height * (1 - share), 1)
        if points and points[-1][1] == y:
            points[-1] = (right, y)
        else:
            points += [(left, y), (right, y)]
    return points


def _draw_end(canvas: Canvas, lanes: Lanes, *, middle: float, scale: _Scale) -> None:
    """Where a run ends early, its time, compared with the first run."""
    seconds = lanes.end - lanes.start
    start, end = scale.x(seconds), scale.x(scale.end)
    done = f"done after {short(scale.origin + seconds)} s"
    choices = [done]
    if seconds != scale.first_end and not scale.is_window:
        change = seconds / scale.first_end - 1
        compared = f"{100 * abs(change):.0f} % {'less' if change < 0 else 'more'} time"
        choices = [f"{done}, {compared} than {scale.first_title}", f"{done}, {compared}", compared]
    text = next((text for text in choices if text_width(text) + 20 <= end - start), None)
    if text is None:
        return
    canvas.line(start + 8, middle, x2=end, y2=middle, css="guide")
    canvas.line(end, middle - 5, x2=end, y2=middle + 5, css="rule")
    canvas.text((start + end) / 2, middle - 8, content=text, anchor="middle")


def _draw_axis(canvas: Canvas, y: float, *, scale: _Scale) -> None:
    canvas.line(_LEFT, y + 5, x2=_WIDTH - _RIGHT, y2=y + 5, css="rule")
    for place, seconds in enumerate(round_marks(scale.origin, scale.origin + scale.end, count=8)):
        x = scale.x(seconds - scale.origin)
        canvas.line(x, y + 5, x2=x, y2=y + 9, css="rule")
        unit = "" if place else " s"
        canvas.text(x, y + 22, content=short(seconds) + unit, css="small", anchor="middle")


def _draw_legend(
    canvas: Canvas, y: float, *, scale: _Scale, has_discarded: bool, has_weight_sync: bool
) -> None:
    x = float(_LEFT)
    text = f"generating an answer of {scale.shortest:,}"
    canvas.text(x, y, content=text, css="muted")
    x += text_width(text) + 8
    for step in range(SHADES):
        canvas.rect(x + 16 * step, y - 9, width=15, height=10, css=f"shade{step}")
    x += 16 * SHADES + 6
    text = f"{scale.longest:,} tokens"
    canvas.text(x, y, content=text, css="muted")
    x += text_width(text) + 18
    entries = [("idle", "idle slot")]
    if has_discarded:
        entries.append(("hatched", "discarded later"))
    entries.append(("update", "update and weight sync" if has_weight_sync else "update"))
    for css, text in entries:
        canvas.rect(x, y - 9, width=15, height=10, css=css)
        canvas.text(x + 21, y, content=text, css="muted")
        x += 21 + text_width(text) + 18


def _pitch(lanes: Lanes) -> float:
    """The height of a lane: tall for few slots, at most 256 pixels for all."""
    return min(13.0, 256 / lanes.slots)


def _span(lanes: Lanes, start: float, end: float, *, scale: _Scale) -> tuple[float, float]:
    x = scale.x(start - lanes.start)
    return x, scale.x(end - lanes.start) - x


def _length(bar: Bar) -> int:
    return bar.kept + bar.decoded if bar.length is None else bar.length


def _tooltip(bar: Bar) -> str:
    name = f"prompt {bar.prompt}" + (f", answer {bar.sample}" if bar.sample else "")
    text = f"{name}, group {bar.group}: {bar.decoded} tokens"
    if bar.kept:
        text += f" after {bar.kept} kept ones"
    if bar.discarded:
        text += f", {bar.discarded} discarded later"
    return f"{text}, {'complete' if bar.is_finished else 'interrupted'}"


def _between(run: Lanes, first: float, last: float) -> Lanes:
    """The lanes of a run between two of its seconds."""
    start, end = run.start + first, min(run.end, run.start + last)
    return replace(
        run,
        start=start,
        end=max(start, end),
        lanes=tuple(
            tuple(_part(bar, start, end) for bar in lane if bar.start < end and bar.end > start)
            for lane in run.lanes
        ),
        bands=tuple(
            replace(band, start=max(band.start, start), end=min(band.end, end))
            for band in run.bands
            if band.start < end and band.end > start
        ),
    )


def _part(bar: Bar, start: float, end: float) -> Bar:
    """The part of a bar between two seconds, with the tokens decoded in it."""
    if start <= bar.start and bar.end <= end:
        return bar
    left, right = max(bar.start, start), min(bar.end, end)
    rate = bar.decoded / (bar.end - bar.start)
    decoded = round(rate * (right - left))
    discarded = round(rate * max(0.0, right - max(left, bar.discarded_from)))
    return replace(
        bar,
        start=left,
        end=right,
        decoded=decoded,
        discarded=min(discarded, decoded),
        is_finished=bar.is_finished and bar.end <= end,
        length=_length(bar),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """Shares of the slots: one row per layer, one value per column."""

    edges: tuple[float, ...]
    """The boundaries of the columns in seconds."""
    layers: dict[str, tuple[float, ...]]


def density(
    lanes: Lanes, *, columns: int, names: Sequence[str], layer: Callable[[Bar], str]
) -> Density:
    """The shares of the layers `names` and `DISCARDED`; `layer` maps a bar to its layer."""
    width = (lanes.end - lanes.start) / columns or 1.0
    rollout = [0.0] * columns
    busy = {name: [0.0] * columns for name in (*names, DISCARDED)}
    for band in lanes.bands:
        if band.kind == "rollout":
            _spread(rollout, band.start - lanes.start, band.end - lanes.start, width=width)
    for bar in lanes.bars:
        start, end = bar.start - lanes.start, bar.end - lanes.start
        middle = bar.discarded_from - lanes.start
        _spread(busy[layer(bar)], start, middle, width=width)
        _spread(busy[DISCARDED], middle, end, width=width)
    return Density(
        edges=tuple(lanes.start + index * width for index in range(columns + 1)),
        layers={
            name: tuple(
                seconds / (lanes.slots * whole) if whole else 0.0
                for seconds, whole in zip(row, rollout, strict=True)
            )
            for name, row in busy.items()
        },
    )


def _spread(row: list[float], start: float, end: float, *, width: float) -> None:
    """Distribute the seconds from `start` to `end` over the columns."""
    first, last = int(start / width), min(int(end / width), len(row) - 1)
    for column in range(first, last + 1):
        overlap = min(end, (column + 1) * width) - max(start, column * width)
        row[column] += max(0.0, overlap)
