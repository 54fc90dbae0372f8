"""RL of the LLaMA-3.1-8B shape on one GPU: memory, rollout and update speed, schedules.

Weights are random and created on the device in 16 bits, answers have forced lengths, updates are
real. All schedules share one model, engine and optimiser; the row with adapters has its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.efficiency import expected_seconds, outcome, schedule_of, trial_name
from experiments.markdown import caption, percent, table
from experiments.record import Record
from experiments.trials import Setup, Trial
from sortedrl.config.schedule import Schedule
from sortedrl.core.meter import Metrics, length_bias
from sortedrl.report.terminal import tell

if TYPE_CHECKING:
    from experiments.bench_world import BenchWorld

_MARGIN = 1.1
_GIB = 1 << 30


def trials(setup: Setup) -> list[Trial]:
    """One trial for each arm; a world is opened with its first one."""
    worlds = _Worlds(setup)
    about, workload = setup.settings["model"], setup.settings["workload"]
    found = []
    for arm in setup.settings["arms"]:
        lora_rank = arm.get("lora_rank")
        given = {name: value for name, value in arm.items() if name != "lora_rank"}
        schedule = schedule_of(given, workload)
        found.append(
            Trial(
                name=trial_name(schedule) + ("" if lora_rank is None else f"-lora-{lora_rank}"),
                seconds=_MARGIN * expected_seconds(given, workload, about["costs"]),
                run=partial(
                    _run, setup, worlds, schedule, groups=arm["groups"], lora_rank=lora_rank
                ),
                opens=f"lora_rank {lora_rank}",
                opening_seconds=about["start_seconds"],
            )
        )
    return found


class _Worlds:
    """The model with or without adapters, one at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lora_rank: int | None = None
        self._world: BenchWorld | None = None

    def opened(self, lora_rank: int | None) -> BenchWorld:
        """The model with adapters of this rank; any other is freed."""
        from experiments.bench_world import BenchWorld, Workload

        if self._world is not None and self._lora_rank == lora_rank:
            return self._world
        self._world = None
        _free_memory()
        settings = self._setup.settings
        known = {n: v for n, v in settings["workload"].items() if n != "tolerance"}
        began = time.monotonic()
        self._world = BenchWorld.opened(
            settings["model"],
            Workload(**known, lora_rank=lora_rank),
            device=self._setup.device,
        )
        self._lora_rank = lora_rank
        taken = _memory(self._setup.device)["reserved_gib"]
        tell(f"ready after {time.monotonic() - began:.1f} s; {taken:.1f} GiB used")
        return self._world


def _run(
    setup: Setup, worlds: _Worlds, schedule: Schedule, *, groups: int, lora_rank: int | None
) -> dict[str, Any]:
    world = worlds.opened(lora_rank)
    name = trial_name(schedule) + ("" if lora_rank is None else f"-lora-{lora_rank}")
    folder = setup.scratch / name
    folder.mkdir(parents=True, exist_ok=True)
    _reset_peak(setup.device)
    answers = groups * schedule.group_prompts

    def show(metrics: Metrics) -> None:
        run = metrics.run
        tell(
            f"{name}: {run.trajectories}/{answers} answers, {run.updates} updates, "
            f"{run.seconds:.0f} s, rollout {run.throughput:,.0f} tokens/s, "
            f"with updates {run.trained_per_second:,.0f}"
        )

    measured = world.run(schedule, groups=groups, events=folder / "events.jsonl", after_update=show)
    bias = length_bias(list(measured.lengths.values()), world.reference(list(measured.lengths)))
    given = {name: value for name, value in asdict(schedule).items() if value is not None}
    found: dict[str, Any] = {
        "schedule": schedule.name,
        "lora_rank": lora_rank,
        "arm": {"groups": groups, **given},
        "workload": dict(setup.settings["workload"]),
        **outcome(measured),
        "update_tokens_per_second": measured.metrics.run.ledger.trained
        / max(1e-9, measured.update_seconds),
        "memory": _memory(setup.device),
        "length_bias": bias.ratio,
    }
    sync = {record.trial: record for record in setup.results.read(setup.table)}.get("sync")
    before = found if schedule.strategy == "sync" else None if sync is None else sync.numbers
    if before is not None:
        found["ratio_to_sync"] = _window(found)["goodput"] / _window(before)["goodput"]
        found["ratio_to_sync_with_updates"] = (
            _window(found)["trained_per_second"] / _window(before)["trained_per_second"]
        )
    tell(_line(name, found))
    return found


def _window(numbers: Mapping[str, Any]) -> Mapping[str, float]:
    """The steady state if groups overlap; otherwise the whole run, whose groups are alike."""
    has_steady = numbers["arm"]["lookahead"] and numbers["steady"]
    window: Mapping[str, float] = numbers["steady"] if has_steady else numbers["run"]
    return window


def _line(name: str, numbers: Mapping[str, Any]) -> str:
    window, memory = _window(numbers), numbers["memory"]
    ratio = numbers.get("ratio_to_sync_with_updates")
    return (
        f"{name}: rollout {window['throughput']:,.0f} tokens/s, update "
        f"{numbers['update_tokens_per_second']:,.0f}, with updates "
        f"{window['trained_per_second']:,.0f} tokens/s, bubble {window['bubble']:.1%}, peak "
        f"{memory['peak_gib']:.1f} GiB" + ("" if ratio is None else f", {ratio:.2f} x sync")
    )


def section(records: Sequence[Record]) -> str:
    """One table: speed and memory of every schedule, in the order of the settings."""
    head = (
        "schedule",
        "rollout, tokens/s",
        "update, tokens/s",
        "bubble, %",
        "goodput, tokens/s",
        "x sync",
        "with updates, tokens/s",
        "x sync",
        "peak, GiB",
    )
    rows = []
    for record in records:
        numbers, window = record.numbers, _window(record.numbers)
        adapters = "" if numbers["lora_rank"] is None else f", LoRA {numbers['lora_rank']}"
        ratios = [numbers.get("ratio_to_sync"), numbers.get("ratio_to_sync_with_updates")]
        shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append(
            [
                numbers["schedule"] + adapters,
                f"{window['throughput']:,.0f}",
                f"{numbers['update_tokens_per_second']:,.0f}",
                percent(window["bubble"]),
                f"{window['goodput']:,.0f}",
                shown[0],
                f"{window['trained_per_second']:,.0f}",
                shown[1],
                f"{numbers['memory']['peak_gib']:.1f}",
            ]
        )
    return f"{caption(records)}\n\n{table(head, rows)}"


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _reset_peak(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def _memory(device: str) -> dict[str, float]:
    """Peak memory of tensors, and the memory that torch holds now."""
    import torch

    if not device.startswith("cuda"):
        return {"peak_gib": 0.0, "reserved_gib": 0.0}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / _GIB,
        "reserved_gib": torch.cuda.memory_reserved() / _GIB,
    }
