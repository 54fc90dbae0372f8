"""Length bias with lengths of the model's own: what redrawing does, and what coupling keeps.

All schedules answer the same prompts with the same noise, from the same weights. So an answer that
nothing changed has the very length that it has under `sync`, and the mean length over that of
`sync` is the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.efficiency import measured_arm, opener, piece_name, schedule_of
from experiments.markdown import caption, percent, table
from experiments.pieces import Piece, Setup
from experiments.record import Record
from sortedrl.config.schedule import Schedule
from sortedrl.core.meter import length_bias

if TYPE_CHECKING:
    from experiments.bench_world import BenchWorld


def pieces(setup: Setup) -> list[Piece]:
    """One piece for each model and schedule."""
    found = []
    for model in setup.settings["run"]:
        about = setup.settings["models"][model]
        world = opener(setup, about)
        for arm in setup.settings["arms"]:
            schedule = schedule_of(arm, setup.settings["workload"])
            run = partial(_with_lengths, setup, world, model, schedule, arm["groups"])
            name = f"{model}--{piece_name(schedule)}"
            found.append(
                Piece(
                    name=name,
                    seconds=about["seconds"],
                    run=run,
                    opens=model,
                    opening_seconds=about.get("start_seconds", 0.0),
                )
            )
    return found


def _with_lengths(
    setup: Setup,
    world: Callable[[], BenchWorld],
    model: str,
    schedule: Schedule,
    groups: int,
) -> dict[str, Any]:
    measured, found = measured_arm(setup, world(), model, schedule=schedule, groups=groups)
    lengths = [[*key, tokens] for key, tokens in sorted(measured.lengths.items())]
    return found | {"lengths": lengths}


def section(records: Sequence[Record]) -> str:
    """One table: lengths against those of `sync`."""
    sync = next(r.numbers for r in records if r.numbers["arm"]["strategy"] == "sync")
    before = _lengths(sync)
    rows = []
    for record in records:
        own = _lengths(record.numbers)
        bias = length_bias(list(own.values()), list(before.values()))
        same = sum(own[key] == before.get(key) for key in own) / len(own)
        rows.append(
            [
                record.numbers["schedule"],
                f"{bias.trained_mean:.0f}",
                f"{bias.ratio:.3f}",
                f"{bias.ks_distance:.3f}",
                percent(same),
                f"{record.numbers['run']['discarded_tokens']:,}",
                percent(record.numbers["run"]["bubble"]),
            ]
        )
    head = (
        "schedule",
        "mean length trained on",
        "length bias",
        "KS distance",
        "as long as with sync, %",
        "discarded",
        "bubble, %",
    )
    return f"{caption(records)}\n\n{table(head, rows)}"


def _lengths(numbers: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    return {(prompt, sample): tokens for prompt, sample, tokens in numbers["lengths"]}
