"""Table 3b: order and freshness separated, over many seeds.

Runs of one seed share their warm start, prompts and noise, so arms are compared per seed: a
difference is a mean over seeds with its 95 % interval (Student's t). The cost of a score is a
median over seeds, as not every run reaches it, and its ratio has a bootstrap interval over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import NormalDist, mean, median, stdev
from typing import Any

from experiments.markdown import caption, percent, table
from experiments.record import Record

Runs = Mapping[int, Mapping[str, Any]]

_BASELINES = ("sync", "minibatch", "posthoc")
_RESAMPLED = 4000


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
        name = rate.removeprefix("rate_")
        parts.append(f"Learning rate {name}, accuracy at the end:\n\n{_scores(arms)}")
        parts.append(f"Learning rate {name}, the course of the runs:\n\n{_courses(arms)}")
    return "\n\n".join(parts)


def _scores(arms: Mapping[str, Runs]) -> str:
    head = (
        "schedule",
        "seeds",
        "final accuracy, % (lowest, deviation)",
        *(f"against {name}, points" for name in _BASELINES),
    )
    rows = []
    for name in _ordered(arms):
        runs = arms[name]
        final = [run["last_score"] for run in runs.values()]
        rows.append(
            [
                name,
                str(len(runs)),
                f"{percent(mean(final))} ({percent(min(final))}, {percent(stdev(final))})",
                *(_against(arms, name, other, key="last_score") for other in _BASELINES),
            ]
        )
    return table(head, rows)


def _courses(arms: Mapping[str, Runs]) -> str:
    targets = list(next(iter(next(iter(arms.values())).values()))["reached"])
    head = (
        "schedule",
        "mean accuracy, %",
        *(f"against {name}, points" for name in _BASELINES),
        *(f"samples to {100 * float(target):.0f} %, of sync's" for target in targets),
        "mean staleness",
        "length bias",
        "bubble, %",
    )
    rows = []
    for name in _ordered(arms):
        runs = arms[name]
        rows.append(
            [
                name,
                percent(mean(run["mean_score"] for run in runs.values())),
                *(_against(arms, name, other, key="mean_score") for other in _BASELINES),
                *(
                    samples_ratio(runs, arms["sync"], target) if name != "sync" else ""
                    for target in targets
                ),
                f"{mean(run['mean_staleness'] for run in runs.values()):.2f}",
                f"{mean(run['length_bias'] for run in runs.values()):.3f}",
                percent(mean(run["bubble"] for run in runs.values())),
            ]
        )
    return table(head, rows)


def _ordered(arms: Mapping[str, Runs]) -> list[str]:
    first = [name for name in _BASELINES if name in arms]
    return [*first, *(name for name in arms if name not in first)]


def _against(arms: Mapping[str, Runs], name: str, other: str, *, key: str) -> str:
    is_shown = name != other and other in arms
    return difference(arms[name], arms[other], key) if is_shown else ""


def samples_ratio(runs: Runs, others: Runs, target: str) -> str:
    """The ratio of the median samples to a score, over shared seeds, with a 95 % interval.

    A run that never reached the score counts as the slowest; the interval is a bootstrap.

    >>> few, many = ({0: {"reached": {"0.5": {"samples": n}}}} for n in (100, 200))
    >>> samples_ratio(few, many, "0.5")
    '0.50 (0.50 to 0.50)'
    """
    seeds = sorted(runs.keys() & others.keys())
    ours, theirs = (
        [some[seed]["reached"][target]["samples"] for seed in seeds] for some in (runs, others)
    )

    def ratio(chosen: Sequence[int]) -> float:
        middle, other = (
            median(math.inf if taken[place] is None else taken[place] for place in chosen)
            for taken in (ours, theirs)
        )
        if math.isinf(other):
            return math.nan if math.isinf(middle) else 0.0
        return float(middle / other)

    places = range(len(seeds))
    random = Random(0)
    found = sorted(ratio(random.choices(places, k=len(places))) for _ in range(_RESAMPLED))
    found = [value for value in found if not math.isnan(value)]
    whole = ratio(places)
    if math.isnan(whole) or math.isinf(whole) or whole == 0:
        return "median not reached"
    if len(found) < _RESAMPLED:
        return f"{whole:.2f} (too few runs reached it)"
    low, high = found[int(0.025 * len(found))], found[int(0.975 * len(found))]
    top = "never" if math.isinf(high) else f"{high:.2f}"
    return f"{whole:.2f} ({low:.2f} to {top})"


def difference(runs: Runs, others: Runs, key: str) -> str:
    """The mean difference over shared seeds, in points, with its 95 % interval.

    >>> difference({0: {"x": 0.5}, 1: {"x": 0.7}}, {0: {"x": 0.4}, 1: {"x": 0.6}}, "x")
    '+10.0 ± 0.0'
    """
    found = [100 * (runs[seed][key] - others[seed][key]) for seed in runs if seed in others]
    half = _t_quantile(len(found) - 1) * stdev(found) / math.sqrt(len(found))
    return f"{mean(found):+.1f} ± {half:.1f}"


def _t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, by Cornish-Fisher expansion."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
