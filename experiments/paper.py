"""Predictions for the paper's two set-ups: `sortedrl train --dry-run` of each config.

Nothing here is measured. Hours and bubble are simulated, with cost arithmetic for the card and
guessed lengths, so they must not share a column with measured numbers. The arithmetic models the
hardware, not the engine, so the SGLang and vLLM variants of a set-up get the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.markdown import caption, percent, table
from experiments.record import Record
from experiments.trials import ROOT, Setup, Trial
from sortedrl.config.parsing import read_toml, settings_over
from sortedrl.config.train import TrainSettings
from sortedrl.report.terminal import tell
from sortedrl.runs.plan.dry_run import Expected, planned_run
from sortedrl.runs.plan.page import RunPlan

FOLDER = ROOT / "experiments" / "paper"
_SECONDS = 5.0
_GIB = 1 << 30
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


def trials(setup: Setup) -> list[Trial]:
    """One trial for each config."""
    return [
        Trial(name=name, seconds=_SECONDS, run=partial(_row, name, setup.settings))
        for name in setup.settings["setups"]
    ]


def settings_of(path: Path) -> TrainSettings:
    """The settings of a config."""
    return settings_over(TrainSettings(), read_toml(path), path=path)


def _row(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    settings, setup = settings_of(FOLDER / f"{name}.toml"), table["setups"][name]
    plan = planned_run(
        settings,
        [],
        card_name=table["card"],
        expected=Expected(rows=setup["rows"], prompt_tokens=setup["prompt_tokens"]),
        tell=tell,
    )
    words = ["--dry-run", "--card", table["card"]]
    words += ["--rows", str(setup["rows"]), "--prompt-tokens", str(setup["prompt_tokens"])]
    return {
        "config": f"experiments/paper/{name}.toml",
        "command": " ".join(["sortedrl train", f"experiments/paper/{name}.toml", *words]),
        "is_prediction": True,
        "model": settings.model,
        "engine": settings.rollout.engine,
        **_numbers(plan),
    }


def _numbers(plan: RunPlan) -> dict[str, Any]:
    memory, found = plan.memory, plan.prediction
    assert found is not None, "a config of the paper must fit"
    course, cluster = found.schedule, memory.demand.cluster
    return {
        "schedule": plan.schedule.name,
        "card": plan.card.text,
        "devices": cluster.num_devices,
        "tensor_parallel": cluster.tensor_parallel,
        "hours": round(found.hours, 2),
        "sync_hours": round(found.sync_hours, 2),
        "bubble": round(found.bubble, 4),
        "sync_bubble": round(found.sync_bubble, 4),
        "goodput": round(found.goodput),
        "sync_goodput": round(found.sync_goodput),
        "goodput_ratio": round(found.goodput / found.sync_goodput, 2),
        "rollout_share": round(found.rollout_share, 3),
        "mean_staleness": round(found.mean_staleness, 2),
        "staleness_bound": course.staleness_bound,
        "updates": course.updates,
        "groups": course.groups,
        "simulated_groups": course.simulated_prompts // plan.schedule.group_prompts,
        "slots": found.slots,
        "mean_length": round(found.mean_length),
        "are_lengths_guessed": found.are_lengths_guessed,
        "gib_per_gpu": round(memory.taken(plan.device_bytes) / _GIB, 1),
        "least_gib_per_gpu": round(memory.least / _GIB, 1),
        "usable_gib_per_gpu": round(memory.usable(plan.device_bytes) / _GIB, 1),
        "host_gib": round(memory.host_bytes / _GIB, 1),
    }


def section(records: Sequence[Record]) -> str:
    """One table of predictions."""
    first = records[0].numbers
    about = (
        f"**Predictions, not measurements**, for {first['devices']} x {first['card']}, from the "
        "simulator with cost arithmetic and guessed lengths; none of these was run. "
        f"{caption(records)} One of the commands: "
        f"`{first['command']}`."
    )
    rows = [
        [
            f"[{record.trial}](../{record.numbers['config']})",
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
