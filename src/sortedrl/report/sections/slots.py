"""The slot timeline of a page: every stretch of writing as a bar, drawn and zoomed by slots.js.

The bars travel as columns of whole numbers. Times are ticks since the run's start, so rounded that
bars which do not overlap still do not; tokens, versions and counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from sortedrl.evaluation.tables import percent
from sortedrl.events import Load
from sortedrl.report.html import escape
from sortedrl.report.lanes import Bar
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import framed, paragraph
from sortedrl.report.timeline import timelines_inline
from sortedrl.types import Key

BANDS = ("rollout", "update", "hand_over")
"""The kinds of bands, in the order of their numbers in the columns."""
FALLBACK_BARS = 1000
"""Bars up to which a reader without scripts gets a picture; of more, it would weigh too much."""
TICKS = 5_000_000
"""Ticks that a run has at least."""


def section(runs: Sequence[Run]) -> str:
    """The place for the timeline; nothing if no slot ever wrote."""
    bars = sum(len(lane) for run in runs for lane in run.lanes.lanes)
    if not bars:
        return ""
    words = (
        "Every bar is a stretch of writing: one answer in one slot, until it was complete or "
        "interrupted. Where the warm tint shows, a slot stood empty while others wrote."
    )
    return framed(
        "Slots",
        paragraph(words + (" All runs share one time axis and start together." * (len(runs) > 1))),
        '<div class="slots-box"></div>',
        f"<noscript>{_fallback(runs, bars=bars)}</noscript>",
        name="slots",
    )


def data(runs: Sequence[Run]) -> object:
    """What slots.js draws."""
    return {"runs": [_packed(run) for run in runs]}


def _told(run: Run) -> str:
    """What stands beside a run's name."""
    slots = f"{run.lanes.slots:,} slots" if run.lanes.slots > 1 else "1 slot"
    return f"{run.metrics.schedule}, {slots}, bubble {percent(run.metrics.run.bubble)}"


def _fallback(runs: Sequence[Run], *, bars: int) -> str:
    if bars > FALLBACK_BARS:
        return paragraph(
            "This picture needs JavaScript, which is off here. sortedrl plot draws it as a file."
        )
    picture = timelines_inline([(run.name, _told(run), run.lanes) for run in runs])
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
        "told": _told(run),
        "slots": lanes.slots,
        "tick": tick,
        "ticks": _ticks(lanes.end - lanes.start, tick),
        "answers": _answers(run, keys),
        "bars": _bars(run, keys, tick=tick),
        "bands": {
            "kind": [BANDS.index(band.kind) for band, _ in bands],
            "start": _steps(start for _, start in bands),
            "width": [_ticks(band.end - lanes.start, tick) - start for band, start in bands],
        },
        "loads": {
            "start": _steps(_ticks(load.seconds - lanes.start, tick) for load in loads),
            "group": _steps(load.group for load in loads),
        },
    }


def _answers(run: Run, keys: Sequence[Key]) -> dict[str, object]:
    """One row for each trajectory: what is the same in all of its bars."""
    group: dict[Key, int] = {}
    length: dict[Key, int | None] = {}
    for lane in run.lanes.lanes:
        for bar in lane:
            group[bar.prompt, bar.sample] = bar.group
            length[bar.prompt, bar.sample] = bar.length
    trained_at = {key: version for key, version, _ in run.metrics.trained_lengths}
    rewards = [run.rewards.get(key) for key in keys]
    return {
        "prompt": _steps(prompt for prompt, _ in keys),
        "sample": [sample for _, sample in keys],
        "group": _steps(group[key] for key in keys),
        "length": [length[key] for key in keys],
        "trained_at": [trained_at.get(key) for key in keys],
        "reward": [_short(reward) for reward in rewards] if run.rewards else None,
    }


def _bars(run: Run, keys: Sequence[Key], *, tick: float) -> dict[str, object]:
    """One row for each bar, slot after slot; `gap` is the time since the bar before it."""
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
        "answer": _steps(place[bar.prompt, bar.sample] for bar in bars),
        "gap": gaps,
        "width": widths,
        "kept": [bar.kept for bar in bars],
        "decoded": [bar.decoded for bar in bars],
        "discarded": [bar.discarded for bar in bars],
        "version": _steps(bar.version for bar in bars),
        "finished": [int(bar.is_finished) for bar in bars],
    }


def tick_seconds(seconds: float) -> float:
    """The largest power of ten that gives a run its ticks; at most a second, at least a nanosecond.

    >>> tick_seconds(58.1), tick_seconds(26_007.0)
    (1e-05, 0.001)
    """
    power = math.floor(math.log10(seconds / TICKS)) if seconds > 0 else -9
    return float(f"1e{min(0, max(-9, power))}")


def _ticks(seconds: float, tick: float) -> int:
    return round(seconds / tick)


def _steps(values: Iterable[int]) -> list[int]:
    """The first value, then how each differs from the one before it: small numbers pack well."""
    row = list(values)
    return row[:1] + [after - before for before, after in pairwise(row)]


def _short(reward: float | None) -> float | None:
    """A reward as the reader sees it: four digits; JSON has no word for what is not finite."""
    return None if reward is None or not math.isfinite(reward) else float(f"{reward:.4g}")
