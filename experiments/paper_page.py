"""The predictions for the paper's own set-ups as the results page shows them."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.markdown import caption, percent, table
from experiments.record import Record

_HEAD = (
    "config",
    "engine",
    "schedule",
    "hours",
    "hours, sync",
    "bubble, %",
    "bubble, sync, %",
    "goodput, x sync",
    "updates",
    "GiB per GPU",
    "GiB of host memory",
)


def section(records: Sequence[Record]) -> str:
    """One table: everything in it is a prediction."""
    first = records[0].numbers
    about = (
        f"**Predictions, not measurements**, for {first['devices']} x {first['card']}, from the "
        "simulator with costs by arithmetic and guessed lengths; nobody has run these here. "
        f"{caption(records)} The same from the command line, for one of them: "
        f"`{first['command']}`."
    )
    rows = [
        [
            f"[{record.piece}](../{record.numbers['config']})",
            record.numbers["engine"],
            record.numbers["schedule"],
            f"{record.numbers['hours']:.1f}",
            f"{record.numbers['sync_hours']:.1f}",
            percent(record.numbers["bubble"]),
            percent(record.numbers["sync_bubble"]),
            f"{record.numbers['goodput_ratio']:.2f}",
            str(record.numbers["updates"]),
            f"{record.numbers['gib_per_gpu']:.0f}",
            f"{record.numbers['host_gib']:,.0f}",
        ]
        for record in records
    ]
    return f"{about}\n\n{table(_HEAD, rows)}"
