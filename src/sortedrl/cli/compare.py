"""`sortedrl compare`: strategies and modes in one table, with the same prompts and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from sortedrl.cli.arguments import parse_over_settings, source_and_flags
from sortedrl.config.schedule import ModeName, StrategyName
from sortedrl.core.events import Event
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.comparison import bar_chart
from sortedrl.report.charts.timeline import timelines
from sortedrl.report.lanes import lanes
from sortedrl.report.terminal import (
    progress,
    refuse_other_picture,
    table,
    tell,
    thousands,
    write_text,
)
from sortedrl.simulate.compare import (
    SimulationResult,
    agent_variants,
    best_of,
    results_of,
    row,
    simulate,
)
from sortedrl.simulate.observed import is_log, observed_line, read_observed
from sortedrl.simulate.settings import Simulation

HELP = """Compare strategies and modes with the same prompts and the same seed.

  sortedrl compare paper                              everything, on the paper's workload
  sortedrl compare paper --strategies sync sorted --modes partial coupled
  sortedrl compare trl-grpo                           TRL's GRPO defaults
  sortedrl compare lengths.jsonl                      with the lengths of your own runs; see
                                                      sortedrl.measure and sortedrl fit --help
  sortedrl compare mine.toml --json                   for a script
  sortedrl compare agents                             conversations: slot use while tools run
  sortedrl compare picture --plot timelines.svg       sync and the best one; also writes
                                                      a bar chart, timelines-bars.svg
  sortedrl compare agents --groups 1 --plot agents.svg
                                                      lock step, slot per trajectory, per turn

The first argument is a preset (sortedrl presets), a TOML file, or a log of answers: the output of
sortedrl.measure, verl's rollout dumps, TRL's completions or verifiers' results. Flags override
single settings. The strategy, mode and lookahead of the file or the flags are always compared.
"""

_HEADINGS = (
    "strategy/mode",
    "bubble",
    "steady",
    "goodput",
    "vs sync",
    "length",
    "early",
    "waste",
    "stale",
)
_AGENT_HEADINGS = ("conversations", "bubble", "outside", "goodput", "vs lock step", "stale")
_LOCK_STEP = "lock step"
_DRAWN_AGENTS = (
    _LOCK_STEP,
    "slot per trajectory, sorted/partial",
    "slot per turn, sorted/partial",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to compare and what to show."""

    strategies: tuple[StrategyName, ...] = get_args(StrategyName)
    """Strategies to compare; sync is always included, as the baseline."""
    modes: tuple[ModeName, ...] = ("on_policy", "partial", "coupled")
    """Modes to compare, for strategies that interrupt: on_policy, redraw, partial, coupled."""
    lookaheads: tuple[int, ...] = (0, 2)
    """Lookaheads to compare, for strategy sorted."""
    json: bool = False
    """Print one JSON object with `rows` instead of a table."""
    plot: Path | None = None
    """Write slot timelines to this SVG file and a bar chart next to it; for conversations only the
    timelines: lock step, slot per trajectory, slot per turn."""
    simulation: Simulation = field(default_factory=Simulation)


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse_over_settings(
        lambda base: Arguments(simulation=base), arguments, name="compare", description=HELP
    )
    refuse_other_picture(given.plot)
    beside = None
    if given.plot is not None:
        beside = given.plot.with_name(given.plot.stem + "-bars" + given.plot.suffix)
        refuse_other_picture(beside)
    if given.simulation.conversations.is_used:
        _compare_agents(given)
        return
    _tell_observed(arguments)
    results = _results(given)
    rows = [row(result, sync=results[0]) for result in results]
    if given.plot is not None and beside is not None:
        write_text(given.plot, _timelines(results))
        write_text(beside, bar_chart(rows))
    if given.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    _print_table(results, rows)


def _tell_observed(arguments: Sequence[str]) -> None:
    """For a log of answers, print how idle its slots were."""
    source, _ = source_and_flags(Arguments, arguments)
    if source is not None and is_log(Path(source)):
        tell(observed_line(read_observed(Path(source)), name=source))


def _results(given: Arguments) -> list[SimulationResult]:
    with progress(1.0) as advance:
        return results_of(
            given.simulation,
            strategies=given.strategies,
            modes=given.modes,
            lookaheads=given.lookaheads,
            advance=advance,
        )


def _compare_agents(given: Arguments) -> None:
    """Compare slot policies for conversations with lock step."""
    chosen = list(agent_variants(given.simulation))
    results = []
    with progress(len(chosen)) as advance:
        for number, (name, variant) in enumerate(chosen):
            advance(name, number)
            results.append((name, simulate(variant)))
    figures = {name: result.metrics.run for name, result in results}
    base = figures[_LOCK_STEP].goodput
    rows: list[dict[str, object]] = [
        {
            "name": name,
            "bubble": run.bubble,
            "outside_bubble": run.outside_bubble,
            "goodput": run.goodput,
            "goodput_vs_lock_step": run.goodput / base,
            "mean_staleness": run.mean_staleness,
            "staleness_max": run.staleness_max,
        }
        for name, run in figures.items()
    ]
    if given.plot is not None:
        write_text(given.plot, _panels([(name, dict(results)[name]) for name in _DRAWN_AGENTS]))
    if given.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    lines = [
        [
            name,
            percent(run.bubble),
            percent(run.outside_bubble),
            thousands(run.goodput),
            f"{run.goodput / base:.2f} x",
            f"{run.mean_staleness:.1f} / {run.staleness_max}",
        ]
        for name, run in figures.items()
    ]
    table(_AGENT_HEADINGS, lines)
    print(
        "\nbubble: idle share of the slots; outside: the part of it spent waiting for tools only.\n"
        "goodput: trained tokens per second of rollout. stale: versions a trained token lags,\n"
        "mean / max. lock step: every turn waits for all other turns and all tools."
    )


def _timelines(results: Sequence[SimulationResult]) -> str:
    best = best_of(results)
    return _panels([(results[0].name, results[0]), (best.name, best)])


def _panels(results: Sequence[tuple[str, SimulationResult]]) -> str:
    panels = []
    for name, result in results:
        events: list[Event] = []
        simulate(result.simulation, record=events.append)
        figures = result.metrics.run
        outside = ""
        if result.simulation.conversations.is_used:
            outside = f", {percent(figures.outside_bubble)} while only tools worked"
        subtitle = f"bubble {percent(figures.bubble)}{outside}, {figures.seconds:,.0f} s"
        panels.append((name, subtitle, lanes(events)))
    return timelines(panels)


def _print_table(results: Sequence[SimulationResult], rows: Sequence[dict[str, object]]) -> None:
    lines = []
    for result, values in zip(results, rows, strict=True):
        figures, steady = result.metrics.run, result.metrics.steady
        ledger = figures.ledger
        lines.append(
            [
                result.name,
                percent(figures.bubble),
                "" if steady is None else percent(steady.bubble),
                thousands(figures.goodput),
                f"{values['goodput_vs_sync']:.2f} x",
                f"{result.bias.ratio:.2f}",
                f"{result.early_bias.ratio:.2f}",
                percent(ledger.discarded / ledger.decoded),
                f"{figures.mean_staleness:.1f} / {figures.staleness_max}",
            ]
        )
    table(_HEADINGS, lines)
    best = best_of(results)
    gain = best.metrics.run.goodput / results[0].metrics.run.goodput
    print(
        f"\n{best.name} trains {gain:.2f} x the tokens of sync per second of rollout.\n"
        "bubble: idle share of the slots; steady: without the first and the last group.\n"
        "goodput: trained tokens per second of rollout. waste: decoded and discarded.\n"
        "length: mean length trained on over mean length generated, 1 is no bias; early: of\n"
        "the first half of the run. stale: versions a trained token lags, mean / max."
    )
