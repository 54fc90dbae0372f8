"""Pictures of runs for docs and papers: slots, bubble, learning, rewards, lengths, Pareto.

Each is an SVG that stands alone. Runs that differ only in the seed are one line with a band.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sortedrl.errors import ConfigError
from sortedrl.evaluation.tables import percent
from sortedrl.events import Score, Update
from sortedrl.report.curves import curves_svg
from sortedrl.report.pareto import Point, pareto
from sortedrl.report.record import HeldOut, Run, number
from sortedrl.report.seeds import Line, seed_groups, seed_series
from sortedrl.report.svg import Scheme
from sortedrl.report.timeline import timelines

By = Literal["answers", "tokens", "seconds"]
Per = Literal["round", "group"]

_PLACES: dict[By, tuple[str, Callable[[HeldOut], float]]] = {
    "answers": ("answers trained on", lambda score: score.answers),
    "tokens": ("tokens trained on", lambda score: score.tokens),
    "seconds": ("seconds of training", lambda score: score.seconds),
}
"""What a score can be drawn against."""


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
    return _curves(
        runs,
        [_counted(line) for line in lines],
        look=look,
        title=f"Bubble of every {per}: the idle share of the slots",
        x_label=per,
        y_label="bubble",
        is_share=True,
    )


def learning_picture(runs: Sequence[Run], look: Look, *, by: By = "answers") -> str:
    """The score on held-out prompts against what it took."""
    if not any(run.scores for run in runs):
        raise ConfigError(
            "a picture of learning needs a run with held-out scores, but none of these has any; "
            "train with [evaluation] tasks, or draw rewards, lengths or bubble"
        )
    x_label, place = _PLACES[by]
    return _curves(
        runs,
        [[(place(score), score.score) for score in run.scores] for run in runs],
        look=look,
        title=f"Right answers to held-out prompts, by {x_label}",
        x_label=x_label,
        y_label="right answers",
        is_share=True,
    )


def rewards_picture(runs: Sequence[Run], look: Look) -> str:
    """The mean reward of the answers of each update."""
    lines = [_rewards(run) for run in runs]
    if not any(lines):
        raise ConfigError(
            "a picture of rewards needs a run with rewards, but none of these has any; "
            "simulated runs have none: draw lengths or bubble"
        )
    title = "Mean reward of the answers of an update"
    return _curves(runs, lines, look=look, title=title, x_label="update", y_label="reward")


def lengths_picture(runs: Sequence[Run], look: Look) -> str:
    """The mean length of the answers of each update."""
    lines = [
        _counted(
            [
                sum(trained.tokens for trained in event.trained) / len(event.trained)
                for event in run.record.events
                if isinstance(event, Update) and event.trained
            ]
        )
        for run in runs
    ]
    title = "Mean length of the answers of an update"
    return _curves(runs, lines, look=look, title=title, x_label="update", y_label="tokens")


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


def _curves(
    runs: Sequence[Run],
    lines: Sequence[Line],
    *,
    look: Look,
    title: str,
    x_label: str,
    y_label: str,
    is_share: bool = False,
) -> str:
    drawn = seed_series(seed_groups([run.record for run in runs]), lines)
    told = [
        replace(line, note=f"{line.note}, band: least to most") if line.band else line
        for line in drawn
    ]
    return curves_svg(
        told,
        x_label=x_label,
        y_label=y_label,
        title=look.title or title,
        is_share=is_share,
        scheme=look.scheme,
    )


def _counted(values: Sequence[float]) -> Line:
    """The values at 1, 2, 3 and so on."""
    return [(float(place), value) for place, value in enumerate(values, start=1)]


def _rewards(run: Run) -> Line:
    """Means from the run's own numbers, or from its events where those are missing."""
    pairs = [(number(row, "update"), number(row, "reward/mean")) for row in run.record.rows]
    told = [(x, y) for x, y in pairs if x is not None and y is not None]
    if told:
        return told
    scores = [event.scored for event in run.record.events if isinstance(event, Score)]
    given = [[part.reward for part in scored if part.reward is not None] for scored in scores]
    return _counted([sum(rewards) / len(rewards) for rewards in given if rewards])


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
