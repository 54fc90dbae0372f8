"""The advice box: what the numbers of a run say, and what a change is predicted to gain.

Predictions come from the simulator fitted to that very run; beside them stands how well the same
simulator tells the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sortedrl.config import EngineSettings, Schedule
from sortedrl.errors import ConfigError
from sortedrl.evaluation.tables import percent
from sortedrl.report.advice.advice import Advice
from sortedrl.report.advice.diagnosis import Diagnosis, diagnose
from sortedrl.report.advice.forecast import Forecast
from sortedrl.report.axis import short
from sortedrl.report.html import escape, prose, table, unbroken
from sortedrl.report.record import Run, RunRecord
from sortedrl.report.sections.frame import framed, paragraph

_Settings = TypeVar("_Settings", Schedule, EngineSettings)


def section(runs: Sequence[Run]) -> str:
    """A box for each run."""
    boxes = []
    for run in runs:
        found = diagnosed(run.record)
        name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        boxes.append(f'<div class="advice">{name}{_inside(found)}</div>')
    return framed("Advice", *boxes, name="advice")


def diagnosed(record: RunRecord) -> Diagnosis:
    """The diagnosis of a run, with its settings where they are known."""
    config: Mapping[str, Any] = record.config or {}
    return diagnose(
        record.events,
        schedule=_settings(Schedule, config.get("schedule")),
        engine=_settings(EngineSettings, config.get("engine")),
        rows=record.rows,
        seed=int(config.get("seed", 0)),
    )


def _settings(kind: type[_Settings], values: Mapping[str, Any] | None) -> _Settings | None:
    """The settings of a section; `None` where it is missing or of another version of ours."""
    if values is None:
        return None
    try:
        return kind(**values)
    except (TypeError, ConfigError):
        return None


def _inside(found: Diagnosis) -> str:
    entries = "".join(_entry(entry) for entry in found.advice)
    listed = f'<ol class="remedies">{entries}</ol>' if entries else ""
    return paragraph(found.summary) + listed + _notes(found) + _trust(found)


def _entry(entry: Advice) -> str:
    gain = "" if entry.gain is None else f'<p class="gain">{prose(_gain(entry, entry.gain))}</p>'
    return (
        f"<li>{gain}<p><code>{escape(entry.remedy)}</code></p>{paragraph(entry.symptom)}"
        f"{paragraph(entry.cost)}{_before_and_after(entry)}</li>"
    )


def _gain(entry: Advice, gain: float) -> str:
    """A ratio of speeds in words."""
    if gain < 1:
        return f"{100 * (1 - gain):.0f} % slower, predicted"
    beyond = " beyond what the run has shown" if entry.about == "extrapolation" else ""
    return f"{gain:.2f} times as fast, predicted{beyond}"


def _before_and_after(entry: Advice) -> str:
    if entry.before is None or entry.after is None:
        return ""
    told = _table(("simulated", "as it is", "changed"), (entry.before, entry.after))
    return f"<details><summary>The prediction in numbers</summary>{told}</details>"


def _table(headings: Sequence[str], columns: Sequence[Forecast]) -> str:
    rows = [
        ("tokens trained on per second", *(short(c.trained_per_second) for c in columns)),
        ("bubble", *(percent(c.bubble) for c in columns)),
        ("goodput, tokens/s", *(short(c.goodput) for c in columns)),
        ("thrown away", *(percent(c.discarded_share) for c in columns)),
        ("staleness, mean", *(f"{c.mean_staleness:.2f}" for c in columns)),
        ("mean length", *(short(c.mean_length) for c in columns)),
        ("time for as many answers", *(f"{short(c.seconds)} s" for c in columns)),
    ]
    told = [[unbroken(cell) for cell in row] for row in rows]
    caption = "All seconds counted: rollouts, updates, hand-overs"
    return table(headings, told, caption=caption, quiet=[False] * len(rows))


def _notes(found: Diagnosis) -> str:
    if not found.notes:
        return ""
    items = "".join(f"<li>{prose(note)}</li>" for note in found.notes)
    return (
        f"<details><summary>What was tried and gains too little</summary><ul>{items}</ul></details>"
    )


def _trust(found: Diagnosis) -> str:
    """How far the predictions can be trusted: the same simulator on the run itself."""
    if found.measured is None or found.predicted is None or found.trust is None:
        return ""
    words = f"How far to trust this: {found.trust[0].lower()}{found.trust[1:]}"
    told = _table(("", "measured", "simulated"), (found.measured, found.predicted))
    return f"<details><summary>{prose(words)}</summary>{told}</details>"
