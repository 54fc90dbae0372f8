"""Tasks as commands and runs open them: files from a named folder, progress on long work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sortedrl.data.settings import DataSettings
from sortedrl.rewards.source import RewardSource
from sortedrl.tasks.catalogue import open_task, reward_from
from sortedrl.tasks.spec import options_from
from sortedrl.tasks.task import Task
from sortedrl.terminal import progress
from sortedrl.training.settings import TrainSettings


def opened(
    spec: str, *, folder: Path | None, reward: RewardSource | None, data: DataSettings
) -> Task:
    """The task of a spec; without a folder the one that $SORTEDRL_DATA names is taken."""
    environment = os.environ.get("SORTEDRL_DATA")
    with progress(1.0) as show:
        return open_task(
            spec,
            folder=folder or (Path(environment) if environment else None),
            reward=reward,
            data=data,
            advance=lambda share: show(f"making {spec}", share),
        )


def training_tasks(settings: TrainSettings) -> tuple[Task, list[Task]]:
    """The task that a run is trained on, and those it is evaluated on.

    The options of the reward hold for held-out tasks that are scored by the same function too.
    """
    options = options_from(settings.reward_options)
    task, *held_out = (
        _with_reward(settings, spec) for spec in (settings.task, *settings.evaluation.tasks)
    )
    function = task.reward.function
    return _with_options(task, options), [
        _with_options(other, options) if other.reward.function == function else other
        for other in held_out
    ]


def _with_reward(settings: TrainSettings, spec: str) -> Task:
    reward = None if settings.reward is None else reward_from(settings.reward)
    return opened(spec, folder=settings.folder, reward=reward, data=settings.data)


def _with_options(task: Task, options: Mapping[str, object]) -> Task:
    reward = replace(task.reward, options={**task.reward.options, **options})
    return replace(task, reward=reward)
