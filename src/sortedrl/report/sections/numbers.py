"""The table of the page: the same numbers for every run, from start to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sortedrl.evaluation.tables import percent
from sortedrl.events import Event, HandOver, Landed, Resume, Score, Update
from sortedrl.report.axis import short
from sortedrl.report.html import table, unbroken
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import framed

_ARROW = "\N{RIGHTWARDS ARROW}"
_NONE = "\N{EN DASH}"
_BESIDE = "updates beside the rollouts"
_TIMES = (
    "rollouts",
    "waiting for rewards",
    "updates of the weights",
    "hand-overs",
    "saving checkpoints and logs",
    "everything else",
)


def section(runs: Sequence[Run]) -> str:
    """The numbers of the runs, a column for each."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("schedule", lambda run: run.metrics.schedule),
        ("right answers, before and after", _before_and_after),
        ("best evaluation", _best),
        ("updates", lambda run: f"{run.metrics.run.updates:,}"),
        ("answers trained on", lambda run: f"{run.metrics.run.trajectories:,}"),
        ("tokens decoded", lambda run: f"{run.metrics.run.ledger.decoded:,}"),
        ("tokens trained on", lambda run: f"{run.metrics.run.ledger.trained:,}"),
        ("tokens thrown away", lambda run: f"{run.metrics.run.ledger.discarded:,}"),
        ("bubble", lambda run: percent(run.metrics.run.bubble)),
        ("goodput", lambda run: f"{short(run.metrics.run.goodput)} tokens/s"),
        ("mean length", lambda run: f"{short(run.metrics.run.mean_length)} tokens"),
        ("staleness, mean and most", _staleness),
        ("time of training, all together", lambda run: f"{short(run.metrics.run.seconds)} s"),
    ]
    told = [[name, *(tell(run) for run in runs)] for name, tell in rows]
    spent = [seconds_spent(run) for run in runs]
    told += [
        [name, *(_part(run, times[name]) for run, times in zip(runs, spent, strict=True))]
        for name in _TIMES
    ]
    quiet = {"best evaluation", *_TIMES, _BESIDE}
    if any(_beside(run) for run in runs):
        told.append([_BESIDE, *(_part(run, _beside(run)) for run in runs)])
    numbers = table(
        ["", *(run.name for run in runs)],
        [[row[0], *map(unbroken, row[1:])] for row in told],
        caption="From start to end; evaluations take no time here",
        quiet=[row[0] in quiet for row in told],
    )
    return framed("Numbers", numbers, name="numbers")


def _before_and_after(run: Run) -> str:
    ends = run.scores[:1] + run.scores[1:][-1:]
    return f" {_ARROW} ".join(percent(end.score) for end in ends) or _NONE


def _best(run: Run) -> str:
    if not run.scores:
        return _NONE
    best = max(run.scores, key=lambda held_out: held_out.score)
    return f"{percent(best.score)} after update {best.update:,}"


def _staleness(run: Run) -> str:
    return f"{run.metrics.run.mean_staleness:.2f} and {run.metrics.run.staleness_max}"


def seconds_spent(run: Run) -> dict[str, float]:
    """The seconds of the run by what they were spent on; together they are all of them.

    Updates are timed with the wait for their rewards, which has a row of its own. What follows an
    update before anything else begins is the saving of checkpoints and logs.
    """
    waiting = updating = handing_over = saving = 0.0
    before: Event | None = None
    for event in run.record.events:
        took = 0.0
        if isinstance(event, Score):
            took = event.waited_seconds
            waiting += took
        elif isinstance(event, HandOver):
            took = event.took_seconds
            handing_over += took
        elif isinstance(event, Update):
            took = event.took_seconds
            updating += took
        elif isinstance(event, Landed):
            took = event.waited_seconds
            updating += took
        if isinstance(before, Update | Landed) and not isinstance(event, Resume):
            saving += max(0.0, event.seconds - took - before.seconds)
        before = event
    spent = (
        run.metrics.run.rollout_seconds,
        waiting,
        max(0.0, updating - waiting),
        handing_over,
        saving,
    )
    rest = max(0.0, run.metrics.run.seconds - sum(spent))
    return dict(zip(_TIMES, (*spent, rest), strict=True))


def _beside(run: Run) -> float:
    return sum(e.beside_seconds for e in run.record.events if isinstance(e, Landed))


def _part(run: Run, seconds: float) -> str:
    whole = run.metrics.run.seconds
    return f"{short(seconds)} s, {percent(seconds / whole if whole else 0.0)}"
