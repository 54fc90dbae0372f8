"""The paper's own two set-ups, predicted: what `sortedrl train --dry-run` says of each config.

Nothing here is measured. Hours and bubble are the simulator's, from arithmetic about the card and
a guess at the lengths, so they belong in no column with measured numbers. The arithmetic knows the
hardware and not the engine, so the SGLang and the vLLM variant of a set-up get the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.pieces import ROOT, Piece, Setup
from sortedrl.config.parsing import read_toml, settings_over
from sortedrl.config.train import TrainSettings
from sortedrl.report.terminal import tell
from sortedrl.runs.plan.dry_run import Expected, planned_run
from sortedrl.runs.plan.page import RunPlan

FOLDER = ROOT / "experiments" / "paper"
_SECONDS = 5.0
_GIB = 1 << 30


def pieces(setup: Setup) -> list[Piece]:
    """One piece for each config."""
    return [
        Piece(name=name, seconds=_SECONDS, run=partial(_row, name, setup.settings))
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
