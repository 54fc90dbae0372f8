"""The page of training runs side by side: words, a table, learning curves, slot timelines.

It is one file that opens from disk, made from the two logs of a run alone (see `events` and
`run_log`); a run that is still going on or was killed shows as far as it came.
The numbers are those of `meter` over the whole log; seconds are seconds of training, in which
evaluations do not count (see `clock`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sortedrl.errors import DataError
from sortedrl.evaluation.tables import percent, points
from sortedrl.events import Begin, End, Event, Update, read_events
from sortedrl.meter import measure
from sortedrl.metrics import Metrics
from sortedrl.report.axis import short
from sortedrl.report.curves import Series, curves
from sortedrl.report.html import asset, escape, page, table
from sortedrl.report.lanes import Lanes, first_seconds, lanes
from sortedrl.report.svg import stylesheet
from sortedrl.report.timeline import timelines
from sortedrl.run_log import Value, read_metrics

SHOWN_GROUPS = 2
"""Groups of prompts whose slots are drawn; a run that is hardly longer is drawn whole."""

_ARROW = "\N{RIGHTWARDS ARROW}"
_NONE = "\N{EN DASH}"
_BY_UPDATE = (
    (
        "length/mean",
        "tokens",
        "length",
        "Where the short answers of a group are trained on first, lengths climb from update to "
        "update until the group is used up.",
    ),
    ("reward/mean", "reward", "reward", "Rewards of sampled answers to training prompts."),
)
"""Numbers of each update: the name in the metrics, the axis, the title's word, the caption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run wrote down; `events` open with `begin`."""

    name: str
    events: Sequence[Event]
    rows: Sequence[Mapping[str, Value]]
    """The rows of its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    """An evaluation: the share of right answers, and where in the run it took place."""

    score: float
    update: int
    answers: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run, measured."""

    record: RunRecord
    metrics: Metrics
    scores: tuple[_Score, ...]

    @property
    def name(self) -> str:
        """What the page calls it."""
        return self.record.name


def read_run(folder: Path, *, name: str | None = None) -> RunRecord:
    """The record of a run in a folder, called like the folder unless told otherwise."""
    log = folder / "events.jsonl"
    if not log.is_file():
        raise DataError(
            folder, "must hold the log of a run, events.jsonl, but does not; give a run's folder"
        )
    events = list(read_events(log))
    if not events or not isinstance(events[0], Begin):
        raise DataError(
            log, "must open with 'begin', but does not; wait for the run's first update"
        )
    rows = folder / "metrics.jsonl"
    return RunRecord(
        name=folder.resolve().name if name is None else name,
        events=events,
        rows=read_metrics(rows) if rows.is_file() else [],
    )


def runs_page(runs: Sequence[RunRecord], *, title: str) -> str:
    """The page of these runs."""
    if not runs:
        raise ValueError("a page of runs needs at least one run, got none")
    measured = [
        _Run(record=run, metrics=measure(run.events), scores=tuple(_scores(run.rows)))
        for run in runs
    ]
    sections = [
        _opening(measured, title=title),
        _numbers(measured),
        _learning(measured),
        _answers(measured),
        _slots(measured),
        _reading(),
    ]
    body = "\n".join(filter(None, sections))
    return page(
        title=title,
        body=f"<main>\n{body}\n</main>",
        style=stylesheet() + asset("evaluation.css") + asset("runs.css"),
        script="",
    )


def _scores(rows: Sequence[Mapping[str, Value]]) -> Iterator[_Score]:
    """The evaluations of a run, each at the place of the last update before it."""
    answers = seconds = 0.0
    for row in rows:
        answers = _number(row, "total/samples") or answers
        seconds = _number(row, "total/seconds") or seconds
        score, update = _number(row, "evaluation/score"), _number(row, "update")
        if score is not None:
            yield _Score(score=score, update=int(update or 0), answers=answers, seconds=seconds)


def _number(row: Mapping[str, Value], name: str) -> float | None:
    """A number of a row, if it is there and finite."""
    value = row.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _opening(runs: Sequence[_Run], *, title: str) -> str:
    unfinished = [
        f"<li>{escape(run.name)} was stopped before its prompts were used up, or is still going "
        f"on: {run.metrics.run.trajectories:,} answers so far.</li>"
        for run in runs
        if not isinstance(run.record.events[-1], End)
    ]
    notes = f"<ul class='notes'>{''.join(unfinished)}</ul>" if unfinished else ""
    return (
        f"<header><p class='kicker'>{escape(title)}</p><h1>{_prose(_headline(runs))}</h1>"
        f"<p class='lead'>{_prose(_lead(runs))}</p>{notes}</header>"
    )


def _headline(runs: Sequence[_Run]) -> str:
    """What the best run learned; or, where nothing was evaluated, how full the slots were."""
    scored = [run for run in runs if run.scores]
    if not scored:
        run = min(runs, key=lambda run: run.metrics.run.bubble)
        return f"{run.name}: the slots were idle for {percent(run.metrics.run.bubble)} of the time"
    best = max(scored, key=lambda run: run.scores[-1].score)
    first, last = best.scores[0].score, best.scores[-1].score
    if len(best.scores) == 1:
        return f"{best.name}: {percent(last)} right answers"
    if percent(first) == percent(last):
        return f"{best.name}: right answers stay at {percent(last)}"
    return f"{best.name}: right answers go from {percent(first)} to {percent(last)}"


def _lead(runs: Sequence[_Run]) -> str:
    """The gain of each run, and how full the slots were."""
    gains = [
        f"{points(run.scores[-1].score - run.scores[0].score)} points for {run.name}"
        for run in runs
        if len(run.scores) > 1
    ]
    words = [f"Gain on held-out prompts: {', '.join(gains)}."] if gains else []
    by_bubble = sorted(runs, key=lambda run: -run.metrics.run.bubble)
    worst, least = by_bubble[0], by_bubble[-1]
    before, after = worst.metrics.run, least.metrics.run
    if len(runs) == 1:
        words.append(
            f"Bubble: {percent(after.bubble)} of the slot-seconds of the rollouts were idle."
        )
    else:
        words.append(
            f"Bubble, the idle share of the rollouts' slot-seconds: from {percent(before.bubble)} "
            f"({worst.name}) to {percent(after.bubble)} ({least.name}). Goodput, with that: from "
            f"{short(before.goodput)} to {short(after.goodput)} tokens/s."
        )
    return " ".join(words)


def _numbers(runs: Sequence[_Run]) -> str:
    rows: list[tuple[str, Callable[[_Run], str]]] = [
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
        ("time of rollouts", lambda run: f"{short(run.metrics.run.rollout_seconds)} s"),
        ("time of training, all together", lambda run: f"{short(run.metrics.run.seconds)} s"),
    ]
    told = table(
        ["", *(run.name for run in runs)],
        [[name, *(_unbroken(tell(run)) for run in runs)] for name, tell in rows],
        caption="From start to end; evaluations take no time here",
        quiet=[name == "best evaluation" for name, _ in rows],
    )
    return f"<section><h2>Numbers</h2>{told}</section>"


def _before_and_after(run: _Run) -> str:
    ends = run.scores[:1] + run.scores[1:][-1:]
    return f" {_ARROW} ".join(percent(end.score) for end in ends) or _NONE


def _best(run: _Run) -> str:
    if not run.scores:
        return _NONE
    best = max(run.scores, key=lambda score: score.score)
    return f"{percent(best.score)} after update {best.update:,}"


def _staleness(run: _Run) -> str:
    return f"{run.metrics.run.mean_staleness:.2f} and {run.metrics.run.staleness_max}"


def _learning(runs: Sequence[_Run]) -> str:
    """The held-out score against answers and against seconds."""
    if not any(run.scores for run in runs):
        return ""
    by_answers = [[(score.answers, score.score) for score in run.scores] for run in runs]
    by_seconds = [[(score.seconds, score.score) for score in run.scores] for run in runs]
    figures = [
        _figure(
            caption,
            curves(
                _lines(runs, places),
                x_label=x_label,
                y_label="right answers",
                title=f"Right answers to held-out prompts, by {x_label}",
                is_share=True,
            ),
        )
        for caption, x_label, places in (
            ("What an answer teaches.", "answers trained on", by_answers),
            ("What a second teaches; evaluations take no time.", "seconds of training", by_seconds),
        )
    ]
    return f"<section><h2>Learning</h2>{''.join(figures)}</section>"


def _answers(runs: Sequence[_Run]) -> str:
    """Length and reward of the answers that each update was trained on."""
    figures = []
    for name, y_label, what, caption in _BY_UPDATE:
        lines = _lines(runs, [_over_updates(run, name) for run in runs])
        if any(line.points for line in lines):
            title = f"Mean {what} of the answers of an update"
            picture = curves(lines, x_label="update", y_label=y_label, title=title)
            figures.append(_figure(caption, picture))
    return f"<section><h2>Answers</h2>{''.join(figures)}</section>" if figures else ""


def _lines(runs: Sequence[_Run], places: Sequence[Sequence[tuple[float, float]]]) -> list[Series]:
    return [
        Series(name=run.name, points=tuple(line)) for run, line in zip(runs, places, strict=True)
    ]


def _over_updates(run: _Run, name: str) -> list[tuple[float, float]]:
    pairs = [(_number(row, "update"), _number(row, name)) for row in run.record.rows]
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _slots(runs: Sequence[_Run]) -> str:
    """What every slot did, in the part of the runs that all of them have."""
    drawn = [lanes(run.record.events) for run in runs]
    seconds = _shown_seconds(runs, drawn)
    whose = "every run" if len(runs) > 1 else "the run"
    if seconds is None:
        caption = f"The whole of {whose}."
    else:
        drawn = [first_seconds(run, seconds) for run in drawn]
        caption = f"The first {short(seconds)} s of {whose}; bubbles are of whole runs."
    panels = [
        (
            run.name,
            f"{run.metrics.schedule}, bubble {percent(run.metrics.run.bubble)}",
            part,
        )
        for run, part in zip(runs, drawn, strict=True)
    ]
    # the page has the look of all pictures in its head, and its policy allows no second style
    picture = timelines(panels).replace(f"<style>{stylesheet()}</style>", "")
    return f"<section><h2>Slots</h2>{_figure(caption, picture)}</section>"


def _shown_seconds(runs: Sequence[_Run], drawn: Sequence[Lanes]) -> float | None:
    """How much of the runs to draw: `None` is all.

    Long enough for the first groups of every run, and no longer than the shortest run, so that
    no run seems to end where its picture does.
    """
    lengths = [run.end - run.start for run in drawn]
    needed = max(_first_groups(run.record.events) for run in runs)
    seconds = min(needed, *lengths)
    return None if seconds >= 0.75 * max(lengths) else seconds


def _first_groups(events: Sequence[Event]) -> float:
    """Seconds until the first groups were trained on; those of the whole run if it has fewer."""
    closed = 0
    for event in events:
        if isinstance(event, Update):
            closed += len(event.closed)
            if closed >= SHOWN_GROUPS:
                return event.seconds - events[0].seconds
    return events[-1].seconds - events[0].seconds


def _reading() -> str:
    return (
        "<section><h2>How to read this</h2>"
        "<p>The bubble is the share of slot-seconds during rollouts in which a slot stood empty. "
        "Goodput is tokens trained on per second of rollout. "
        "A token is as stale as there were updates between the weights that wrote it and the "
        "weights that were trained on it.</p>"
        "<p>One run per schedule and seed is one draw: small differences between curves say "
        "nothing before other seeds repeat them.</p></section>"
    )


def _prose(text: str) -> str:
    return escape(_unbroken(text))


def _unbroken(text: str) -> str:
    """Text in which a number stays on the line of its per cent sign."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _figure(caption: str, picture: str) -> str:
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>"
        f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(caption)}'>"
        f"{picture}</div></figure>"
    )
