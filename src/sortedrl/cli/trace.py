"""`sortedrl trace`: writes a run as a trace for Perfetto and Chrome."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.report.record import read_run
from sortedrl.report.terminal import refuse_unwritable, tell
from sortedrl.report.trace import TraceSummary, write_trace

HELP = """Write a run as a trace for Perfetto or chrome://tracing.

  sortedrl trace runs/mine                          writes runs/mine/trace.json
  sortedrl trace events.jsonl --out small.json.gz   events only, compressed
  sortedrl trace runs/mine --json                   for a script

Tracks: rollouts with their bubble, groups, updates, weight syncs, reward workers, and every slot
with what it generated. A run that is in progress or was killed is traced up to its last event.
Open the file at https://ui.perfetto.dev, which reads it in your browser and does not upload it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to read, and where to write."""

    run: tyro.conf.Positional[Path]
    """A run folder, or its events.jsonl."""
    out: Path | None = None
    """Output path; by default trace.json next to the events. A name in .gz is compressed."""
    json: bool = False
    """Print one JSON object: path, bytes, seconds and counts."""


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl trace", description=HELP)
    if given.out is not None:
        refuse_unwritable(given.out)
    record = read_run(given.run)
    folder = given.run.parent if given.run.is_file() else given.run
    path = given.out or folder / "trace.json"
    summary = write_trace(record, path)
    if given.json:
        print(json.dumps(_as_json(summary, path), indent=2))
        return
    tell(f"wrote {path}")
    counts = summary.counts
    print(
        f"{summary.seconds:,.1f} s of {record.name}: {counts['slots']:,} slot intervals, "
        f"{counts['updates']:,} updates, {counts['rewards']:,} timed rewards; "
        "open it at https://ui.perfetto.dev"
    )


def _as_json(summary: TraceSummary, path: Path) -> dict[str, object]:
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "seconds": summary.seconds,
        "counts": dict(summary.counts),
    }
