"""`sortedrl simulate`: one strategy, round by round, with a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sortedrl.cli.arguments import parse_over_settings
from sortedrl.core.events import Event, EventFile, Record
from sortedrl.core.files import refuse_foreign
from sortedrl.core.meter import numbers
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.timeline import timelines
from sortedrl.report.lanes import lanes, ticks
from sortedrl.report.terminal import (
    progress,
    refuse_other_picture,
    refuse_unwritable,
    table,
    thousands,
    write_text,
)
from sortedrl.simulate.compare import SimulationResult, row, simulate, simulated_lengths
from sortedrl.simulate.settings import Simulation

HELP = """Simulate one strategy on a virtual clock: a line per round, then a summary.

  sortedrl simulate paper                          the paper's workload, sorted/partial
  sortedrl simulate paper --mode coupled --lookahead 2
  sortedrl simulate mine.toml --slots 256          your own settings, with one changed
  sortedrl simulate paper --length-file my.csv     your own answer lengths
  sortedrl simulate paper --events events.jsonl    write the event log
  sortedrl simulate six --ticks                    small enough to follow by eye
  sortedrl simulate paper --engines 8 --slots 1024 --group-prompts 4096 --update-batch 1024
                                                   eight engines: docs/scale.md

The first argument is a preset (sortedrl presets) or a TOML file; flags override single settings.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to simulate, and what to show."""

    json: bool = False
    """Print one JSON object instead of text."""
    ticks: bool = False
    """Print the slots second by second as text; for runs of a few dozen seconds."""
    plot: Path | None = None
    """Write the slot timeline to this SVG file."""
    events: Path | None = None
    """Write every event to this JSONL file."""
    simulation: Simulation = field(default_factory=Simulation)


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse_over_settings(
        lambda base: Arguments(simulation=base), arguments, name="simulate", description=HELP
    )
    refuse_other_picture(given.plot)
    if given.events is not None:
        refuse_unwritable(given.events)
    simulated_lengths(
        given.simulation
    )  # refuse an unreadable length file before any output is written
    events: list[Event] = []
    sinks: list[Record] = [events.append] if given.ticks or given.plot is not None else []
    file = None if given.events is None else _event_file(given.events)
    result = _simulate(given.simulation, sinks if file is None else [*sinks, file])
    if file is not None:
        file.close()
    if given.plot is not None:
        figures = result.metrics.run
        subtitle = f"bubble {percent(figures.bubble)}, {thousands(figures.goodput)} tokens/s"
        write_text(given.plot, timelines([(result.name, subtitle, lanes(events))]))
    if given.json:
        print(json.dumps(_as_json(result), indent=2))
    elif given.ticks:
        print(ticks(events))
    else:
        _print_rounds(result)
        print()
        _print_summary(result)


def _event_file(path: Path) -> EventFile:
    """The event log to write; only a log of an earlier simulation is replaced."""
    is_of_run = any((path.parent / name).exists() for name in ("run.json", "config.toml"))
    refuse_foreign(path, mark=None if is_of_run else b'{"event":"begin",')
    return EventFile(path)


def _simulate(simulation: Simulation, sinks: Sequence[Record]) -> SimulationResult:
    def record(event: Event) -> None:
        for sink in sinks:
            sink(event)

    total = simulation.num_prompts * simulation.schedule.samples_per_prompt
    with progress(total) as advance:
        return simulate(simulation, record=record, on_update=lambda done: advance("trained", done))


def _as_json(result: SimulationResult) -> dict[str, object]:
    return row(result) | {
        "per_round": [numbers(figures) for figures in result.metrics.rounds],
        "per_group": [
            {"group": group.group, "rounds": group.rounds} | numbers(group.figures)
            for group in result.metrics.groups
        ],
    }


def _print_rounds(result: SimulationResult) -> None:
    seconds = 0.0
    rows = []
    for number, figures in enumerate(result.metrics.rounds, start=1):
        seconds += figures.seconds
        rows.append(
            [
                str(number),
                str(figures.trajectories),
                thousands(figures.mean_length),
                percent(figures.bubble),
                thousands(figures.goodput),
                thousands(figures.ledger.discarded),
                f"{figures.mean_staleness:.2f}",
                str(figures.staleness_max),
                thousands(seconds),
            ]
        )
    headings = "round trained length bubble tokens/s discarded stale max seconds"
    table(headings.split(), rows)


def _print_summary(result: SimulationResult) -> None:
    schedule, figures, steady = (
        result.simulation.schedule,
        result.metrics.run,
        result.metrics.steady,
    )
    ledger = figures.ledger
    bound = schedule.rounds_bound, schedule.staleness_bound
    rounds, stale = ("no bound" if value is None else f"at most {value}" for value in bound)
    slowest = max(group.rounds for group in result.metrics.groups)
    in_steady = "" if steady is None else f", {percent(steady.bubble)} in the steady state"
    print(
        f"{result.name}: {figures.trajectories:,} answers in {figures.updates} updates, "
        f"{figures.seconds:,.0f} simulated seconds\n"
        f"bubble     {percent(figures.bubble)}{in_steady}; "
        f"idle {percent(figures.idle_share)} with updates and weight syncs\n"
        f"goodput    {figures.goodput:,.0f} trained tokens/s of rollout, "
        f"throughput {figures.throughput:,.0f} decoded tokens/s\n"
        f"ledger     {ledger.decoded:,} decoded = {ledger.trained:,} trained + "
        f"{ledger.discarded:,} discarded + {ledger.cached:,} cached; "
        f"{ledger.prefilled_again:,} prefilled again\n"
        f"staleness  {figures.mean_staleness:.2f} mean, {figures.staleness_max} at most "
        f"(bound: {stale})\n"
        f"rounds     {slowest} for the slowest group (bound: {rounds})\n"
        f"lengths    {result.bias.trained_mean:,.0f} trained, {result.bias.reference_mean:,.0f} "
        f"generated without interruption: bias {result.bias.ratio:.3f}, "
        f"KS distance {result.bias.ks_distance:.3f}"
    )
    _print_pool(result)


def _print_pool(result: SimulationResult) -> None:
    engines, figures = result.simulation.pool.engines, result.metrics.run
    if engines > 1:
        print(
            f"engines    {engines:,}, each {figures.goodput / engines:,.0f} trained tokens/s of "
            f"rollout; weight sync {percent(result.weight_sync_share)} of the time\n"
            f"controller {result.events_per_second:,.0f} starts, finishes and interruptions "
            "per simulated second"
        )
