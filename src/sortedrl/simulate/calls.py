"""The simulator from Python: `sortedrl.simulate` and `sortedrl.compare`.

They do the same as the commands of these names, with the same presets, files and settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, get_args

from sortedrl.config.checks import require
from sortedrl.config.parsing import settings_with
from sortedrl.config.schedule import ModeName, StrategyName
from sortedrl.simulate.compare import SimulationResult, best_of, results_of, row
from sortedrl.simulate.compare import simulate as run_simulation
from sortedrl.simulate.settings import Simulation, simulation_from

Source = str | Path | Simulation
"""The name of a preset, a TOML file, a log of lengths or events, or settings."""

_COLUMNS = {
    "name": "schedule",
    "bubble": "bubble",
    "goodput": "goodput",
    "goodput_vs_sync": "vs sync",
    "length_bias": "length",
    "mean_staleness": "stale",
}


def simulate(
    source: Source = "paper",
    *,
    strategy: StrategyName | None = None,
    mode: ModeName | None = None,
    lookahead: int | None = None,
    slots: int | None = None,
    samples: int | None = None,
    group_prompts: int | None = None,
    update_batch: int | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> SimulationResult:
    """Run one simulation; arguments override single settings of the source.

    >>> simulate("six", mode="partial").metrics.run.updates
    2
    """
    schedule = {
        "strategy": strategy,
        "mode": mode,
        "lookahead": lookahead,
        "samples_per_prompt": samples,
        "group_prompts": group_prompts,
        "update_batch": update_batch,
    }
    engine = {"slots": slots, "max_tokens": max_tokens}
    tables: dict[str, Any] = {"schedule": _given(schedule), "engine": _given(engine)}
    return run_simulation(settings_with(_settings(source), tables | _given({"seed": seed})))


def compare(
    source: Source = "paper",
    *,
    strategies: Sequence[StrategyName] = get_args(StrategyName),
    modes: Sequence[ModeName] = ("on_policy", "partial", "coupled"),
    lookaheads: Sequence[int] = (0, 2),
) -> Comparison:
    """Strategies and modes on the same prompts and seed; sync is always included.

    >>> compare("six", strategies=["sorted"], modes=["partial"], lookaheads=[0])
    sorted/partial trains 1.33 x the tokens of sync per second of rollout (2 schedules compared)
    """
    for name, given in (("strategies", strategies), ("modes", modes)):
        require(
            not isinstance(given, str),
            f"{name} must be a list of names, got one: {given!r}; give [{given!r}]",
        )
    results = results_of(
        _settings(source), strategies=strategies, modes=modes, lookaheads=lookaheads
    )
    return Comparison(tuple(results))


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Simulated runs side by side; the first is sync."""

    results: tuple[SimulationResult, ...]

    @property
    def rows(self) -> list[dict[str, object]]:
        """One flat row for each schedule, for tables and data frames."""
        return [row(result, sync=self.results[0]) for result in self.results]

    @property
    def best(self) -> SimulationResult:
        """The fastest schedule without starving prompts."""
        return best_of(self.results)

    @property
    def gain(self) -> float:
        """Trained tokens per second of rollout of the best, over those of sync."""
        return self.best.metrics.run.goodput / self.results[0].metrics.run.goodput

    def __repr__(self) -> str:
        """The best schedule, in one sentence."""
        return (
            f"{self.best.name} trains {self.gain:.2f} x the tokens of sync per second of rollout "
            f"({len(self.results)} schedules compared)"
        )

    def _repr_html_(self) -> str:
        """A table, as notebooks show it."""
        return html_table(
            list(_COLUMNS.values()),
            [[_cell(found[name]) for name in _COLUMNS] for found in self.rows],
        )


def html_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A plain table for a notebook."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _settings(source: Source) -> Simulation:
    return source if isinstance(source, Simulation) else simulation_from(str(source))
