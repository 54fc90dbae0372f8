"""Prints the findings as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import mean

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from coupling_study.copies import Rule
from coupling_study.recommend import LARGEST_RATIO, LEAST_KEPT, Recommendation
from coupling_study.settings import Settings
from coupling_study.study import Findings, Measurement
from coupling_study.survival import Ratios

_WIDTH = 132


class Tables:
    """Means over the seeds, one table per question."""

    def __init__(self, findings: Findings, settings: Settings) -> None:
        """Nothing is printed yet."""
        self._findings = findings
        self._settings = settings
        self._rules = list(dict.fromkeys(b.rule for b in findings.beginnings))
        self._console = Console(width=_WIDTH)

    def show(self, recommendations: Sequence[Recommendation]) -> None:
        """Print them all."""
        self._show_beginnings()
        self._show_kept()
        self._show_admitted()
        self._show_recommendations(recommendations)

    def _show_beginnings(self) -> None:
        """Whether copies are exact, and their distance from the master."""
        last = self._settings.updates[-1]
        rates = self._settings.rates
        table = _table(
            ["weights", "answers", "tokens", "unchanged", "but one", "confirmed", "mismatch"],
            [f"at {rate:g}" for rate in rates],
        )
        for rule in self._rules:
            beginnings = [b for b in self._findings.beginnings if b.rule == rule]
            confirmed = [c for c in self._findings.confirmations if c.rule == rule]
            agreeing = sum(c.answers - c.differing for c in confirmed)
            table.add_row(
                str(rule),
                str(sum(b.answers for b in beginnings)),
                f"{mean(b.mean_length for b in beginnings):.0f}",
                _percent(min(b.unchanged for b in beginnings), digits=2),
                _percent(mean(b.nudged for b in beginnings)),
                f"{agreeing}/{sum(c.answers for c in confirmed)}",
                f"{mean(b.mismatch for b in beginnings):.4f}",
                *(
                    f"{mean(m.mismatch or 0.0 for m in self._at(rule, rate, last)):.4f}"
                    for rate in rates
                ),
            )
        for rule in (rule for rule in self._rules if rule.precision == "fp32"):
            drifts = [mean(m.drift for m in self._at(rule, rate, last)) for rate in rates]
            table.add_row("not updated", *[""] * 6, *(f"{drift:.4f}" for drift in drifts))
        self._print(
            "Rollout copies of the weights",
            table,
            "unchanged, but one: kept at tolerance 0 by the same weights, and after one of them "
            "moved by one unit in the last place",
            "confirmed: answers of which the engine keeps what the gaps say, at one tolerance",
            "mismatch: mean |log-probability - the master's|, at version 0 and after "
            f"{_updates(last)}",
        )

    def _show_kept(self) -> None:
        """The share of the cached prefix that survives."""
        table = _table(
            ["weights", "rate", "moved", "followed", "changed"],
            [f"at {tolerance:g}" for tolerance in self._settings.tolerances],
        )
        for rule in self._rules:
            for rate in self._settings.rates:
                table.add_row(
                    str(rule),
                    f"{rate:g}",
                    _percent(self._first_mean(rule, rate, lambda m: m.moved), digits=2),
                    f"{self._first_mean(rule, rate, lambda m: m.followed):.2f}",
                    _percent(self._first_mean(rule, rate, lambda m: m.changed), digits=2),
                    *(
                        self._kept_cell(rule, rate, place)
                        for place in range(len(self._settings.tolerances))
                    ),
                )
        counts = " / ".join(map(str, self._settings.updates))
        self._print(
            "What is kept of the cached prefix, in %, at each tolerance",
            table,
            f"kept: mean over the answers, rounded down, after {counts} updates; seeds differ by "
            f"{_percent(self._seed_spread())} at most",
            "moved, followed: share of the rollout weights moved by the first measured update, and "
            "share of the master's movement",
            "changed: share of the tokens whose choice it changed, given the previous tokens",
        )

    def _show_admitted(self) -> None:
        """What each tolerance admits."""
        rate, updates = self._settings.typical_rate, self._settings.updates[0]
        table = _table(
            ["weights", "tolerance", "touched", "mean", "99 %", "all: mean", "99 %"],
            [],
        )
        for rule in self._rules:
            for place, tolerance in enumerate(self._settings.tolerances):
                if not tolerance:
                    continue
                found = [m.survival[place] for m in self._at(rule, rate, updates)]
                table.add_row(
                    str(rule),
                    f"{tolerance:g}",
                    _percent(mean(s.touched for s in found), digits=3),
                    *_ratio_cells(s.touched_ratios for s in found),
                    *_ratio_cells(s.kept_ratios for s in found),
                )
        self._print(
            f"What a tolerance admits at rate {rate:g} after {_updates(updates)}",
            table,
            "touched: share of the kept tokens that the new weights would not have chosen, and "
            "their |log-ratio|; all: that of all kept tokens",
        )

    def _show_recommendations(self, recommendations: Sequence[Recommendation]) -> None:
        rate, updates = self._settings.typical_rate, self._settings.updates
        table = _table(
            ["weights", "tolerance", f"kept after {updates[0]}", f"after {updates[-1]}"],
            ["followed", "touched", "99 % of |log-ratio|"],
        )
        for one in recommendations:
            table.add_row(
                str(one.rule),
                "none" if one.tolerance is None else f"{one.tolerance:g}",
                "-".join(_percent(value) for value in dict.fromkeys(one.kept)),
                "-".join(_percent(value) for value in dict.fromkeys(one.kept_at_last)),
                f"{one.followed:.2f}",
                _percent(one.touched, digits=3),
                "-" if one.ratio_99 is None else f"{one.ratio_99:.4f}",
            )
        self._print(
            "Recommended tolerance",
            table,
            f"the smallest that keeps {LEAST_KEPT:.0%} after {_updates(updates[0])} at rate "
            f"{rate:g} in every seed, if 99 % of the kept tokens have |log-ratio| <= "
            f"{LARGEST_RATIO:g}",
            "a copy that hardly follows the master keeps much because it uses old weights",
        )

    def _print(self, title: str, table: Table, *notes: str) -> None:
        self._console.print(title, style="bold")
        self._console.print(table)
        self._console.print("\n".join(notes) + "\n", style="dim")

    def _at(self, rule: Rule, rate: float, updates: int) -> list[Measurement]:
        key = (rule, rate, updates)
        return [m for m in self._findings.measurements if (m.rule, m.rate, m.updates) == key]

    def _first_mean(self, rule: Rule, rate: float, value: Callable[[Measurement], float]) -> float:
        return mean(map(value, self._at(rule, rate, self._settings.updates[0])))

    def _kept_cell(self, rule: Rule, rate: float, place: int) -> str:
        """One number per number of updates."""
        kept = (
            mean(m.survival[place].kept for m in self._at(rule, rate, updates))
            for updates in self._settings.updates
        )
        return " ".join(f"{math.floor(share * 100):3d}" for share in kept)

    def _seed_spread(self) -> float:
        """The largest difference between seeds in a share kept."""
        shares: dict[tuple[Rule, float, int, float], list[float]] = {}
        for m in self._findings.measurements:
            for s in m.survival:
                shares.setdefault((m.rule, m.rate, m.updates, s.tolerance), []).append(s.kept)
        return max(max(values) - min(values) for values in shares.values())


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for place, heading in enumerate([*left, *right]):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table


def _updates(count: int) -> str:
    return f"{count} update{'s' if count > 1 else ''}"


def _percent(share: float, *, digits: int = 1) -> str:
    return f"{share:.{digits}%}"


def _ratio_cells(ratios: Iterable[Ratios | None]) -> tuple[str, str]:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return "-", "-"
    return (
        f"{mean(ratio.mean for ratio in known):.4f}",
        f"{mean(ratio.percentile_99 for ratio in known):.4f}",
    )
