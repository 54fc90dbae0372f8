"""`sortedrl report`: one HTML page for a run, or for several side by side."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.core.meter import measure, numbers
from sortedrl.report.page import runs_page
from sortedrl.report.record import RunRecord, read_runs
from sortedrl.report.terminal import progress, refuse_unwritable, write_text

HELP = """Write a report page: what a run learned, how its slots were used, what to change.

  sortedrl report runs/logic                      writes runs/logic/report.html
  sortedrl report runs/sorted runs/sync           side by side; writes ./report.html
  sortedrl report runs/logic-seed*                seeds of one setting: curves with bands
  sortedrl report events.jsonl --out page.html    any event log, also of a simulation
  sortedrl report runs/logic --json               the numbers, for a script

The page is one file that needs no network. A run that is in progress or was killed is shown up to
its last event; sortedrl watch keeps the page up to date.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to show, and where to write it."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or their events.jsonl."""
    out: Path | None = None
    """The page; by default report.html in the folder of a single run, or here for several."""
    title: str = ""
    """The page's title; by default the names of the runs."""
    open: bool = False
    """Open the page in the browser."""
    json: bool = False
    """Also print the numbers of the runs as one JSON object."""


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl report", description=HELP)
    if given.out is not None:
        refuse_unwritable(given.out)
    with progress(2) as advance:
        advance("reading", 0)
        records = read_runs(given.runs)
        advance("drawing", 1)
        page = runs_page(records, title=given.title or title_of(records))
    path = given.out or _beside(given.runs)
    write_text(path, page)
    if given.json:
        rows = {record.name: numbers(measure(record.events).run) for record in records}
        print(json.dumps({"page": str(path), "runs": rows}, indent=2))
    if given.open:
        webbrowser.open(path.resolve().as_uri())


def title_of(records: Sequence[RunRecord]) -> str:
    """A title from the names of the runs."""
    names = [record.name for record in records]
    if len(names) > 3:
        return f"{names[0]} and {len(names) - 1} more runs"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _beside(runs: Sequence[Path]) -> Path:
    if len(runs) > 1:
        return Path("report.html")
    folder = runs[0].parent if runs[0].is_file() else runs[0]
    return folder / "report.html"
