"""The ablations on the results page: a simulated table and a measured one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.learning_rows import Cell
from experiments.markdown import caption, percent, table
from experiments.record import Record

_SIMULATED_HEAD = (
    "base",
    "setting",
    "value",
    "bubble, %",
    "steady bubble, %",
    "goodput, tokens/s",
    "x sync",
    "trained tokens/s of all",
    "staleness, mean",
    "most",
    "length bias",
    "updates",
)
_MEASURED_HEAD = (
    "base",
    "change",
    "warm start, %",
    "score at the end, %",
    "mean over the run, %",
    "updates",
    "staleness, mean and max",
    "effective share, mean and min",
    "mean length trained on",
    "length bias",
    "discarded, % of decoded",
)


def section(records: Sequence[Record]) -> str:
    """Two parts: what was simulated, and what was measured."""
    simulated = [record for record in records if record.numbers["kind"] == "simulated"]
    measured = [record for record in records if record.numbers["kind"] == "measured"]
    parts = [_simulated_part(simulated)] if simulated else []
    parts += [_measured_part(measured)] if measured else []
    return "\n\n".join(parts)


def _simulated_part(records: Sequence[Record]) -> str:
    records = _ordered(records)
    found = records[0].numbers
    bases = {record.numbers["base"]: record.numbers["base_settings"] for record in records}
    changes = "; ".join(f"{base}: {_listed(settings)}" for base, settings in bases.items())
    about = (
        f"### SIMULATED: efficiency\n\n{caption(records)}\n"
        f"No GPU was used: the simulator ran with the costs of {found['model']} fitted to its "
        f"run `{found['fitted_to']}` of the efficiency table, which lost "
        f"{found['mismatch_rate']:g} of its cached tokens. "
        "Simulated lengths do not depend on the weights, so partial and coupled mode have no "
        "length bias here. "
        f"Workload of the efficiency table, {found['groups']} groups, seeds "
        f"{', '.join(str(seed) for seed in found['seeds'])}: mean, with minimum and maximum. "
        "Ratios are relative to `sync` with the same seed, group, batch, answers and slots. "
        "One setting differs from the base, which is in bold. "
        "The steady state is shown if groups overlap. "
        "Bases differ from sorted with groups of 512, batches of 128 and 128 slots in: "
        f"{changes}."
    )
    rows = [
        _simulated_row(record.numbers, row) for record in records for row in record.numbers["rows"]
    ]
    return f"{about}\n\n{table(_SIMULATED_HEAD, rows)}"


def _simulated_row(numbers: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    setting, base = numbers["setting"], numbers["base_settings"]
    has_steady = row["value"] if setting == "lookahead" else base.get("lookahead", 0)
    value = str(row["value"])
    return [
        numbers["base"],
        setting,
        f"**{value}**" if row["is_base"] else value,
        _cell(row["bubble"], form=".1f", scale=100),
        _cell(row["steady_bubble"], form=".1f", scale=100) if has_steady else "",
        _cell(row["goodput"], form=",.0f"),
        _cell(row["goodput_vs_sync"], form=".2f"),
        _cell(_overall(row), form=",.0f"),
        _cell(row["mean_staleness"], form=".2f"),
        _cell(row["max_staleness"], form=".0f"),
        _cell(row["length_bias"], form=".3f"),
        _cell(row["updates"], form=".0f"),
    ]


def _overall(row: Mapping[str, Any]) -> list[float]:
    """Trained tokens per second of the whole run, updates and weight syncs included."""
    pairs = zip(row["trained_tokens"], row["seconds"], strict=True)
    return [tokens / seconds for tokens, seconds in pairs]


def _measured_part(records: Sequence[Record]) -> str:
    every = [record.numbers for record in _ordered(records)]
    seeds = dict.fromkeys(numbers["seed"] for numbers in every)
    error = max(math.sqrt(n["last_score"] * (1 - n["last_score"]) / n["puzzles"]) for n in every)
    answers = max(numbers["trajectories"] for numbers in every)
    about = (
        f"### MEASURED on a CPU: learning\n\n{caption(records)}\n"
        "Knights and Knaves, one warm start for all runs, REINFORCE++ unless said otherwise, "
        f"learning rate {every[0]['learning_rate']:g}, {answers:,} answers each; "
        f"seed {', '.join(str(seed) for seed in seeds)}, one run each. "
        f"A score is the share of right answers to {every[0]['puzzles']} held-out puzzles: its "
        f"standard error is {100 * error:.0f} points, so this table supports no ranking by score. "
        "The machine was shared, so times are not shown. "
        "The effective share is the effective sample size of the importance weights, as a share "
        "of the tokens. The base whole_prompts is the base siblings (four answers to a prompt) "
        "with harvest_unit = prompt."
    )
    rows = [_measured_row(n) for n in every]
    return f"{about}\n\n{table(_MEASURED_HEAD, rows)}"


def _measured_row(numbers: Mapping[str, Any]) -> list[str]:
    setting, value = numbers["setting"], numbers["value"]
    return [
        numbers["base"],
        "**base**" if setting is None else f"{setting} = {value}",
        percent(numbers["first_score"]),
        percent(numbers["last_score"]),
        percent(numbers["mean_score"]),
        str(numbers["updates"]),
        f"{numbers['mean_staleness']:.2f}, {numbers['max_staleness']}",
        f"{numbers['effective_share']:.4f}, {numbers['least_effective_share']:.4f}",
        f"{numbers['mean_length']:.0f}",
        f"{numbers['length_bias']:.3f}",
        percent(numbers["discarded_tokens"] / numbers["decoded_tokens"]),
    ]


def _cell(values: Sequence[float | None], *, form: str, scale: float = 1.0) -> str:
    return Cell(tuple(None if v is None else scale * v for v in values)).text(form)


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _ordered(records: Sequence[Record]) -> list[Record]:
    """In the planned order, seeds of a run together."""
    return sorted(records, key=lambda record: int(record.numbers["place"]))
