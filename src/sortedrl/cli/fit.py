"""`sortedrl fit`: turns a run into settings of the simulator, from its events or answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.config.schedule import EngineSettings
from sortedrl.core.events import Begin, Load, read_events
from sortedrl.errors import DataError, os_errors
from sortedrl.report.advice.simulation import observed_schedule
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.fit import fit
from sortedrl.simulate.lengths import (
    LengthSettings,
    event_log,
    is_event_log,
    length_observations,
    written_lengths,
)
from sortedrl.simulate.observed import is_log, observed_line, read_observed
from sortedrl.simulate.settings import Simulation, observed_simulation, simulation_to_toml

HELP = """Turn a run into settings for the simulator: lengths, slots, schedule and costs.

  sortedrl fit runs/mine > mine.toml                 then: sortedrl compare mine.toml
  sortedrl fit events.jsonl --json                   for a script
  sortedrl fit rollouts/ > mine.toml                 verl: trainer.rollout_data_dir=rollouts
  sortedrl fit output/completions/ > mine.toml       TRL: log_completions=True
  sortedrl fit results.jsonl > mine.toml             verifiers and prime-rl, or sortedrl.measure

Events of a SortedRL run also give the cost constants of the machine; they are most accurate with
strategy sync or mode partial. Interrupted answers count as censored at the length they reached.
Logs of other trainers give lengths, slots and siblings; costs are those of the preset paper.
"""

_KEPT_LENGTHS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to read, and how to print."""

    events: tyro.conf.Positional[Path]
    """A run folder, an events.jsonl, or a log of answers (file or folder)."""
    json: bool = False
    """Print one JSON object instead of TOML."""


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl fit", description=HELP)
    with os_errors(given.events, "cannot be read"):
        if is_log(given.events) and not is_event_log(given.events):
            _print_observed(given)
        else:
            _print_fitted(given)


def _print_fitted(given: Arguments) -> None:
    events = list(read_events(event_log(given.events)))
    fitted = fit(events, name=str(given.events))
    costs = asdict(fitted.costs)
    begin = next(event for event in events if isinstance(event, Begin))
    schedule = observed_schedule(events)
    if schedule is None:
        raise DataError(given.events, "has no trained answer, so its schedule is unknown")
    prompts = sum(event.prompts for event in events if isinstance(event, Load))
    groups = -(-prompts // schedule.group_prompts)
    if given.json:
        found = {
            "costs": costs,
            "relative_error": fitted.relative_error,
            "slots": begin.slots,
            "groups": groups,
            "schedule": asdict(schedule),
        }
        print(json.dumps(found, indent=2))
        return
    print(
        f"# fitted to {fitted.intervals} intervals of {given.events}, "
        f"mean error {100 * fitted.relative_error:.1f} %"
    )
    written = written_lengths(length_observations(events))
    values = written.sample_lengths(_KEPT_LENGTHS)
    simulation = Simulation(
        groups=groups,
        schedule=schedule,
        engine=EngineSettings(slots=begin.slots, max_tokens=max(values)),
        costs=CostSettings(**costs),
        lengths=LengthSettings(values=values),
    )
    print(simulation_to_toml(simulation), end="")


def _print_observed(given: Arguments) -> None:
    observed = read_observed(given.events)
    if given.json:
        print(json.dumps(asdict(observed) | {"lengths": list(observed.lengths)}, indent=2))
        return
    print(f"# {observed_line(observed, name=str(given.events))}")
    print(simulation_to_toml(observed_simulation(given.events)), end="")
