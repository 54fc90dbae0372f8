"""`sortedrl fit`: the costs of a machine, estimated from the events of a run on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from sortedrl.cli.arguments import parse, to_toml
from sortedrl.core.events import read_events
from sortedrl.errors import DataError
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.fit import fit
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import Simulation

HELP = """Estimate what things cost on your machine from a run's events.

  sortedrl fit runs/mine/events.jsonl > mine.toml    then: sortedrl compare mine.toml
  sortedrl fit events.jsonl --json                   for a script

Prints a TOML file with the constants and with the run's own answer lengths.
A run of strategy sync, or of mode partial, gives the most exact constants.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to read and how to print."""

    events: tyro.conf.Positional[Path]
    """The events.jsonl of a run."""
    json: bool = False
    """Print one JSON object instead of TOML."""


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl fit", description=HELP)
    try:
        fitted = fit(read_events(given.events), name=str(given.events))
    except OSError as error:
        raise DataError(given.events, f"cannot be read ({error.strerror})") from error
    costs = asdict(fitted.costs)
    if given.json:
        print(json.dumps({"costs": costs, "relative_error": fitted.relative_error}, indent=2))
        return
    print(
        f"# fitted to {fitted.intervals} intervals of {given.events}, "
        f"mean error {100 * fitted.relative_error:.1f} %"
    )
    simulation = Simulation(
        costs=CostSettings(**costs), lengths=LengthSettings(length_file=given.events)
    )
    print(to_toml(simulation), end="")
