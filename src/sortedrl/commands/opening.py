"""Tasks as the commands open them: files from the folder that is named, progress on long work."""

from __future__ import annotations

import os
from pathlib import Path

from sortedrl.data.settings import DataSettings
from sortedrl.rewards.source import RewardSource
from sortedrl.tasks.catalogue import open_task
from sortedrl.tasks.task import Task
from sortedrl.terminal import progress


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
