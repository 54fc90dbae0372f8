"""Recommends a tolerance.

The rule: the smallest tolerance that keeps 90 % of the cached prefix over one update at a typical
learning rate, if 99 % of the kept tokens have a log-ratio within 0.2. That is the clip range of
PPO, so kept tokens are no further off-policy than tokens that the loss accepts anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from coupling_study.copies import Rule
from coupling_study.settings import Settings
from coupling_study.study import Findings, Measurement
from coupling_study.survival import Survival

LEAST_KEPT = 0.9
LARGEST_RATIO = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The tolerance for one rounding rule."""

    rule: Rule
    tolerance: float | None
    """`None` if no tolerance meets the rule."""
    kept: tuple[float, float]
    """Minimum and maximum share kept over the seeds after the first measured update; at the largest
    tolerance if none is recommended."""
    kept_at_last: tuple[float, float]
    """The same after the last one."""
    followed: float
    """Share of the master's movement that the copy followed at the last measured update, mean."""
    touched: float
    """Maximum share of touched tokens over the seeds."""
    ratio_99: float | None
    """Maximum over the seeds of the 99th percentile of the log-ratios of kept tokens."""


def recommend(findings: Findings, settings: Settings) -> list[Recommendation]:
    """A tolerance for every rule."""
    at_rate = [m for m in findings.measurements if m.rate == settings.typical_rate]
    recommendations = []
    for rule in dict.fromkeys(m.rule for m in at_rate):
        first = [m for m in at_rate if (m.rule, m.updates) == (rule, settings.updates[0])]
        last = [m for m in at_rate if (m.rule, m.updates) == (rule, settings.updates[-1])]
        places = range(len(settings.tolerances))
        chosen = next((place for place in places if _meets(_at(first, place))), None)
        shown = places[-1] if chosen is None else chosen
        ratios = [s.kept_ratios.percentile_99 for s in _at(first, shown) if s.kept_ratios]
        recommendations.append(
            Recommendation(
                rule=rule,
                tolerance=None if chosen is None else settings.tolerances[chosen],
                kept=_range([s.kept for s in _at(first, shown)]),
                kept_at_last=_range([s.kept for s in _at(last, shown)]),
                followed=mean(m.followed for m in last),
                touched=max(s.touched for s in _at(first, shown)),
                ratio_99=max(ratios, default=None),
            )
        )
    return recommendations


def _at(measurements: Sequence[Measurement], place: int) -> list[Survival]:
    return [measurement.survival[place] for measurement in measurements]


def _meets(survival: Sequence[Survival]) -> bool:
    """Whether one tolerance meets the rule in every seed."""
    return all(
        s.kept >= LEAST_KEPT
        and s.kept_ratios is not None
        and s.kept_ratios.percentile_99 <= LARGEST_RATIO
        for s in survival
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)
