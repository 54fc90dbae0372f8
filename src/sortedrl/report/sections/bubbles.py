"""The part of the page about the bubble: which rounds and which groups it lies in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sortedrl.evaluation.tables import percent
from sortedrl.events import HandOver, Harvest, Load, Start, Update
from sortedrl.metrics import Figures
from sortedrl.report.axis import short
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import figure, framed
from sortedrl.report.sections.remarks import remarks
from sortedrl.report.steps import Step, Strip, strips

MAX_COLUMNS = 240
"""Columns of one run; where there are more rounds or groups, a column is several neighbours."""

_MOSTLY = 0.5
_EVENLY = 2.0
_HARDLY = 0.0005


def section(runs: Sequence[Run]) -> str:
    """The bubble of each run by round and by group, and in words where it is."""
    drawn = []
    if any(run.metrics.run.bubble >= _HARDLY for run in runs):
        drawn.append(figure(_rounds_caption(runs), _rounds_picture(runs)))
        if any(len(run.metrics.groups) > 1 for run in runs):
            drawn.append(figure(_groups_caption(runs), _groups_picture(runs)))
    told = remarks(((run.name, place_of_bubble(run)) for run in runs), are_named=len(runs) > 1)
    return framed("Where the bubble is", told, *drawn, name="bubbles")


def round_columns(run: Run) -> list[Step]:
    """The rounds in order, as wide as their rollouts took; neighbours together where many.

    The shares, weighted by the widths, have the run's bubble as their mean.
    """
    columns: list[Step] = []
    numbers = _round_numbers(run)
    now = 0.0
    for first, part in _neighbours(run.metrics.rounds):
        joined = _joined(part)
        end = now + joined.rollout_seconds
        what = _counted("round", numbers[first], numbers[first + len(part) - 1])
        columns.append(Step(start=now, end=end, share=joined.bubble, told=_told(what, joined)))
        now = end
    return columns


def group_columns(run: Run) -> list[Step]:
    """The groups by number, each from its load to its close; neighbours together where many."""
    columns: list[Step] = []
    groups = sorted(run.metrics.groups, key=lambda group: group.group)
    for first, part in _neighbours([group.figures for group in groups]):
        start, end = groups[first].group, groups[first + len(part) - 1].group
        joined = _joined(part)
        told = _told(_counted("group", start, end), joined)
        columns.append(Step(start=start - 0.4, end=end + 0.4, share=joined.bubble, told=told))
    return columns


def place_of_bubble(run: Run) -> str:
    """In a few sentences, how large the bubble is and in which rounds it lies."""
    idle = [_idle_slot_seconds(figures) for figures in run.metrics.rounds]
    whole = sum(idle)
    if run.metrics.run.bubble < _HARDLY:
        return "hardly a slot was idle in a rollout, under 0.05 % of the slot-seconds."
    words = f"bubble {percent(run.metrics.run.bubble)}."
    if len(idle) == 1:
        return f"{words} There was one round so far."
    if run.is_ended and idle[-1] >= _MOSTLY * whole:
        return (
            f"{words} {percent(idle[-1] / whole)} of the idle slot-seconds lie in the last of its "
            f"{len(idle):,} rounds, when no prompts are left: a longer run has less of that."
        )
    return f"{words} {_worst(idle)}{_tails(run, idle)}"


def _worst(idle: Sequence[float]) -> str:
    """How much of the idle slot-seconds the worst tenth of the rounds holds."""
    count = math.ceil(len(idle) / 10)
    share = sum(sorted(idle)[-count:]) / sum(idle)
    held = f"{percent(share)} of the idle slot-seconds"
    if count == 1:
        words = f"The worst of its {len(idle):,} rounds holds {held}"
    else:
        words = f"The worst tenth of its rounds, {count:,} of {len(idle):,}, holds {held}"
    is_even = share < min(_MOSTLY, _EVENLY * count / len(idle))
    return f"{words}: the bubble is spread over the run." if is_even else f"{words}."


def _tails(run: Run, idle: Sequence[float]) -> str:
    """What the ends of groups have to do with it; nothing where all rounds or none end one."""
    closing = closing_rounds(run)
    if not closing or len(closing) == len(idle):
        return ""
    share = sum(idle[place] for place in closing) / sum(idle)
    seconds = [figures.rollout_seconds for figures in run.metrics.rounds]
    time = sum(seconds[place] for place in closing) / sum(seconds)
    words = (
        f" Rounds that end a group, {len(closing):,} of {len(idle):,}, take {percent(time)} of the "
        f"rollouts' time and hold {percent(share)} of their idle slot-seconds"
    )
    is_tail = share >= _MOSTLY and share > time
    return f"{words}: slots wait for the last answers of a group." if is_tail else f"{words}."


def closing_rounds(run: Run) -> list[int]:
    """Places among the run's rounds of those whose updates ended a group."""
    places = {number: place for place, number in enumerate(_round_numbers(run))}
    updates = (event for event in run.record.events if isinstance(event, Update))
    return sorted({places[event.round] for event in updates if event.closed})


def _round_numbers(run: Run) -> list[int]:
    """What the log calls the rounds, in order."""
    events = run.record.events
    named = (e.round for e in events if isinstance(e, HandOver | Load | Start | Harvest))
    return list(dict.fromkeys(named))


def _neighbours(figures: Sequence[Figures]) -> list[tuple[int, Sequence[Figures]]]:
    """Runs of neighbours, each with the place of its first, at most `MAX_COLUMNS`."""
    stride = math.ceil(len(figures) / MAX_COLUMNS) or 1
    return [(place, figures[place : place + stride]) for place in range(0, len(figures), stride)]


def _joined(part: Sequence[Figures]) -> Figures:
    """What matters to the bubble, over all of them."""
    return Figures(
        slots=part[0].slots,
        rollout_seconds=sum(figures.rollout_seconds for figures in part),
        busy_slot_seconds=sum(figures.busy_slot_seconds for figures in part),
        trajectories=sum(figures.trajectories for figures in part),
    )


def _idle_slot_seconds(figures: Figures) -> float:
    return figures.bubble * figures.slots * figures.rollout_seconds


def _counted(what: str, first: int, last: int) -> str:
    return f"{what} {first:,}" if first == last else f"{what}s {first:,} to {last:,}"


def _told(what: str, figures: Figures) -> str:
    return (
        f"{what}: bubble {percent(figures.bubble)} of {short(figures.rollout_seconds)} s, "
        f"{short(_idle_slot_seconds(figures))} slot-seconds idle"
    )


def _strip(run: Run, columns: Sequence[Step]) -> Strip:
    bubble = run.metrics.run.bubble
    note = f"{run.metrics.slots:,} slots, bubble {percent(bubble)}"
    return Strip(name=run.name, note=note, steps=tuple(columns), level=bubble)


def _rounds_picture(runs: Sequence[Run]) -> str:
    return strips(
        [_strip(run, round_columns(run)) for run in runs],
        title="Bubble by round",
        x_label="seconds of rollout",
        has_whole_x=False,
    )


def _rounds_caption(runs: Sequence[Run]) -> str:
    most = max(_stride(len(run.metrics.rounds)) for run in runs)
    each = "a round" if most == 1 else f"up to {most:,} rounds together"
    return (
        f"Bubble by round. Each column is {each}, as wide as the rollout took, so the coloured "
        "area is idle time. The dotted line is the bubble of the run."
    )


def _groups_picture(runs: Sequence[Run]) -> str:
    numbers = [group.group for run in runs for group in run.metrics.groups]
    return strips(
        [_strip(run, group_columns(run)) for run in runs],
        title="Bubble by group",
        x_label="group",
        x_start=min(numbers, default=0) - 0.5,
        has_whole_x=True,
    )


def _groups_caption(runs: Sequence[Run]) -> str:
    most = max(_stride(len(run.metrics.groups)) for run in runs)
    each = "a group" if most == 1 else f"up to {most:,} groups together"
    return (
        f"Bubble by group. Each column is {each}, from load to close; groups that overlap count "
        "the same idle slots more than once."
    )


def _stride(count: int) -> int:
    return math.ceil(count / MAX_COLUMNS) or 1
