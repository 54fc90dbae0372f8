"""Pictures of runs for docs and papers: slots, bubble, learning, rewards, lengths, Pareto.

Each is an SVG that stands alone. Runs that differ only in the seed are one line with a band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sortedrl.errors import ConfigError
from sortedrl.evaluation.tables import percent
from sortedrl.events import Update
from sortedrl.report.courses import By, Course, counted, lengths, rewards, scores
from sortedrl.report.curves import curves_svg
from sortedrl.report.pareto import Point, pareto
from sortedrl.report.record import Run
from sortedrl.report.seeds import seed_groups, seed_series
from sortedrl.report.svg import Scheme
from sortedrl.report.timeline import timelines

Per = Literal["round", "group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What all pictures can be told."""

    title: str = ""
    """In place of the picture's own title."""
    scheme: Scheme = "auto"


def slots_picture(
    runs: Sequence[Run],
    look: Look,
    *,
    seconds: tuple[float, float] | None = None,
    groups: int | None = None,
) -> str:
    """What every slot did: in whole runs, between two seconds, or until so many groups are done."""
    window = seconds
    if groups is not None:
        window = (0.0, max(_closing_second(run, groups) for run in runs))
    longest = max(run.lanes.end - run.lanes.start for run in runs)
    if window is not None and window[0] >= longest:
        raise ConfigError(
            f"the seconds to draw must begin before the runs end, after {longest:.1f} s, "
            f"got {window[0]}; choose earlier ones"
        )
    part = "" if window is None else " in the whole run"
    panels = [
        (
            run.name,
            f"{run.metrics.schedule}, bubble {percent(run.metrics.run.bubble)}{part}",
            run.lanes,
        )
        for run in runs
    ]
    return timelines(panels, title=look.title, scheme=look.scheme, window=window)


def bubble_picture(runs: Sequence[Run], look: Look, *, per: Per = "round") -> str:
    """The idle share of the slots, round by round or group by group."""
    if per == "round":
        lines = [[figures.bubble for figures in run.metrics.rounds] for run in runs]
    else:
        lines = [[group.figures.bubble for group in run.metrics.groups] for run in runs]
    course = Course(
        title=f"Bubble of every {per}: the idle share of the slots",
        x_label=per,
        y_label="bubble",
        lines=tuple(map(counted, lines)),
        is_share=True,
    )
    return _curves(runs, course, look=look)


def learning_picture(runs: Sequence[Run], look: Look, *, by: By = "answers") -> str:
    """The score on held-out prompts against what it took."""
    course = scores(runs, by=by)
    if course.is_empty:
        raise ConfigError(
            "a picture of learning needs a run with held-out scores, but none of these has any; "
            "train with [evaluation] tasks, or draw rewards, lengths or bubble"
        )
    return _curves(runs, course, look=look)


def rewards_picture(runs: Sequence[Run], look: Look) -> str:
    """The mean reward of the answers of each update."""
    course = rewards(runs)
    if course.is_empty:
        raise ConfigError(
            "a picture of rewards needs a run with rewards, but none of these has any; "
            "simulated runs have none: draw lengths or bubble"
        )
    return _curves(runs, course, look=look)


def lengths_picture(runs: Sequence[Run], look: Look) -> str:
    """The mean length of the answers of each update."""
    return _curves(runs, lengths(runs), look=look)


def pareto_picture(runs: Sequence[Run], look: Look) -> str:
    """What runs cost and give: seconds and score; staleness and speed where scores are missing."""
    if all(run.scores for run in runs):
        values = [(run.metrics.run.seconds, 100 * run.scores[-1].score) for run in runs]
        x_label, y_label = "seconds of training", "right answers at the end, %"
    else:
        figures = [run.metrics.run for run in runs]
        values = [(part.mean_staleness, part.trained_per_second) for part in figures]
        x_label, y_label = "mean staleness, versions", "trained tokens per second"
    points = [
        Point(x=x, y=y, label=_described(run), on_front=not _is_beaten((x, y), values))
        for run, (x, y) in zip(runs, values, strict=True)
    ]
    return pareto(
        points,
        x_label=x_label,
        y_label=y_label,
        title=look.title or f"{len(runs)} runs: {y_label.partition(',')[0]} against {x_label}",
        scheme=look.scheme,
        names_all=True,
        is_cropped=True,
    )


def _curves(runs: Sequence[Run], course: Course, *, look: Look) -> str:
    drawn = seed_series(seed_groups([run.record for run in runs]), course.lines)
    told = [
        replace(line, note=f"{line.note}, band: least to most") if line.band else line
        for line in drawn
    ]
    return curves_svg(
        told,
        x_label=course.x_label,
        y_label=course.y_label,
        title=look.title or course.title,
        is_share=course.is_share,
        scheme=look.scheme,
    )


def _closing_second(run: Run, groups: int) -> float:
    """The second in which so many groups were trained on; the last one if there are fewer."""
    closed = 0
    for event in run.record.events:
        if isinstance(event, Update):
            closed += len(event.closed)
            if closed >= groups:
                return event.seconds - run.lanes.start
    return run.lanes.end - run.lanes.start


def _described(run: Run) -> str:
    schedule = run.metrics.schedule
    return run.name if schedule in run.name else f"{run.name}: {schedule}"


def _is_beaten(point: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Whether another costs no more and gives no less, and is better in one of the two."""
    return any(x <= point[0] and y >= point[1] and (x, y) != point for x, y in others)
