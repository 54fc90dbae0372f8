"""A smoke run: the workers, ranks, algorithm and schedule of a run with a tiny model, on CPUs.

It takes two updates and a few minutes, and shows whether the parts of a run fit together before
GPUs are rented for it. What stands in for what is said in its first lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from sortedrl.config.train import (
    DataSettings,
    PeriodicEvaluation,
    Saving,
    Tracking,
    TrainSettings,
)
from sortedrl.models.tiny import is_tiny

_TASK = "knights_knaves:people=2,count=128,style=compact"
_UPDATES = 2
_MAX_TOKENS = 24
_SLOTS_EACH = 2
_GROUP_ANSWERS = 32
_PASS_TOKENS = 2048
_START_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class SmokeRun:
    """The settings of a smoke run, and what stands in for what in them."""

    settings: TrainSettings
    lines: Sequence[str]


def smoke_run(settings: TrainSettings) -> SmokeRun:
    """The layout of a run on the CPUs of this machine."""
    lines = []
    cluster, rollout, schedule = settings.cluster, settings.rollout, settings.schedule
    if not is_tiny(settings.model):
        lines.append(f"model tiny in place of {settings.model}")
    if rollout.is_outside:
        each = f"{rollout.engine} over {cluster.tensor_parallel} GPUs"
        name = each if cluster.tensor_parallel > 1 else rollout.engine
        lines.append(f"the native engine in place of {name}")
    kind = cluster.kind
    if cluster.is_used:
        lines.append(
            f"CPU processes in place of GPUs, rollout workers: {cluster.num_workers}, trainer "
            f"ranks: {cluster.trainer_ranks}"
        )
        if kind == "colocated" and cluster.trainer_ranks != cluster.num_workers:
            kind = "separated"
            lines.append(
                "kind separated in place of colocated: on CPUs a worker shares its place with one "
                "rank only"
            )
        cluster = replace(
            cluster,
            address=None,
            kind=kind,
            max_rollout_workers=None,
            cpus_per_worker=1,
            gpus_per_worker=0,
            tensor_parallel=1,
            start_seconds=_START_SECONDS,
            dashboard=False,
            object_store_gib=0.2,
        )
    if settings.task != _TASK:
        lines.append(f"task {_TASK} in place of {settings.task}")
    prompts = max(2, _GROUP_ANSWERS // schedule.samples_per_prompt)
    answers = prompts * schedule.samples_per_prompt
    lines.append(
        f"{_UPDATES} updates of {answers // 2} answers of up to {_MAX_TOKENS} tokens, float32, "
        "no evaluation"
    )
    return SmokeRun(
        replace(
            settings,
            model=settings.model if is_tiny(settings.model) else "tiny",
            task=_TASK,
            reward=None,
            reward_options=(),
            folder=None,
            data=DataSettings(),
            out=_free_folder(settings.out),
            epochs=1,
            max_updates=_UPDATES,
            max_prompt_tokens=None,
            device="cpu",
            threads=1,
            precision="float32",
            cluster=cluster,
            rollout=replace(
                rollout,
                engine="native",
                urls=(),
                options=(),
                weight_sync_folder=None,
                cache_gib=0.1,
            ),
            engine=replace(
                settings.engine,
                slots=_SLOTS_EACH * cluster.num_engines,
                max_tokens=_MAX_TOKENS,
            ),
            schedule=replace(schedule, group_prompts=prompts, update_batch=answers // 2),
            algorithm=replace(settings.algorithm, overlong_tokens=None),
            passes=replace(settings.passes, micro_batch_tokens=_PASS_TOKENS),
            rewards=replace(settings.rewards, workers=1),
            evaluation=PeriodicEvaluation(),
            saving=Saving(every=_UPDATES, keep_best=False),
            tracking=Tracking(),
        ),
        lines,
    )


def _free_folder(out: Path) -> Path:
    """A folder beside that of the run, which a smoke run neither needs nor touches."""
    names = (out.with_name(f"{out.name}-smoke-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
