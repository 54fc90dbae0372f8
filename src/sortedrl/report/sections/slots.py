"""Slot timeline, and the bubble by round and by group.

The timeline is drawn and zoomed by slots.js, one bar per slot interval. Bars are columns of
integers: times are ticks since the start of the run, rounded so that bars which do not overlap
still do not; tokens, versions and counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sortedrl.core.events import Harvest, Load, Start, SyncWeights, Update
from sortedrl.core.meter import Figures
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.svg import (
    FOOT,
    HEADING,
    NARROW,
    WIDTH,
    Canvas,
    PlotArea,
    each_column,
    neighbours,
    round_steps,
    series_class,
    short,
    span_of,
    stride,
)
from sortedrl.report.charts.timeline import timelines
from sortedrl.report.html import escape, figure, paragraph, remarks, section
from sortedrl.report.lanes import Bar
from sortedrl.report.record import Run
from sortedrl.types import Key

BANDS = ("rollout", "update", "weight_sync")
"""The kinds of bands, in the order of their numbers in the columns."""
FALLBACK_BARS = 1000
"""Up to this many bars there is a static picture for readers without JavaScript."""
TICKS = 5_000_000
"""Minimum number of ticks in a run."""

MAX_COLUMNS = 240
"""Columns per run; beyond this, a column combines neighbouring rounds or groups."""
_MOSTLY = 0.5
_EVENLY = 2.0
_HARDLY = 0.0005
_LEFT, _RIGHT = 56, 20
_TALL, _FLAT, _MANY = 96, 60, 4
_BETWEEN = 14
_GAP, _WIDE = 1, 6
_THIN = 0.75


def slots_section(runs: Sequence[Run]) -> str:
    """The container of the timeline; empty if no slot was ever used."""
    bars = sum(len(lane) for run in runs for lane in run.lanes.lanes)
    if not bars:
        return ""
    text = (
        "Every bar is one answer in one slot, from its start until it finished or was interrupted. "
        "The warm tint marks slots that were idle during a rollout."
    )
    return section(
        "Slots",
        paragraph(text + (" All runs share one time axis and start together." * (len(runs) > 1))),
        '<div class="slots-box"></div>',
        f"<noscript>{_fallback(runs, bars=bars)}</noscript>",
        name="slots",
    )


def slots_data(runs: Sequence[Run]) -> object:
    """The data for slots.js."""
    return {"runs": [_packed(run) for run in runs]}


def _subtitle(run: Run) -> str:
    """The text next to a run's name."""
    slots = f"{run.lanes.slots:,} slots" if run.lanes.slots > 1 else "1 slot"
    return f"{run.metrics.schedule}, {slots}, bubble {percent(run.metrics.run.bubble)}"


def _fallback(runs: Sequence[Run], *, bars: int) -> str:
    if bars > FALLBACK_BARS:
        return paragraph(
            "This chart needs JavaScript, which is disabled. "
            "sortedrl plot slots writes it to a file."
        )
    panels = [(run.name, _subtitle(run), run.lanes) for run in runs]
    picture = timelines(panels, scheme=None)
    label = "Slot timelines"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"{picture}</div>"
    )


def _packed(run: Run) -> dict[str, object]:
    lanes = run.lanes
    tick = tick_seconds(lanes.end - lanes.start)
    bands = [(band, _ticks(band.start - lanes.start, tick)) for band in lanes.bands]
    loads = [event for event in run.record.events if isinstance(event, Load)]
    keys = sorted({(bar.prompt, bar.sample) for lane in lanes.lanes for bar in lane})
    return {
        "name": run.name,
        "subtitle": _subtitle(run),
        "slots": lanes.slots,
        "tick": tick,
        "ticks": _ticks(lanes.end - lanes.start, tick),
        "answers": _answers(run, keys),
        "bars": _bars(run, keys, tick=tick),
        "bands": {
            "kind": [BANDS.index(band.kind) for band, _ in bands],
            "start": _deltas(start for _, start in bands),
            "width": [_ticks(band.end - lanes.start, tick) - start for band, start in bands],
        },
        "loads": {
            "start": _deltas(_ticks(load.seconds - lanes.start, tick) for load in loads),
            "group": _deltas(load.group for load in loads),
        },
    }


def _answers(run: Run, keys: Sequence[Key]) -> dict[str, object]:
    """One row per trajectory: values shared by all its bars."""
    group: dict[Key, int] = {}
    length: dict[Key, int | None] = {}
    for lane in run.lanes.lanes:
        for bar in lane:
            group[bar.prompt, bar.sample] = bar.group
            length[bar.prompt, bar.sample] = bar.length
    trained_at = {key: version for key, version, _ in run.metrics.trained_lengths}
    rewards = [run.rewards.get(key) for key in keys]
    return {
        "prompt": _deltas(prompt for prompt, _ in keys),
        "sample": [sample for _, sample in keys],
        "group": _deltas(group[key] for key in keys),
        "length": [length[key] for key in keys],
        "trained_at": [trained_at.get(key) for key in keys],
        "reward": [_short_reward(reward) for reward in rewards] if run.rewards else None,
    }


def _bars(run: Run, keys: Sequence[Key], *, tick: float) -> dict[str, object]:
    """One row per bar, slot by slot; `gap` is the time since the previous bar."""
    origin = run.lanes.start
    place = {key: index for index, key in enumerate(keys)}
    bars: list[Bar] = []
    gaps: list[int] = []
    widths: list[int] = []
    for lane in run.lanes.lanes:
        bars += lane
        before = 0
        for bar in lane:
            start, end = _ticks(bar.start - origin, tick), _ticks(bar.end - origin, tick)
            gaps.append(start - before)
            widths.append(end - start)
            before = end
    return {
        "count": [len(lane) for lane in run.lanes.lanes],
        "answer": _deltas(place[bar.prompt, bar.sample] for bar in bars),
        "gap": gaps,
        "width": widths,
        "kept": [bar.kept for bar in bars],
        "decoded": [bar.decoded for bar in bars],
        "discarded": [bar.discarded for bar in bars],
        "version": _deltas(bar.version for bar in bars),
        "finished": [int(bar.is_finished) for bar in bars],
    }


def tick_seconds(seconds: float) -> float:
    """The largest power of ten that gives a run enough ticks; between a nanosecond and a second.

    >>> tick_seconds(58.1), tick_seconds(26_007.0)
    (1e-05, 0.001)
    """
    power = math.floor(math.log10(seconds / TICKS)) if seconds > 0 else -9
    return float(f"1e{min(0, max(-9, power))}")


def _ticks(seconds: float, tick: float) -> int:
    return round(seconds / tick)


def _deltas(values: Iterable[int]) -> list[int]:
    """The first value, then differences, which compress well."""
    row = list(values)
    return row[:1] + [after - before for before, after in pairwise(row)]


def _short_reward(reward: float | None) -> float | None:
    """A reward to four digits; `None` if JSON cannot represent it."""
    return None if reward is None or not math.isfinite(reward) else float(f"{reward:.4g}")


def bubbles_section(runs: Sequence[Run]) -> str:
    """The bubble of each run by round and by group, with a summary."""
    drawn = []
    if any(run.metrics.run.bubble >= _HARDLY for run in runs):
        most = max(stride(len(run.metrics.rounds), most=MAX_COLUMNS) for run in runs)
        caption = (
            f"Bubble by round. Each column is {each_column('a round', most)}, as wide as the "
            "rollout took, so the coloured area is idle time. The dotted line is the bubble of the "
            "run."
        )
        rounds = [_strip(run, round_columns(run)) for run in runs]
        pictures = (
            strips(
                rounds,
                title="Bubble by round",
                x_label="seconds of rollout",
                has_whole_x=False,
                width=width,
            )
            for width in (WIDTH, NARROW)
        )
        drawn.append(figure(caption, *pictures))
        if any(len(run.metrics.groups) > 1 for run in runs):
            drawn.append(_groups_figure(runs))
    summary = remarks(((run.name, place_of_bubble(run)) for run in runs), are_named=len(runs) > 1)
    return section("Where the bubble is", summary, *drawn, name="bubbles")


def round_columns(run: Run) -> list[StripColumn]:
    """The rounds in order, as wide as their rollouts; neighbours are combined if there are many.

    The mean of the shares, weighted by width, is the bubble of the run.
    """
    columns: list[StripColumn] = []
    numbers = _round_numbers(run)
    now = 0.0
    for first, part in neighbours(run.metrics.rounds, most=MAX_COLUMNS):
        joined = _joined(part)
        end = now + joined.rollout_seconds
        what = span_of("round", numbers[first], numbers[first + len(part) - 1])
        columns.append(
            StripColumn(start=now, end=end, share=joined.bubble, tooltip=_tooltip(what, joined))
        )
        now = end
    return columns


def group_columns(run: Run) -> list[StripColumn]:
    """The groups in order, each from load to close; neighbours are combined if there are many."""
    columns: list[StripColumn] = []
    groups = sorted(run.metrics.groups, key=lambda group: group.group)
    for first, part in neighbours([group.figures for group in groups], most=MAX_COLUMNS):
        start, end = groups[first].group, groups[first + len(part) - 1].group
        joined = _joined(part)
        tooltip = _tooltip(span_of("group", start, end), joined)
        columns.append(
            StripColumn(start=start - 0.4, end=end + 0.4, share=joined.bubble, tooltip=tooltip)
        )
    return columns


def place_of_bubble(run: Run) -> str:
    """How large the bubble is and in which rounds it occurs, in a few sentences."""
    idle = [_idle_slot_seconds(figures) for figures in run.metrics.rounds]
    whole = sum(idle)
    if run.metrics.run.bubble < _HARDLY:
        return "slots were idle for less than 0.05 % of the slot-seconds of the rollouts."
    text = f"bubble {percent(run.metrics.run.bubble)}."
    if len(idle) == 1:
        return f"{text} Only one round so far."
    if run.is_ended and idle[-1] >= _MOSTLY * whole:
        return (
            f"{text} {percent(idle[-1] / whole)} of the idle slot-seconds are in the last of its "
            f"{len(idle):,} rounds, when no prompts are left; this share shrinks in longer runs."
        )
    return f"{text} {_worst(idle)}{_tails(run, idle)}"


def _worst(idle: Sequence[float]) -> str:
    """The share of the idle slot-seconds in the worst tenth of the rounds."""
    count = math.ceil(len(idle) / 10)
    share = sum(sorted(idle)[-count:]) / sum(idle)
    held = f"{percent(share)} of the idle slot-seconds"
    if count == 1:
        text = f"The worst of its {len(idle):,} rounds holds {held}"
    else:
        text = f"The worst tenth of its rounds, {count:,} of {len(idle):,}, holds {held}"
    is_even = share < min(_MOSTLY, _EVENLY * count / len(idle))
    return f"{text}: the bubble is spread over the run." if is_even else f"{text}."


def _tails(run: Run, idle: Sequence[float]) -> str:
    """The share of rounds that end groups; empty if all or none do."""
    closing = closing_rounds(run)
    if not closing or len(closing) == len(idle):
        return ""
    share = sum(idle[place] for place in closing) / sum(idle)
    seconds = [figures.rollout_seconds for figures in run.metrics.rounds]
    time = sum(seconds[place] for place in closing) / sum(seconds)
    text = (
        f" Rounds that end a group, {len(closing):,} of {len(idle):,}, take {percent(time)} of the "
        f"rollout time and hold {percent(share)} of the idle slot-seconds"
    )
    is_tail = share >= _MOSTLY and share > time
    return f"{text}: slots wait for the last answers of a group." if is_tail else f"{text}."


def closing_rounds(run: Run) -> list[int]:
    """Indices of the rounds whose updates closed a group."""
    places = {number: place for place, number in enumerate(_round_numbers(run))}
    updates = (event for event in run.record.events if isinstance(event, Update))
    return sorted({places[event.round] for event in updates if event.closed})


def _round_numbers(run: Run) -> list[int]:
    """The round numbers in the log, in order."""
    events = run.record.events
    named = (e.round for e in events if isinstance(e, SyncWeights | Load | Start | Harvest))
    return list(dict.fromkeys(named))


def _joined(part: Sequence[Figures]) -> Figures:
    """Combine the figures that determine the bubble."""
    return Figures(
        slots=part[0].slots,
        rollout_seconds=sum(figures.rollout_seconds for figures in part),
        busy_slot_seconds=sum(figures.busy_slot_seconds for figures in part),
        trajectories=sum(figures.trajectories for figures in part),
    )


def _idle_slot_seconds(figures: Figures) -> float:
    return figures.bubble * figures.slots * figures.rollout_seconds


def _tooltip(what: str, figures: Figures) -> str:
    return (
        f"{what}: bubble {percent(figures.bubble)} of {short(figures.rollout_seconds)} s, "
        f"{short(_idle_slot_seconds(figures))} slot-seconds idle"
    )


def _strip(run: Run, columns: Sequence[StripColumn]) -> Strip:
    bubble = run.metrics.run.bubble
    note = f"{run.metrics.slots:,} slots, bubble {percent(bubble)}"
    return Strip(name=run.name, note=note, steps=tuple(columns), level=bubble)


def _groups_figure(runs: Sequence[Run]) -> str:
    most = max(stride(len(run.metrics.groups), most=MAX_COLUMNS) for run in runs)
    groups = [_strip(run, group_columns(run)) for run in runs]
    pictures = (
        strips(
            groups,
            title="Bubble by group",
            x_label="group",
            x_start=min(group.group for run in runs for group in run.metrics.groups) - 0.5,
            has_whole_x=True,
            width=width,
        )
        for width in (WIDTH, NARROW)
    )
    caption = (
        f"Bubble by group. Each column is {each_column('a group', most)}, from load to close; "
        "overlapping groups count the same idle slots more than once."
    )
    return figure(caption, *pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class StripColumn:
    """One column: start, end, share, and tooltip."""

    start: float
    end: float
    share: float
    tooltip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The columns of one run in order, and their overall share."""

    name: str
    note: str
    steps: tuple[StripColumn, ...]
    level: float


def strips(
    rows: Sequence[Strip],
    *,
    title: str,
    x_label: str,
    x_start: float = 0.0,
    has_whole_x: bool,
    width: int = WIDTH,
) -> str:
    """The strips above each other as a chart for a page."""
    x_end = max((step.end for row in rows for step in row.steps), default=x_start + 1.0)
    high = _round_up(max((step.share for row in rows for step in row.steps), default=0.0))
    height = _TALL if len(rows) <= _MANY else _FLAT
    pitch = HEADING + height + _BETWEEN
    canvas = Canvas(width, pitch * len(rows) - _BETWEEN + FOOT, label=title)
    frames = [
        PlotArea(
            left=_LEFT,
            right=width - _RIGHT,
            top=pitch * place + HEADING,
            floor=pitch * place + HEADING + height,
            x_start=x_start,
            x_end=x_end if x_end > x_start else x_start + 1.0,
            y_end=high,
        )
        for place in range(len(rows))
    ]
    marks = [(mark, f"{short(100 * mark)} %") for mark in (0.0, high / 2, high)]
    for place, (row, frame) in enumerate(zip(rows, frames, strict=True)):
        frame.draw_name(canvas, row.name, note=row.note, css=series_class(place))
        frame.draw_heights(canvas, marks)
        is_wide = (frame.right - frame.left) / (len(row.steps) or 1) >= _WIDE
        for step in row.steps:
            if step.share:
                left, right = frame.x(step.start), frame.x(step.end)
                tall = max(_THIN, frame.floor - frame.y(step.share))
                canvas.rect(
                    left,
                    frame.floor - tall,
                    width=max(0.0, right - left - _GAP) if is_wide else right - left,
                    height=tall,
                    css=series_class(place),
                    title=step.tooltip,
                )
        if row.steps:
            level, end = frame.y(row.level), frame.x(row.steps[-1].end)
            canvas.line(frame.left, level, x2=end, y2=level, css="guide")
    places = [mark for mark in round_steps(x_end, count=8 * width // WIDTH) if mark >= x_start]
    if has_whole_x:
        places = [mark for mark in places if mark == int(mark)]
    frames[-1].draw_places(canvas, [(mark, short(mark)) for mark in places], label=x_label)
    return canvas.inline()


def _round_up(share: float) -> float:
    """The end of an axis of shares: a round number whose half is round too."""
    return next((end for end in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8) if share <= end), 1.0)
