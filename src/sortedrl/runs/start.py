"""Words for the person whose run ends without any: its process was killed, or Ray has ended it.

Ray ends every process that uses it when its own processes on this machine are gone, and no code of
ours runs then. So another process, which has the words, waits for this one to end.

How a run ended, for a person and for a script.

Whole runs in one call each, with progress and a clean stop: what the commands and Python use.

ending = train(TrainSettings(model="runs/warm/model", task="gsm8k", out=Path("runs/gsm8k")))
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.config.schedule import require_native
from sortedrl.config.sft import SupervisedSettings
from sortedrl.config.train import TrainSettings
from sortedrl.core.metrics import numbers
from sortedrl.errors import EngineLost, TrainerLost
from sortedrl.models.tiny import is_tiny, tiny_settings
from sortedrl.report.live.view import opened_view
from sortedrl.report.terminal import percent, progress, refuse_unwritable_folder, tell, thousands
from sortedrl.rewards.functions import RewardSource
from sortedrl.runs.evaluation import opened, training_tasks
from sortedrl.runs.training import Ending, Stopping, duration
from sortedrl.tasks.catalogue import Task

if TYPE_CHECKING:
    from sortedrl.runs.sft import SupervisedEnding
    from sortedrl.runs.training import Ending


# Who leaves the block writes something; the end of a process only ends its pipe.
_WATCH = "import sys; sys.stdin.read() or sys.stderr.write(sys.argv[1] + chr(10))"


@contextmanager
def last_words(words: str) -> Iterator[None]:
    """Have these words said on standard error if this process ends within the block."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCH, words],
        stdin=subprocess.PIPE,
        # Ctrl-C is meant for the run alone.
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate(b"it lives")


_REASONS = {
    "data": "the data is used up",
    "updates": "max_updates is reached",
    "target": "the target score is reached",
    "asked": "a stop was asked for",
}


def rows(ending: Ending) -> list[tuple[str, str]]:
    """The closing table."""
    figures, ledger = ending.figures, ending.figures.ledger
    table = [
        ("updates", f"{ending.updates:,}"),
        ("answers trained on", f"{figures.trajectories:,}"),
        ("tokens decoded / trained", f"{ledger.decoded:,} / {ledger.trained:,}"),
        ("bubble", percent(figures.bubble)),
        ("goodput", f"{thousands(figures.goodput)} tokens/s"),
        ("staleness, mean / most", f"{figures.mean_staleness:.2f} / {figures.staleness_max}"),
        ("time", duration(figures.seconds)),
    ]
    if ending.first_scores is not None and ending.last_scores is not None:
        for task, score in ending.last_scores.by_task.items():
            before = ending.first_scores.by_task.get(task)
            began = "" if before is None else f"{percent(before)} -> "
            table.append((f"right answers, {task}", began + percent(score)))
    return table


def words(ending: Ending, folder: Path) -> list[str]:
    """Why it ended, and what to do next."""
    lines = [f"Ended because {_REASONS[ending.reason]}."]
    if ending.reason == "asked":
        lines.append(f"Saved; go on with: sortedrl train {folder} --resume")
    else:
        lines.append(f"The model is in {folder / 'model'}; the run can be gone on with (--resume).")
    return lines


def as_row(ending: Ending, folder: Path) -> dict[str, object]:
    """One JSON object."""
    return {
        "folder": str(folder),
        "reason": ending.reason,
        "updates": ending.updates,
        **numbers(ending.figures),
        "first_scores": None if ending.first_scores is None else ending.first_scores.by_task,
        "last_scores": None if ending.last_scores is None else ending.last_scores.by_task,
    }


_NO_REWARD = RewardSource("sortedrl.rewards.maths:math_reward")
"""Rows of the user's own need some reward to be opened; none is called in supervised training."""


def train(settings: TrainSettings, *, is_resumed: bool = False) -> Ending:
    """Train with rewards until the run ends; `is_resumed` goes on from the newest checkpoint.

    On a cluster that lost its trainer, or all of its workers, the run goes on by itself.
    """
    _refuse_early(settings)
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


def _refuse_early(settings: TrainSettings | SupervisedSettings) -> None:
    """Refuse what shows without a row or a weight: packages, the size of `tiny`, the folder."""
    require_native("training")
    if is_tiny(settings.model):
        tiny_settings(settings.model)
    refuse_unwritable_folder(settings.out)


def _train(
    settings: TrainSettings, *, task: Task, held_out: Sequence[Task], is_resumed: bool
) -> Ending:
    from sortedrl.runs.opening import opened_run

    with ExitStack() as stack:
        if settings.cluster.is_used:
            stack.enter_context(last_words(_cut_off(settings.out)))
        view = stack.enter_context(opened_view())
        stopping = stack.enter_context(Stopping(view.tell))
        view.advance("loading", 0.0)
        run = stack.enter_context(
            opened_run(settings, task=task, held_out=held_out, is_resumed=is_resumed, view=view)
        )
        return run.go(stopping)


def _cut_off(out: Path) -> str:
    """What a run says that could say nothing."""
    return (
        f"sortedrl: the run in {out} was cut off: its process was killed, or Ray's own processes "
        "on this machine were (gcs_server, raylet), and Ray ends whoever has lost them. All that "
        f"was saved is whole; go on with: sortedrl train {out} --resume"
    )


def warm_start(settings: SupervisedSettings) -> SupervisedEnding:
    """Train on written answers until the run ends."""
    _refuse_early(settings)
    task = opened(
        settings.task,
        split="train",
        folder=settings.folder,
        reward=_NO_REWARD,
        data=settings.data,
    )
    from sortedrl.runs.sft import supervised_run

    with Stopping(tell) as stopping, progress(1.0) as advance:
        return supervised_run(settings, task, stopping=stopping, advance=advance, tell=tell)
