"""Ablations: one setting changed at a time, simulated and measured.

A simulated trial has one base, one setting and all its values; a measured one is one training run.
Simulated and measured numbers are in separate tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from experiments import learning
from experiments.ablations_page import section
from experiments.efficiency import simulation_of
from experiments.learning import Arm
from experiments.record import Record, Results
from experiments.trials import ROOT, Setup, Trial, merged
from sortedrl.config.parsing import read_toml
from sortedrl.core.files import Value, read_metrics
from sortedrl.errors import DataError
from sortedrl.report.record import number
from sortedrl.simulate.compare import SimulationResult, row, simulate
from sortedrl.simulate.settings import Simulation

__all__ = [
    "Run",
    "fitted",
    "learning_setup",
    "trials",
    "runs",
    "section",
    "simulation",
    "synchronous",
]

NO_VALUE = "none"
"""The TOML value for a setting to leave out."""
_OF_WORKLOAD = {"group_prompts": "group", "update_batch": "batch", "slots": "slots"}
_KEPT = (
    "bubble",
    "steady_bubble",
    "goodput",
    "goodput_vs_sync",
    "mean_staleness",
    "max_staleness",
    "length_bias",
    "updates",
    "trajectories",
    "decoded_tokens",
    "trained_tokens",
    "discarded_tokens",
    "cached_tokens",
    "prefilled_again_tokens",
    "rollout_seconds",
    "seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run: a base with at most one changed setting."""

    base: str
    setting: str | None = None
    value: Any = None

    @property
    def name(self) -> str:
        """Its name, without the seed.

        >>> Run(base="partial", setting="schedule.lookahead", value=2).name
        'partial-lookahead-2'
        """
        if self.setting is None:
            return self.base
        section, _, setting = self.setting.partition(".")
        word = section if setting in ("kind", "name") else setting
        return f"{self.base}-{word}-{self.value}"

    @property
    def change(self) -> dict[str, Any]:
        """The change to the settings of the base.

        >>> Run(base="partial", setting="schedule.lookahead", value=2).change
        {'schedule': {'lookahead': 2}}
        """
        if self.setting is None:
            return {}
        section, _, setting = self.setting.partition(".")
        return {section: {setting: self.value}}


def trials(setup: Setup) -> list[Trial]:
    """Simulated trials, then warm starts, then measured runs."""
    return [*_simulated_trials(setup), *_measured_trials(setup)]


def _simulated_trials(setup: Setup) -> Iterator[Trial]:
    given = setup.settings["simulated"]
    asked = [(base, change) for change in given["changes"] for base in change["bases"]]
    for place, (base, change) in enumerate(asked):
        run = partial(_simulated, setup, base, change, place=place)
        name = f"simulated-{base}-{change['setting']}"
        yield Trial(name=name, seconds=given["seconds"], run=run)


def _measured_trials(setup: Setup) -> Iterator[Trial]:
    measured = setup.settings["measured"]
    seconds = measured["seconds"]
    for seed in measured["seeds"]:
        warm = partial(learning.warm_numbers, learning_setup(setup), seed)
        yield Trial(name=f"measured-warm-{seed}", seconds=seconds["warm"], run=warm)
        for place, run in enumerate(runs(measured)):
            measure = partial(_measured, setup, run, seed, place=place)
            yield Trial(name=f"measured-{run.name}-{seed}", seconds=seconds["run"], run=measure)


# Simulated


def simulation(
    setup: Setup, base: str, *, change: Mapping[str, Any], known: Mapping[str, Any], seed: int
) -> Simulation:
    """A base with a change, with the workload of the efficiency table and the fitted costs."""
    given = setup.settings["simulated"]
    table = {**given["bases"][base], **change}
    table = {name: value for name, value in table.items() if value != NO_VALUE}
    workload = dict(read_toml(ROOT / "experiments" / "efficiency.toml")["workload"])
    workload |= {new: table.pop(old) for old, new in _OF_WORKLOAD.items() if old in table}
    lost = table.pop("mismatch_rate", known["mismatch_rate"])
    made = simulation_of(
        {"groups": given["groups"], **table},
        {**workload, "seed": seed},
        known["costs"],
        prompt_tokens=known["prompt_tokens"],
    )
    return replace(made, lengths=replace(made.lengths, mismatch_rate=lost))


def synchronous(simulation: Simulation) -> Simulation:
    """The synchronous baseline with equal groups, batches, answers and slots."""
    schedule = replace(
        simulation.schedule,
        strategy="sync",
        mode="on_policy",
        lookahead=0,
        tolerance=None,
        harvest_unit="trajectory",
        max_restarts=None,
    )
    return replace(simulation, schedule=schedule)


def fitted(setup: Setup) -> Record:
    """The fitted costs of the table prediction, from this results folder or the committed one."""
    model = setup.settings["simulated"]["costs_of"]
    for results in (setup.results, Results(ROOT / "experiments" / "results")):
        for record in results.read("prediction"):
            if record.trial == model:
                return record
    path = setup.results.path("prediction", model)
    raise DataError(path, "must have the fitted costs; measure the table prediction first")


def _simulated(setup: Setup, base: str, change: Mapping[str, Any], *, place: int) -> dict[str, Any]:
    given, source = setup.settings["simulated"], fitted(setup)
    known = {name: source.numbers[name] for name in ("costs", "mismatch_rate", "prompt_tokens")}
    made = partial(simulation, setup, base, known=known)
    rows = []
    for value in change["values"]:
        changed = {change["setting"]: value}
        outcomes = [_compared(made(change=changed, seed=seed)) for seed in given["seeds"]]
        columns = {name: [outcome[name] for outcome in outcomes] for name in _KEPT}
        is_base = made(change=changed, seed=0) == made(change={}, seed=0)
        rows.append({"value": value, "is_base": is_base, **columns})
    return {
        "kind": "simulated",
        "place": place,
        "base": base,
        "base_settings": given["bases"][base],
        "setting": change["setting"],
        "seeds": given["seeds"],
        "groups": given["groups"],
        "model": source.trial,
        "fitted_to": source.numbers["fitted_to"],
        **known,
        "rows": rows,
    }


def _compared(simulation: Simulation) -> dict[str, object]:
    return row(simulate(simulation), sync=_sync_outcome(synchronous(simulation)))


@cache
def _sync_outcome(simulation: Simulation) -> SimulationResult:
    return simulate(simulation)


# Measured


def runs(measured: Mapping[str, Any]) -> Iterator[Run]:
    """Each base, followed by its changes."""
    for base in measured["bases"]:
        yield Run(base=base)
        for change in measured["changes"]:
            if change["base"] == base:
                for value in change["values"]:
                    yield Run(base=base, setting=change["setting"], value=value)


def learning_setup(setup: Setup, run: Run | None = None) -> Setup:
    """The setup of a measured run, in the format of the learning tables."""
    measured = setup.settings["measured"]
    if run is None:
        return replace(setup, settings=measured)
    table = merged(measured["train"], measured["bases"][run.base])
    table = merged(table, run.change)
    every = measured["evaluated_answers"] // table["schedule"]["update_batch"]
    table = merged(table, {"evaluation": {"every": every}})
    words = {"train": table, "algorithms": {"ablated": {}}, "arms": {run.name: {}}}
    return replace(setup, settings={**measured, **words})


def _measured(setup: Setup, run: Run, seed: int, *, place: int) -> dict[str, Any]:
    arm = Arm(algorithm="ablated", name=run.name, seed=seed)
    own = learning_setup(setup, run)
    numbers = learning.arm_numbers(own, arm)
    settings = learning.train_settings(own, arm, model=learning.warmed(own, seed))
    return {
        **numbers,
        **_correction(read_metrics(settings.out / "metrics.jsonl")),
        "kind": "measured",
        "place": place,
        "algorithm": settings.algorithm.name,
        "learning_rate": settings.optimiser.learning_rate,
        "base": run.base,
        "setting": run.setting,
        # JSON has no infinity.
        "value": str(run.value) if run.value == math.inf else run.value,
        "puzzles": settings.evaluation.limit,
    }


def _correction(rows: Sequence[Mapping[str, Value]]) -> dict[str, float | None]:
    """The effective sample size as a share, mean and minimum over the updates.

    1 if all tokens are on-policy.
    """
    shares = [number(row, "correction/ess") for row in rows]
    known = [share for share in shares if share is not None]
    return {
        "effective_share": sum(known) / len(known) if known else None,
        "least_effective_share": min(known, default=None),
    }
