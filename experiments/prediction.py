"""The simulator's predictions beside the measured runs of the efficiency table.

Costs and the loss of cached tokens are fitted to the events of one run of a model. The simulator
then gets the schedules of the other runs and the distribution of the lengths, as from a user,
and nothing else of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from experiments.efficiency import simulation_of
from experiments.markdown import caption, percent, table
from experiments.pieces import Piece, Setup
from experiments.record import Record
from sortedrl.core.events import read_events
from sortedrl.core.meter import numbers
from sortedrl.errors import DataError
from sortedrl.report.advice.simulation import observed_answers
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.fit import fit

_SECONDS = 10.0
_POINTS = 2.0
_APART = 10.0


def pieces(setup: Setup) -> list[Piece]:
    """One piece for each model that the efficiency table was measured with."""
    records = setup.results.read("efficiency")
    models = dict.fromkeys(record.numbers["model"] for record in records)
    return [
        Piece(name=model, seconds=_SECONDS, run=partial(_predicted, setup, model))
        for model in models
    ]


def _predicted(setup: Setup, model: str) -> dict[str, Any]:
    records = [r for r in setup.results.read("efficiency") if r.numbers["model"] == model]
    fitted_to = setup.settings["fitted_to"]
    path = setup.scratch.parent / "efficiency" / f"{model}--{fitted_to}" / "events.jsonl"
    if not path.exists():
        raise DataError(path, "are the events to fit to: measure efficiency first")
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
    """One schedule: what the simulator says, and what was measured."""
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
        "piece": record.piece,
        "predicted": numbers(metrics.run),
        "measured": dict(measured["run"]),
    }


def section(records: Sequence[Record]) -> str:
    """One table for each model: what was predicted beside what was measured."""
    return "\n\n".join(_model_section(record) for record in records)


def _model_section(record: Record) -> str:
    found = record.numbers
    about = (
        f"{caption([record])}\n{found['model']}: costs and the loss of cached tokens are fitted "
        f"to the events of one measured run (`{found['fitted_to']}`; the fit explains an "
        f"interval to {100 * found['fit_error']:.1f} %). Of the other runs the simulator was "
        "told the schedule and the distribution of the lengths."
    )
    head = (
        "schedule",
        "bubble predicted, %",
        "bubble measured, %",
        "points apart",
        "goodput predicted",
        "goodput measured",
        "apart, %",
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
