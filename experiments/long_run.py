"""Table 1b: long runs, from the first token to the last update."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.efficiency import trials
from experiments.markdown import caption, percent, table
from experiments.record import Record

__all__ = ["trials", "rows", "section"]


HEAD = (
    "schedule",
    "groups",
    "answers",
    "updates",
    "slots idle in the whole run, %",
    "trained tokens/s, updates included",
    "x sync",
    "length bias",
    "staleness, mean and max",
)


def section(records: Sequence[Record]) -> str:
    """A table for each model, over whole runs."""
    parts = []
    for model in dict.fromkeys(record.numbers["model"] for record in records):
        its = [record for record in records if record.numbers["model"] == model]
        parts += [f"### {model}, whole runs (measured)", caption(its), table(HEAD, rows(its))]
    return "\n\n".join(parts)


def rows(records: Sequence[Record]) -> list[list[str]]:
    """One line for each schedule of a model."""
    sync = next((r.numbers["run"] for r in records if r.numbers["schedule"] == "sync"), None)
    lines = []
    for record in sorted(records, key=lambda record: record.numbers["schedule"] != "sync"):
        numbers, run = record.numbers, record.numbers["run"]
        speed = run["trained_per_second"]
        lines.append(
            [
                numbers["schedule"],
                str(numbers["arm"]["groups"]),
                f"{run['trajectories']:,}",
                f"{run['updates']:,}",
                percent(run["bubble"]),
                f"{speed:,.0f}",
                f"{speed / sync['trained_per_second']:.2f}" if sync else "",
                f"{numbers['length_bias']:.2f}",
                f"{run['mean_staleness']:.2f}, {run['max_staleness']}",
            ]
        )
    return lines
