"""Whole runs in one call each, with progress and a clean stop: what the commands and Python use.

ending = train(TrainSettings(model="runs/warm/model", task="gsm8k", out=Path("runs/gsm8k")))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sortedrl.errors import EngineLost, TrainerLost
from sortedrl.live.view import opened_view
from sortedrl.rewards.source import RewardSource
from sortedrl.runs.stopping import Stopping
from sortedrl.runs.tasks import opened, training_tasks
from sortedrl.tasks.task import Task
from sortedrl.terminal import progress, tell
from sortedrl.training.settings import TrainSettings
from sortedrl.training.supervision import SupervisedSettings

if TYPE_CHECKING:
    from sortedrl.runs.supervised import SupervisedEnding
    from sortedrl.runs.training import Ending

_NO_REWARD = RewardSource("sortedrl.rewards.maths:math_reward")
"""Rows of the user's own need some reward to be opened; none is called in supervised training."""


def train(settings: TrainSettings, *, is_resumed: bool = False) -> Ending:
    """Train with rewards until the run ends; `is_resumed` goes on from the newest checkpoint.

    On a cluster that lost its trainer, or all of its workers, the run goes on by itself.
    """
    settings.layout.refuse_several()
    task, held_out = training_tasks(settings)
    for left in reversed(range(settings.cluster.restarts + 1)):
        try:
            return _train(settings, task=task, held_out=held_out, is_resumed=is_resumed)
        except (TrainerLost, EngineLost) as error:
            if not settings.cluster.is_used or not left:
                raise
            tell(f"{error}\nThe run goes on from its last checkpoint ({left} restarts left).")
            is_resumed = True
    raise AssertionError("the last try returns or raises")


def _train(
    settings: TrainSettings, *, task: Task, held_out: Sequence[Task], is_resumed: bool
) -> Ending:
    from sortedrl.runs.opening import opened_run

    with opened_view() as view, Stopping(view.tell) as stopping:
        view.advance("loading", 0.0)
        with opened_run(
            settings, task=task, held_out=held_out, is_resumed=is_resumed, view=view
        ) as run:
            return run.go(stopping)


def warm_start(settings: SupervisedSettings) -> SupervisedEnding:
    """Train on written answers until the run ends."""
    task = opened(settings.task, folder=settings.folder, reward=_NO_REWARD, data=settings.data)
    from sortedrl.runs.supervised import supervised_run

    with Stopping(tell) as stopping, progress(1.0) as advance:
        return supervised_run(settings, task, stopping=stopping, advance=advance, tell=tell)
