"""The table of the page: the same numbers for every run, from start to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sortedrl.evaluation.tables import percent
from sortedrl.events import HandOver, Landed, Score, Update
from sortedrl.report.axis import short
from sortedrl.report.html import table, unbroken
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import framed

_ARROW = "\N{RIGHTWARDS ARROW}"
_NONE = "\N{EN DASH}"
_BESIDE = "updates beside the rollouts"


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
        ("rollouts", lambda run: _part(run, run.metrics.run.rollout_seconds)),
        ("waiting for rewards", lambda run: _part(run, _waiting(run))),
        ("updates of the weights", lambda run: _part(run, _updating(run))),
        ("hand-overs", lambda run: _part(run, _handing_over(run))),
    ]
    quiet = {"best evaluation", *(name for name, _ in rows[-4:]), _BESIDE}
    if any(_beside(run) for run in runs):
        rows.append((_BESIDE, lambda run: _part(run, _beside(run))))
    told = table(
        ["", *(run.name for run in runs)],
        [[name, *(unbroken(tell(run)) for run in runs)] for name, tell in rows],
        caption="From start to end; evaluations take no time here",
        quiet=[name in quiet for name, _ in rows],
    )
    return framed("Numbers", told, name="numbers")


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


def _waiting(run: Run) -> float:
    return sum(e.waited_seconds for e in run.record.events if isinstance(e, Score))


def _updating(run: Run) -> float:
    """Updates are timed with the wait for their rewards, which is told apart here."""
    events = run.record.events
    took = sum(e.took_seconds for e in events if isinstance(e, Update))
    took += sum(e.waited_seconds for e in events if isinstance(e, Landed))
    return max(0.0, took - _waiting(run))


def _beside(run: Run) -> float:
    return sum(e.beside_seconds for e in run.record.events if isinstance(e, Landed))


def _handing_over(run: Run) -> float:
    return sum(e.took_seconds for e in run.record.events if isinstance(e, HandOver))


def _part(run: Run, seconds: float) -> str:
    whole = run.metrics.run.seconds
    return f"{short(seconds)} s, {percent(seconds / whole if whole else 0.0)}"
