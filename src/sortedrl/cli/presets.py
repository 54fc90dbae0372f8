"""`sortedrl presets`: lists the named workloads and hardware, with their arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from inspect import getdoc

from sortedrl.cli.arguments import parse
from sortedrl.simulate.costs import HARDWARE
from sortedrl.simulate.settings import PRESETS

HELP = """List the presets.

  sortedrl presets          workloads, and hardware with its arithmetic
  sortedrl presets --json   all their settings, for a script
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """How to print."""

    json: bool = False
    """Print one JSON object with all settings."""


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl presets", description=HELP)
    if given.json:
        workloads = {name: asdict(preset()) for name, preset in PRESETS.items()}
        hardware = {name: asdict(costs()) for name, costs in HARDWARE.items()}
        print(json.dumps({"workloads": workloads, "hardware": hardware}, indent=2, default=str))
        return
    print("Workloads: the first argument of simulate, compare and tune\n")
    for name, preset in PRESETS.items():
        print(f"  {name}\n{_indented(preset)}\n")
    print("Hardware: the value of --hardware\n")
    for name, costs in HARDWARE.items():
        print(f"  {name}\n{_indented(costs)}\n")


def _indented(thing: Callable[[], object]) -> str:
    """The docstring without its doctests."""
    text = (getdoc(thing) or "").partition(">>>")[0].strip()
    return "\n".join(f"      {line}".rstrip() for line in text.splitlines())
