"""Length bias with natural lengths: the effect of resampling and of coupled mode.

All schedules answer the same prompts with the same noise and weights. An answer that is never
resampled therefore has its length under `sync`, and the ratio of mean lengths to `sync` is the
bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.efficiency import measured_arm, opener, schedule_of, trial_name
from experiments.markdown import caption, percent, table
from experiments.record import Record
from experiments.trials import Setup, Trial
from sortedrl.config.schedule import Schedule
from sortedrl.core.meter import length_bias

if TYPE_CHECKING:
    from experiments.bench_world import BenchWorld


def trials(setup: Setup) -> list[Trial]:
    """One trial for each model and schedule."""
    found = []
    for model in setup.settings["run"]:
        about = setup.settings["models"][model]
        world = opener(setup, about)
        for arm in setup.settings["arms"]:
            schedule = schedule_of(arm, setup.settings["workload"])
            run = partial(_with_lengths, setup, world, model, schedule, arm["groups"])
            name = f"{model}--{trial_name(schedule)}"
            found.append(
                Trial(
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
    """One table: lengths compared with those of `sync`."""
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
        "same length as with sync, %",
        "discarded",
        "bubble, %",
    )
    return f"{caption(records)}\n\n{table(head, rows)}"


def _lengths(numbers: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    return {(prompt, sample): tokens for prompt, sample, tokens in numbers["lengths"]}
