"""Settings derived from others when they are not chosen: siblings, sizes, threads.

A setting such as `engine.slots` is chosen if a file, a flag or an argument sets it. Chosen settings
are never changed; the others follow

    the algorithm   if it compares the answers to a prompt: 8 answers, harvested by prompt
    the data        an update takes an eighth of the prompts (a power of two), at most 128 answers,
                    at least 8 answers, or all of them if there are fewer
                    a group has four updates, so tokens are at most three versions stale
                    there are as many slots as an update has answers
    the machine     one thread per core that reward workers do not need
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sortedrl.config.algorithm import Algorithm, AlgorithmName
from sortedrl.config.parsing import flat, read_toml, settings_over
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import TrainSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SIBLINGS = 8
"""Answers per prompt of algorithms that compare them, unless chosen."""
_UPDATES_PER_EPOCH = 8
_UPDATES_PER_GROUP = 4
_LEAST_ANSWERS = 8
_GROUP, _BATCH, _SLOTS = "schedule.group_prompts", "schedule.update_batch", "engine.slots"
SIZES = (_GROUP, _BATCH, _SLOTS)
"""Settings that follow from the number of rows."""

Chosen = frozenset[str]
"""Names of settings that were set explicitly, such as `schedule.mode`."""


def changed_names(settings: DataclassInstance) -> Chosen:
    """The settings that differ from their defaults: the chosen ones of settings made in Python."""
    default = flat(asdict(type(settings)()))
    return frozenset(
        name for name, value in flat(asdict(settings)).items() if value != default[name]
    )


def settings_of_file(path: Path) -> tuple[TrainSettings, Chosen]:
    """The settings of a TOML file, and the names of those that it sets."""
    table = read_toml(path)
    settings = settings_over(TrainSettings(), with_siblings(table), path=path)
    return settings, frozenset(flat(table))


def with_siblings(tables: Mapping[str, Any], *, chosen: Chosen = frozenset()) -> dict[str, Any]:
    """Add the defaults of algorithms that compare siblings, unless chosen.

    >>> with_siblings({"algorithm": {"name": "grpo"}})["schedule"]
    {'samples_per_prompt': 8, 'harvest_unit': 'prompt'}
    """
    algorithm: Any = tables.get("algorithm", {})
    schedule: Any = tables.get("schedule", {})
    # Invalid sections and names are refused when the tables become settings.
    name: Any = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    is_known = isinstance(schedule, Mapping) and name in get_args(AlgorithmName)
    if not is_known or not Algorithm(name=name).needs_siblings:
        return dict(tables)
    implied: dict[str, Any] = {"samples_per_prompt": SIBLINGS, "harvest_unit": "prompt"}
    missing = {key: value for key, value in implied.items() if f"schedule.{key}" not in chosen}
    return {**tables, "schedule": {**missing, **schedule}}


def sized(settings: TrainSettings, *, num_rows: int, chosen: Chosen) -> TrainSettings:
    """Replace sizes that were not chosen by ones that suit the number of rows.

    >>> settings = sized(TrainSettings(), num_rows=64, chosen=frozenset())
    >>> settings.schedule.group_prompts, settings.schedule.update_batch, settings.engine.slots
    (32, 8, 8)
    """
    schedule, samples = settings.schedule, settings.schedule.samples_per_prompt
    batch = schedule.update_batch
    if _BATCH not in chosen:
        prompts = _update_prompts(num_rows, samples=samples)
        batch = prompts * samples
        if _GROUP in chosen:
            batch = min(batch, schedule.group_trajectories)
    group = schedule.group_prompts
    if _GROUP not in chosen:
        group = max(-(-batch // samples), min(num_rows, _UPDATES_PER_GROUP * batch // samples))
    slots = settings.engine.slots
    # The engines of a cluster share the slots evenly, so a cluster sets its own number.
    if _SLOTS not in chosen and not settings.cluster.is_used:
        most = EngineSettings().slots
        slots = min(most, max(batch, group * samples // _UPDATES_PER_GROUP))
    return replace(
        settings,
        schedule=replace(schedule, group_prompts=group, update_batch=batch),
        engine=replace(settings.engine, slots=slots),
    )


def _update_prompts(num_rows: int, *, samples: int) -> int:
    """Prompts of an update: a power of two, or all rows if they are too few."""
    most = max(1, Schedule().update_batch // samples)
    least = min(num_rows, -(-_LEAST_ANSWERS // samples))
    eighth = max(1, num_rows // _UPDATES_PER_EPOCH)
    return max(least, min(most, 1 << (eighth.bit_length() - 1)))


def size_line(settings: TrainSettings, *, num_rows: int, chosen: Chosen) -> str | None:
    """The derived sizes in one line; `None` if all were chosen."""
    values = {
        _GROUP: settings.schedule.group_prompts,
        _BATCH: settings.schedule.update_batch,
        _SLOTS: settings.engine.slots,
    }
    derived = [f"{name} = {values[name]}" for name in SIZES if name not in chosen]
    if not derived:
        return None
    samples = settings.schedule.samples_per_prompt
    answers = "1 answer" if samples == 1 else f"{samples} answers"
    return f"for {num_rows:,} rows with {answers} each: {', '.join(derived)} (set them to change)"


def threads_for(*, cores: int, workers: int) -> int:
    """CPU threads of a run: the cores that reward workers do not need, at least one.

    Threads that share a core wait for each other at the end of every operation, which costs far
    more than an extra thread gains.

    >>> [threads_for(cores=cores, workers=workers) for cores, workers in ((2, 2), (8, 4), (64, 8))]
    [1, 4, 56]
    """
    return max(1, cores - workers)


def cpu_limit() -> int:
    """Cores available to this process: its CPU affinity, capped by the container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return cores
