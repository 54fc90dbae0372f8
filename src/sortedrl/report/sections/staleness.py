"""The part of the page about staleness: how old the tokens were when they were trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from sortedrl.events import Update
from sortedrl.report.heat import Column, HeatMap, heat_maps
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import figure, framed
from sortedrl.report.sections.remarks import remarks

MAX_COLUMNS = 80
"""Columns of one run; where there are more updates, a column is several neighbours."""


def section(runs: Sequence[Run]) -> str:
    """A heat map of each run that trained on older tokens, and the numbers of every run."""
    told = remarks(((run.name, staleness_words(run)) for run in runs), are_named=len(runs) > 1)
    maps = [
        HeatMap(name=run.name, note=_note(run), columns=columns(run), place=place)
        for place, run in enumerate(runs)
        if run.metrics.run.staleness_max
    ]
    pictures = []
    if maps:
        pictures.append(figure(_caption(runs), heat_maps(maps, title="Staleness by update")))
    return framed("Staleness", told, *pictures, name="staleness")


def staleness_words(run: Run) -> str:
    """The mean and the most, in a sentence."""
    figures = run.metrics.run
    if not figures.trajectories:
        return "nothing was trained on yet."
    if not figures.staleness_max:
        return "every token was trained on by the weights that wrote it."
    return (
        f"tokens are {figures.mean_staleness:.2f} updates old on average when they are trained on, "
        f"{figures.staleness_max:,} at most; the oldest token of an answer "
        f"{figures.mean_trajectory_staleness:.2f} on average."
    )


def _note(run: Run) -> str:
    figures = run.metrics.run
    return f"mean {figures.mean_staleness:.2f}, at most {figures.staleness_max:,}"


def columns(run: Run) -> tuple[Column, ...]:
    """The updates in order, neighbours together where there are many."""
    updates = [event for event in run.record.events if isinstance(event, Update)]
    stride = _stride(len(updates))
    return tuple(
        _column(updates[place : place + stride], first=place + 1)
        for place in range(0, len(updates), stride)
    )


def _column(updates: Sequence[Update], *, first: int) -> Column:
    trained = [answer for update in updates for answer in update.trained]
    counts = Counter(answer.staleness_max for answer in trained)
    tokens = sum(answer.tokens for answer in trained)
    return Column(
        first=first,
        last=first + len(updates) - 1,
        answers=tuple(counts[value] for value in range(max(counts, default=-1) + 1)),
        mean=sum(answer.staleness_sum for answer in trained) / tokens if tokens else 0.0,
    )


def _caption(runs: Sequence[Run]) -> str:
    most = max(_stride(run.metrics.run.updates) for run in runs)
    each = "an update" if most == 1 else f"up to {most:,} updates together"
    return (
        f"Each column is {each}. An answer counts once, at the staleness of its oldest token: the "
        "updates between the weights that wrote that token and those it was trained on. "
        "Dots are the mean over all tokens of the column."
    )


def _stride(count: int) -> int:
    return math.ceil(count / MAX_COLUMNS) or 1
