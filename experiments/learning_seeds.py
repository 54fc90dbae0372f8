"""Table 3b: order and freshness separated, with as many seeds as it takes.

Runs of one seed share their warm start, prompts and noise, so arms are compared seed by seed: a
difference is a mean over seeds with its 95 % interval (Student's t).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, mean, stdev
from typing import Any

from experiments.learning import pieces
from experiments.markdown import caption, percent, table
from experiments.record import Record

__all__ = ["difference", "pieces", "section"]

_BASELINES = ("sync", "minibatch")
_FIRST = (*_BASELINES, "posthoc")


def section(records: Sequence[Record]) -> str:
    """One table for each learning rate."""
    runs = [record for record in records if record.numbers["kind"] == "run"]
    parts = [caption(runs)]
    for rate in dict.fromkeys(record.numbers["algorithm"] for record in runs):
        arms: dict[str, dict[int, Mapping[str, Any]]] = {}
        for record in runs:
            if record.numbers["algorithm"] == rate:
                arm = record.numbers["schedule"]
                arms.setdefault(arm, {})[record.numbers["seed"]] = record.numbers
        parts.append(f"Learning rate {rate.removeprefix('rate_')}:\n\n{_table(arms)}")
    return "\n\n".join(parts)


def _table(arms: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    head = (
        "schedule",
        "seeds",
        "final accuracy, % (lowest, deviation)",
        "mean over the run, %",
        *(f"final, against {name}" for name in _BASELINES),
        *(f"mean over the run, against {name}" for name in _BASELINES),
        "mean staleness",
        "length bias",
        "bubble, %",
    )
    order = [*(name for name in _FIRST if name in arms), *(n for n in arms if n not in _FIRST)]
    rows = []
    for name in order:
        runs = arms[name]
        final = [run["last_score"] for run in runs.values()]
        rows.append(
            [
                name,
                str(len(runs)),
                f"{percent(mean(final))} ({percent(min(final))}, {percent(stdev(final))})",
                percent(mean(run["mean_score"] for run in runs.values())),
                *(
                    "" if name == other else difference(runs, arms[other], key)
                    for key in ("last_score", "mean_score")
                    for other in _BASELINES
                ),
                f"{mean(run['mean_staleness'] for run in runs.values()):.2f}",
                f"{mean(run['length_bias'] for run in runs.values()):.3f}",
                percent(mean(run["bubble"] for run in runs.values())),
            ]
        )
    return table(head, rows)


def difference(
    runs: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]], key: str
) -> str:
    """The mean difference over the seeds that both have, in points, with its 95 % interval.

    >>> difference({0: {"x": 0.5}, 1: {"x": 0.7}}, {0: {"x": 0.4}, 1: {"x": 0.6}}, "x")
    '+10.0 ± 0.0'
    """
    found = [100 * (runs[seed][key] - others[seed][key]) for seed in runs if seed in others]
    half = _t_quantile(len(found) - 1) * stdev(found) / math.sqrt(len(found))
    return f"{mean(found):+.1f} ± {half:.1f}"


def _t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion around the normal one."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
