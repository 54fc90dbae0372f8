"""Table 3e: small update batches on a CPU, at several learning rates, with and without mitigations.

An algorithm of its TOML is named `VARIANT_RATE`: the whitening of REINFORCE++ or a mitigation of
stale tokens, and the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from experiments.learning_seeds import difference
from experiments.markdown import caption, percent, table
from experiments.record import Record

_VARIANTS = {
    "batch": "",
    "group": "whitened over a group",
    "cap": "at most 1 version old",
    "ess": "steps scaled by ESS, geometric mask",
}
_FEWEST_SEEDS = 5
"""An arm of fewer seeds has no row yet."""
Runs = Mapping[int, Mapping[str, Any]]
HEAD = (
    "learning rate",
    "schedule",
    "variant",
    "seeds",
    "final accuracy, %",
    "lowest",
    "deviation",
    "runs below the warm start",
    "against sync, points",
    "against minibatch, points",
    "mean over the run, %",
    "slots idle, %",
)


def section(records: Sequence[Record]) -> str:
    """Every arm at every rate, paired with the paper's two baselines."""
    runs = [record for record in records if record.numbers["kind"] == "run"]
    return f"{caption(runs)}\n\n{table(HEAD, rows(runs))}"


def rows(records: Sequence[Record]) -> list[list[str]]:
    """The table's rows, by rate, then by the first occurrence of the arm."""
    arms: dict[tuple[str, str, str], dict[int, Mapping[str, Any]]] = {}
    for record in records:
        variant, _, rate = record.numbers["algorithm"].partition("_")
        arm = (rate, record.numbers["schedule"], variant)
        arms.setdefault(arm, {})[record.numbers["seed"]] = record.numbers
    shown = (arm for arm, runs in arms.items() if len(runs) >= _FEWEST_SEEDS)
    ordered = sorted(shown, key=lambda arm: (float(arm[0]), arm[1] != "sync", arm[1], arm[2]))
    return [
        _row(
            arm,
            arms[arm],
            [arms.get((arm[0], baseline, "batch"), {}) for baseline in ("sync", "minibatch")],
        )
        for arm in ordered
    ]


def _row(arm: tuple[str, str, str], runs: Runs, baselines: Sequence[Runs]) -> list[str]:
    rate, schedule, variant = arm
    final = [run["last_score"] for run in runs.values()]
    fell = sum(run["last_score"] < run["first_score"] for run in runs.values())
    return [
        rate,
        schedule,
        _VARIANTS[variant],
        str(len(runs)),
        percent(mean(final)),
        percent(min(final)),
        percent(stdev(final)) if len(final) > 1 else "",
        str(fell),
        *(_against(runs, baseline) for baseline in baselines),
        percent(mean(run["mean_score"] for run in runs.values())),
        percent(mean(run["bubble"] for run in runs.values())),
    ]


def _against(runs: Runs, baseline: Runs) -> str:
    is_paired = runs is not baseline and len(runs.keys() & baseline.keys()) > 1
    return difference(runs, baseline, "last_score") if is_paired else ""
