"""The report page of training runs: header, tables and the order of sections.

It is a single file that opens from disk, made from run folders (see `record`). A run that is in
progress or was killed is shown up to its last event. The numbers are those of `meter` over the
whole log; seconds are training time without evaluations (see `clock`).
Predictions come from the simulator fitted to the run; next to them is shown how well that simulator
reproduces the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any, TypeVar

from sortedrl.config.parsing import flat, toml_value
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.events import Landed
from sortedrl.evaluation.tables import percent, points
from sortedrl.report.advice.diagnosis import Advice, Diagnosis, diagnose
from sortedrl.report.advice.simulation import Forecast, seconds_spent
from sortedrl.report.charts.svg import short, stylesheet
from sortedrl.report.html import (
    asset,
    escape,
    packed_script,
    page,
    paragraph,
    prose,
    script,
    section,
    table,
    unbroken,
)
from sortedrl.report.record import Run, RunRecord, measured
from sortedrl.report.sections.learning import answers_data, answers_section, learning_section
from sortedrl.report.sections.lengths import lengths_section
from sortedrl.report.sections.slots import bubbles_section, slots_data, slots_section
from sortedrl.report.sections.tokens import ledger_section, staleness_section

_NAME = re.compile(r'<section id="([a-z]+)"')
_STYLES = ("page.css", "run.css", "slots.css", "answers.css", "watch.css")
SCRIPTS = (
    "browse.js",
    "slots.js",
    "slots_bars.js",
    "slots_colours.js",
    "slots_shares.js",
    "slots_paint.js",
    "slots_text.js",
    "slots_pointing.js",
    "slots_zoom.js",
    "answers.js",
    "run.js",
)
"""The page's scripts, joined inside one function."""

_ARROW = "\N{RIGHTWARDS ARROW}"
_NONE = "\N{EN DASH}"
_BESIDE = "updates overlapped with rollouts"
_TIMES = (  # in the order of `SecondsSpent`
    "rollouts",
    "waiting for rewards",
    "weight updates",
    "weight syncs",
    "saving checkpoints and logs",
    "everything else",
)
_Settings = TypeVar("_Settings", Schedule, EngineSettings)


def runs_page(
    records: Sequence[RunRecord], *, title: str, refresh_seconds: float | None = None
) -> str:
    """The page of these runs; a served one polls for updates every `refresh_seconds`."""
    if not records:
        raise ValueError("a page of runs needs at least one run, got none")
    runs = [measured(record) for record in records]
    sections = [
        opening(runs, title=title),
        slots_section(runs),
        advice_section(runs),
        numbers_section(runs),
        bubbles_section(runs),
        ledger_section(runs),
        lengths_section(runs),
        staleness_section(runs),
        learning_section(runs),
        answers_section(runs),
        settings_section(runs),
        reading_section(),
    ]
    header, *parts = filter(None, sections)
    body = "\n".join([header, _contents(parts), *parts])
    data = packed_script("slots-data", slots_data(runs))
    data += packed_script("answers-data", answers_data(runs))
    return page(
        title=title,
        body=f"<main>\n{body}\n</main>\n{data}",
        style=stylesheet() + "".join(asset(name) for name in _STYLES),
        script=script(*SCRIPTS),
        refresh_seconds=refresh_seconds,
    )


def _contents(sections: Sequence[str]) -> str:
    """Links to the sections."""
    names = (found.group(1) for found in map(_NAME.match, sections) if found)
    links = "".join(f'<li><a href="#{name}">{name}</a></li>' for name in names)
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


def opening(runs: Sequence[Run], *, title: str) -> str:
    """Title, headline, lead and notes."""
    unfinished = "".join(
        f"<li>{escape(run.name)} is in progress or was stopped early: "
        f"{run.metrics.run.trajectories:,} answers so far.</li>"
        for run in runs
        if not run.is_ended
    )
    notes = f'<ul class="notes">{unfinished}</ul>' if unfinished else ""
    return (
        f'<header><p class="kicker">{escape(title)}</p><h1>{prose(headline(runs))}</h1>'
        f'<p class="lead">{prose(lead(runs))}</p>{_facts(runs)}{notes}</header>'
    )


def _facts(runs: Sequence[Run]) -> str:
    """Model, task, machine, date and commit, as far as they are recorded."""
    entries = ""
    for name in ("model", "task", "machine", "started", "sortedrl", "commit"):
        known = [(run.name, value) for run in runs if (value := _fact(run, name))]
        values = dict.fromkeys(value for _, value in known)
        shown = [f"{value} ({run})" for run, value in known] if len(values) > 1 else values
        if values:
            entries += f"<dt>{name}</dt><dd>{escape('; '.join(shown))}</dd>"
    return f'<dl class="facts">{entries}</dl>' if entries else ""


def _fact(run: Run, name: str) -> str:
    record = run.record
    text = str((record.config or {}).get(name, "")) or record.facts.get(name, "")
    return text[:16].replace("T", " ") + " UTC" if name == "started" and text else text


def headline(runs: Sequence[Run]) -> str:
    """What the best run learned; without evaluations, the bubble."""
    scored = [run for run in runs if run.scores]
    if not scored:
        run = min(runs, key=lambda run: run.metrics.run.bubble)
        return f"{run.name}: slots idle for {percent(run.metrics.run.bubble)} of the rollout time"
    best = max(scored, key=lambda run: run.scores[-1].score)
    first, last = best.scores[0].score, best.scores[-1].score
    if len(best.scores) == 1:
        return f"{best.name}: accuracy {percent(last)}"
    if percent(first) == percent(last):
        return f"{best.name}: accuracy stays at {percent(last)}"
    return f"{best.name}: accuracy goes from {percent(first)} to {percent(last)}"


def lead(runs: Sequence[Run]) -> str:
    """The gain of each run, and the use of its slots."""
    gains = [
        f"{points(run.scores[-1].score - run.scores[0].score)} points for {run.name}"
        for run in runs
        if len(run.scores) > 1
    ]
    sentences = [f"Gain on held-out prompts: {', '.join(gains)}."] if gains else []
    by_bubble = sorted(runs, key=lambda run: -run.metrics.run.bubble)
    worst, least = by_bubble[0], by_bubble[-1]
    before, after = worst.metrics.run, least.metrics.run
    if len(runs) == 1:
        sentences.append(
            f"Bubble: {percent(after.bubble)} of the slot-seconds of the rollouts were idle. "
            f"Of {after.ledger.decoded:,} decoded tokens, {after.ledger.trained:,} were trained on "
            f"and {after.ledger.discarded:,} discarded. "
            f"Goodput: {short(after.goodput)} tokens trained on per second of rollout."
        )
    else:
        sentences.append(
            f"Bubble, the idle share of the rollouts' slot-seconds: from {percent(before.bubble)} "
            f"({worst.name}) to {percent(after.bubble)} ({least.name}). Goodput: from "
            f"{short(before.goodput)} to {short(after.goodput)} tokens/s."
        )
    return " ".join(sentences)


def numbers_section(runs: Sequence[Run]) -> str:
    """The numbers of the runs, one column each."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("schedule", lambda run: run.metrics.schedule),
        ("accuracy, first and last evaluation", _before_and_after),
        ("best evaluation", _best),
        ("updates", lambda run: f"{run.metrics.run.updates:,}"),
        ("answers trained on", lambda run: f"{run.metrics.run.trajectories:,}"),
        ("tokens decoded", lambda run: f"{run.metrics.run.ledger.decoded:,}"),
        ("tokens trained on", lambda run: f"{run.metrics.run.ledger.trained:,}"),
        ("tokens discarded", lambda run: f"{run.metrics.run.ledger.discarded:,}"),
        ("bubble", lambda run: percent(run.metrics.run.bubble)),
        ("goodput", lambda run: f"{short(run.metrics.run.goodput)} tokens/s"),
        ("mean length", lambda run: f"{short(run.metrics.run.mean_length)} tokens"),
        (
            "staleness, mean and maximum",
            lambda r: f"{r.metrics.run.mean_staleness:.2f} and {r.metrics.run.staleness_max}",
        ),
        ("training time, total", lambda run: f"{short(run.metrics.run.seconds)} s"),
    ]
    cells = [[name, *(cell(run) for run in runs)] for name, cell in rows]
    spent = [astuple(seconds_spent(run.record.events, run.metrics.run)) for run in runs]
    cells += [
        [name, *(_part(run, times[row]) for run, times in zip(runs, spent, strict=True))]
        for row, name in enumerate(_TIMES)
    ]
    quiet = {"best evaluation", *_TIMES, _BESIDE}
    if any(_beside(run) for run in runs):
        cells.append([_BESIDE, *(_part(run, _beside(run)) for run in runs)])
    numbers = table(
        ["", *(run.name for run in runs)],
        [[row[0], *map(unbroken, row[1:])] for row in cells],
        caption="Whole run; evaluation time is not counted",
        quiet=[row[0] in quiet for row in cells],
    )
    return section("Numbers", numbers, name="numbers")


def _before_and_after(run: Run) -> str:
    ends = run.scores[:1] + run.scores[1:][-1:]
    return f" {_ARROW} ".join(percent(end.score) for end in ends) or _NONE


def _best(run: Run) -> str:
    if not run.scores:
        return _NONE
    best = max(run.scores, key=lambda held_out: held_out.score)
    return f"{percent(best.score)} after update {best.update:,}"


def _beside(run: Run) -> float:
    return sum(e.beside_seconds for e in run.record.events if isinstance(e, Landed))


def _part(run: Run, seconds: float) -> str:
    whole = run.metrics.run.seconds
    return f"{short(seconds)} s, {percent(seconds / whole if whole else 0.0)}"


def advice_section(runs: Sequence[Run]) -> str:
    """A box for each run."""
    found = [diagnosed(run.record) for run in runs]
    boxes = []
    for run, diagnosis in zip(runs, found, strict=True):
        shown = _not_refuted(run, diagnosis, list(zip(runs, found, strict=True)))
        name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        boxes.append(f'<div class="advice">{name}{_inside(shown)}</div>')
    return section("Advice", *boxes, name="advice")


def _not_refuted(
    run: Run, diagnosis: Diagnosis, others: Sequence[tuple[Run, Diagnosis]]
) -> Diagnosis:
    """Remove predictions contradicted by another run on the page."""
    kept, notes = [], list(diagnosis.notes)
    for entry in diagnosis.advice:
        measured = [
            (other.name, other.metrics.run.trained_per_second / run.metrics.run.trained_per_second)
            for other, its in others
            if other is not run and _ran_with(entry, diagnosis, run, other=other, found=its)
        ]
        refuted = [(name, speed) for name, speed in measured if (entry.gain or 1) > 1 > speed]
        notes += [
            f"Tried {entry.remedy}: predicted to be faster, but {name} trained "
            f"{percent(1 - speed)} fewer tokens per second, not advised."
            for name, speed in refuted[:1]
        ]
        kept += [] if refuted else [entry]
    return replace(diagnosis, advice=tuple(kept), notes=tuple(notes))


def _ran_with(
    entry: Advice, diagnosis: Diagnosis, run: Run, *, other: Run, found: Diagnosis
) -> bool:
    """Whether another run had the advised strategy and mode, or the advised schedule."""
    if diagnosis.schedule is None or found.schedule is None or not entry.changes:
        return False
    if {"schedule.strategy", "schedule.mode"} & set(entry.changes):
        wanted = [
            entry.changes.get(f"schedule.{name}", current)
            for name, current in (
                ("strategy", diagnosis.schedule.strategy),
                ("mode", diagnosis.schedule.mode),
            )
        ]
        is_same = wanted == [found.schedule.strategy, found.schedule.mode]
        return is_same and run.metrics.slots == other.metrics.slots
    slots = entry.changes.get("engine.slots", run.metrics.slots)
    changes = {
        name.removeprefix("schedule."): value
        for name, value in entry.changes.items()
        if name.startswith("schedule.")
    }
    mine, theirs = asdict(diagnosis.schedule) | changes, asdict(found.schedule)
    return mine == theirs and slots == other.metrics.slots


def diagnosed(record: RunRecord) -> Diagnosis:
    """The diagnosis of a run, with its settings if known."""
    config: Mapping[str, Any] = record.config or {}
    seed = config.get("seed")
    return diagnose(
        record.events,
        schedule=_section_settings(Schedule, config.get("schedule")),
        engine=_section_settings(EngineSettings, config.get("engine")),
        rows=record.rows,
        seed=seed if isinstance(seed, int) else 0,
    )


def _section_settings(kind: type[_Settings], values: object) -> _Settings | None:
    """The settings of a section; `None` if missing or from an incompatible version."""
    if not isinstance(values, Mapping):
        return None
    try:
        settings = kind(**values)
        hash(settings)  # fails for a list in place of a single value
    except (TypeError, ValueError, OverflowError):
        return None
    return settings


def _inside(found: Diagnosis) -> str:
    entries = "".join(_entry(entry) for entry in found.advice)
    listed = f'<ol class="remedies">{entries}</ol>' if entries else ""
    return paragraph(found.summary) + listed + _notes(found) + _trust(found)


def _entry(entry: Advice) -> str:
    gain = _gain(entry, entry.gain) if entry.gain is not None else ""
    shown = f'<p class="gain">{prose(gain)}</p>' if gain else ""
    return (
        f"<li>{shown}<p><code>{escape(entry.remedy)}</code></p>{paragraph(entry.symptom)}"
        f"{paragraph(entry.cost)}{_forecasts(entry)}</li>"
    )


def _gain(entry: Advice, gain: float) -> str:
    """A speedup as text; empty if the change is smaller than the prediction error."""
    if not entry.is_beyond_error and entry.error >= 0.005:
        return ""
    if gain < 1:
        return f"{100 * (1 - gain):.0f} % slower (predicted)"
    beyond = ", extrapolated" if entry.about == "extrapolation" else ""
    return f"{gain:.2f} times as fast (predicted{beyond})"


def _forecasts(entry: Advice) -> str:
    if entry.before is None or entry.after is None:
        return ""
    numbers = _forecast_table(("simulated", "current", "changed"), (entry.before, entry.after))
    return f"<details><summary>Predicted numbers</summary>{numbers}</details>"


def _forecast_table(headings: Sequence[str], columns: Sequence[Forecast]) -> str:
    rows = [
        ("tokens trained on per second", *(short(c.trained_per_second) for c in columns)),
        ("bubble", *(percent(c.bubble) for c in columns)),
        ("goodput, tokens/s", *(short(c.goodput) for c in columns)),
        ("discarded", *(percent(c.discarded_share) for c in columns)),
        ("staleness, mean", *(f"{c.mean_staleness:.2f}" for c in columns)),
        ("mean length", *(short(c.mean_length) for c in columns)),
        ("time for the same answers", *(f"{short(c.seconds)} s" for c in columns)),
    ]
    cells = [[unbroken(cell) for cell in row] for row in rows]
    caption = "Total time: rollouts, updates and weight syncs"
    return table(headings, cells, caption=caption)


def _notes(found: Diagnosis) -> str:
    if not found.notes:
        return ""
    items = "".join(f"<li>{prose(note)}</li>" for note in found.notes)
    return f"<details><summary>Changes tried and not advised</summary><ul>{items}</ul></details>"


def _trust(found: Diagnosis) -> str:
    """The accuracy of the predictions: the same simulator on the run itself."""
    if found.measured is None or found.predicted is None or found.trust is None:
        return ""
    summary = f"Accuracy of the prediction: {found.trust[0].lower()}{found.trust[1:]}"
    numbers = _forecast_table(("", "measured", "simulated"), (found.measured, found.predicted))
    return f"<details><summary>{prose(summary)}</summary>{numbers}</details>"


def settings_section(runs: Sequence[Run]) -> str:
    """The settings; for several runs, those that differ first."""
    known = [(run.name, flat(run.record.config)) for run in runs if run.record.config is not None]
    unknown = [run.name for run in runs if run.record.config is None]
    parts = []
    if unknown:
        names = ", ".join(unknown)
        parts.append(paragraph(f"The settings of {names} are unknown: there is no config.toml."))
    if len(known) == 1:
        parts.append(_folded_settings("All settings", known[0][1]))
    elif known:
        parts += _compared(known)
    return section("Settings", *parts, name="settings")


def _compared(known: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A table of the settings that differ, and a collapsed list of the others."""
    names = list(dict.fromkeys(name for _, settings in known for name in settings))
    shown = {
        name: [toml_value(s[name]) if name in s else _NONE for _, s in known] for name in names
    }
    different = [name for name in names if len(set(shown[name])) > 1]
    equal = {name: known[0][1][name] for name in names if name not in different}
    if different:
        differences = table(
            ["", *(name for name, _ in known)],
            [[name, *shown[name]] for name in different],
            caption=f"Settings that differ ({_NONE} means not set)",
        )
    else:
        differences = paragraph("All settings are the same.")
    fold = f"{len(equal):,} settings are the same in all runs"
    return [differences, _folded_settings(fold, equal) if equal else ""]


def _folded_settings(summary: str, settings: Mapping[str, object]) -> str:
    """A collapsible list."""
    entries = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(toml_value(value))}</dd>"
        for name, value in settings.items()
    )
    return f"<details><summary>{escape(summary)}</summary><dl>{entries}</dl></details>"


def reading_section() -> str:
    """The definitions."""
    return section(
        "How to read this",
        paragraph(
            "The bubble is the share of slot-seconds during rollouts in which a slot was idle. "
            "Goodput is tokens trained on per second of rollout. "
            "The staleness of a token is the number of updates between the weights that generated "
            "it and the weights that are trained on it."
        ),
        paragraph(
            "Seconds are training time: evaluations and the time between a stop and a resume are "
            "not counted."
        ),
        paragraph(
            "One run per schedule and seed is one sample: do not trust small differences "
            "between curves until other seeds confirm them."
        ),
        name="reading",
    )
