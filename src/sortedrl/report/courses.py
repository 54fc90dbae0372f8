"""Numbers of runs while they go on, as pages and pictures draw them: places, values and words.

A course has one line for each run, in the order of the runs; a run that has none has an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sortedrl.events import Score, Update
from sortedrl.report.record import HeldOut, Run, number
from sortedrl.report.seeds import Line

By = Literal["answers", "tokens", "seconds"]
"""What a score can be drawn against."""

_PLACES: dict[By, tuple[str, Callable[[HeldOut], float]]] = {
    "answers": ("answers trained on", lambda held_out: held_out.answers),
    "tokens": ("tokens trained on", lambda held_out: held_out.tokens),
    "seconds": ("seconds of training", lambda held_out: held_out.seconds),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One number of every run."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    is_share: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no run has the number."""
        return not any(self.lines)


def scores(runs: Sequence[Run], *, by: By) -> Course:
    """The score on held-out prompts against what it took."""
    x_label, place = _PLACES[by]
    return Course(
        title=f"Right answers to held-out prompts, by {x_label}",
        x_label=x_label,
        y_label="right answers",
        lines=tuple([(place(held_out), held_out.score) for held_out in r.scores] for r in runs),
        is_share=True,
    )


def lengths(runs: Sequence[Run]) -> Course:
    """The mean length of the answers of each update."""
    return Course(
        title="Mean length of the answers of an update",
        x_label="update",
        y_label="tokens",
        lines=tuple(counted(_lengths(run)) for run in runs),
    )


def rewards(runs: Sequence[Run]) -> Course:
    """The mean reward of the answers of each update that got any."""
    return Course(
        title="Mean reward of the answers of an update",
        x_label="update",
        y_label="reward",
        lines=tuple(_over_updates(run, "reward/mean") or counted(_rewards(run)) for run in runs),
    )


def sample_sizes(runs: Sequence[Run]) -> Course:
    """The effective sample size of each update, as a share of what was trained on."""
    return Course(
        title="Effective sample size of an update",
        x_label="update",
        y_label="effective sample size",
        lines=tuple(_over_updates(run, "correction/ess") for run in runs),
        is_share=True,
    )


def entropies(runs: Sequence[Run]) -> Course:
    """The mean entropy of the tokens of each update."""
    return Course(
        title="Mean entropy of a token",
        x_label="update",
        y_label="entropy",
        lines=tuple(_over_updates(run, "entropy/mean") for run in runs),
    )


def counted(values: Sequence[float]) -> Line:
    """The values at 1, 2, 3 and so on."""
    return [(float(place), value) for place, value in enumerate(values, start=1)]


def _over_updates(run: Run, name: str) -> Line:
    """A number of the run's metrics."""
    pairs = [(number(row, "update"), number(row, name)) for row in run.record.rows]
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _lengths(run: Run) -> list[float]:
    return [
        sum(trained.tokens for trained in event.trained) / len(event.trained)
        for event in run.record.events
        if isinstance(event, Update) and event.trained
    ]


def _rewards(run: Run) -> list[float]:
    """From the events, where the run has no metrics."""
    updates = [event.scored for event in run.record.events if isinstance(event, Score)]
    given = [[one.reward for one in scored if one.reward is not None] for scored in updates]
    return [sum(found) / len(found) for found in given if found]
