"""The simulator's predictions compared with the measured runs of the efficiency table.

Costs and the loss of cached tokens are fitted to the events of one run of a model. Of the other
runs, the simulator gets only the schedules and the length distribution, as from a user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from experiments.efficiency import simulation_of
from experiments.markdown import caption, percent, table
from experiments.record import Record
from experiments.trials import Setup, Trial
from sortedrl.core.events import read_events
from sortedrl.core.meter import numbers
from sortedrl.errors import DataError
from sortedrl.report.advice.simulation import observed_answers
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.fit import fit

_SECONDS = 10.0
_POINTS = 2.0
_APART = 10.0


def trials(setup: Setup) -> list[Trial]:
    """One trial for each model of the efficiency table."""
    records = setup.results.read("efficiency")
    models = dict.fromkeys(record.numbers["model"] for record in records)
    return [
        Trial(name=model, seconds=_SECONDS, run=partial(_predicted, setup, model))
        for model in models
    ]


def _predicted(setup: Setup, model: str) -> dict[str, Any]:
    records = [r for r in setup.results.read("efficiency") if r.numbers["model"] == model]
    fitted_to = setup.settings["fitted_to"]
    path = setup.scratch.parent / "efficiency" / f"{model}--{fitted_to}" / "events.jsonl"
    if not path.exists():
        raise DataError(path, "must have the events to fit; measure efficiency first")
    events = list(read_events(path))
    found, seen = fit(events), observed_answers(events)
    known = {
        "costs": asdict(found.costs),
        "mismatch_rate": seen.mismatch_rate or 0.0,
        "prompt_tokens": round(sum(seen.prompts.values()) / len(seen.prompts)),
    }
    return {
        "model": model,
        "fitted_to": fitted_to,
        **known,
        "fit_error": found.relative_error,
        "rows": [_row(record, known) for record in records],
    }


def _row(record: Record, known: Mapping[str, Any]) -> dict[str, Any]:
    """One schedule: predicted and measured numbers."""
    measured = record.numbers
    arm = {
        name: value
        for name, value in measured["arm"].items()
        if name in ("groups", "strategy", "mode", "lookahead")
    }
    simulation = simulation_of(
        arm, measured["workload"], known["costs"], prompt_tokens=known["prompt_tokens"]
    )
    lengths = replace(simulation.lengths, mismatch_rate=known["mismatch_rate"])
    metrics = simulate(replace(simulation, lengths=lengths)).metrics
    return {
        "schedule": measured["schedule"],
        "piece": record.trial,
        "predicted": numbers(metrics.run),
        "measured": dict(measured["run"]),
    }


def section(records: Sequence[Record]) -> str:
    """One table for each model: predictions next to measurements."""
    return "\n\n".join(_model_section(record) for record in records)


def _model_section(record: Record) -> str:
    found = record.numbers
    about = (
        f"{caption([record])}\n{found['model']}: costs and the loss of cached tokens are fitted "
        f"to the events of one measured run (`{found['fitted_to']}`; mean error of an interval "
        f"{100 * found['fit_error']:.1f} %). Of the other runs, the simulator got only the "
        "schedule and the length distribution."
    )
    head = (
        "schedule",
        "bubble predicted, %",
        "bubble measured, %",
        "error, points",
        "goodput predicted",
        "goodput measured",
        "error, %",
        "within 2 points and 10 %",
    )
    return f"{about}\n\n{table(head, [_shown(row, found['fitted_to']) for row in found['rows']])}"


def _shown(row: Mapping[str, Any], fitted_to: str) -> list[str]:
    predicted, measured = row["predicted"], row["measured"]
    points = 100 * (predicted["bubble"] - measured["bubble"])
    apart = 100 * (predicted["goodput"] / measured["goodput"] - 1)
    is_own = row["piece"].endswith(f"--{fitted_to}")
    is_met = "yes" if abs(points) <= _POINTS and abs(apart) <= _APART else "no"
    return [
        row["schedule"] + (" (fitted)" if is_own else ""),
        percent(predicted["bubble"]),
        percent(measured["bubble"]),
        f"{points:+.1f}",
        f"{predicted['goodput']:,.0f}",
        f"{measured['goodput']:,.0f}",
        f"{apart:+.1f}",
        is_met,
    ]
