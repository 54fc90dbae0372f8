"""Whole runs in one call each, with progress and a clean stop: what the commands and Python use.

    ending = train(TrainSettings(model="runs/warm/model", task="gsm8k", out=Path("runs/gsm8k")))

The first Ctrl-C or SIGTERM asks for a stop, which finishes and saves the round; a second Ctrl-C
stops at once. Ray ends every process that uses it when its own processes on this machine are gone,
and no code of ours runs then: so another process waits for this one to end, and says how to resume.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from sortedrl.config.checks import require_native
from sortedrl.config.sft import SupervisedSettings
from sortedrl.config.sizes import Chosen, size_line, sized
from sortedrl.config.train import TrainSettings
from sortedrl.core.logs import Value
from sortedrl.errors import EngineLost, TrainerLost
from sortedrl.models.tiny import is_tiny, tiny_settings
from sortedrl.report.live.view import opened_view
from sortedrl.report.terminal import progress, refuse_unwritable_folder, tell
from sortedrl.rewards.functions import RewardSource
from sortedrl.runs.notebook import is_notebook, notebook_view
from sortedrl.runs.tasks import opened, training_tasks
from sortedrl.tasks.catalogue import Task

if TYPE_CHECKING:
    from sortedrl.runs.sft import SupervisedEnding
    from sortedrl.runs.training import Ending


Callback = Callable[[Mapping[str, Value]], object]
"""Is given the numbers of each update and each evaluation; one that returns `STOP` ends the run."""
STOP = "stop"

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


_NO_REWARD = RewardSource("sortedrl.rewards.maths:math_reward")
"""Rows of the user's own need some reward to be opened; none is called in supervised training."""


def train(
    settings: TrainSettings,
    *,
    is_resumed: bool = False,
    chosen: Chosen | None = None,
    reward: RewardSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> Ending:
    """Train with rewards until the run ends; `is_resumed` goes on from the newest checkpoint.

    Sizes that are not among the `chosen` settings follow the data; without `chosen` all settings
    are taken as they stand. A `reward` that is a Python object takes the place of the one that the
    settings name. On a cluster that lost its trainer, or all of its workers, the run goes on by
    itself.
    """
    _refuse_early(settings)
    # First of all: to read many rows, and to load the model, takes a while.
    tell(f"{settings.out}: {settings.model} on {settings.task}")
    task, held_out = training_tasks(settings, reward=reward)
    line = None
    if chosen is not None:
        settings = sized(settings, num_rows=len(task.rows), chosen=chosen)
        line = size_line(settings, num_rows=len(task.rows), chosen=chosen)
    tell(line or f"{len(task.rows):,} rows")
    for left in reversed(range(settings.cluster.restarts + 1)):
        try:
            return _train(
                settings,
                task=task,
                held_out=held_out,
                is_resumed=is_resumed,
                callbacks=callbacks,
            )
        except (TrainerLost, EngineLost) as error:
            if not settings.cluster.is_used or not left:
                raise
            tell(f"{error}\nResuming from the last checkpoint ({left} restarts left).")
            is_resumed = True
    raise AssertionError("the last try returns or raises")


def _refuse_early(settings: TrainSettings | SupervisedSettings) -> None:
    """Refuse what shows without a row or a weight: packages, the size of `tiny`, the folder."""
    require_native("training")
    if is_tiny(settings.model):
        tiny_settings(settings.model)
    refuse_unwritable_folder(settings.out)


def _train(
    settings: TrainSettings,
    *,
    task: Task,
    held_out: Sequence[Task],
    is_resumed: bool,
    callbacks: Sequence[Callback],
) -> Ending:
    from sortedrl.runs.opening import opened_run

    def hear(row: Mapping[str, Value]) -> None:
        for callback in callbacks:
            if callback(row) == STOP:
                stopping.is_asked = True

    with ExitStack() as stack:
        if settings.cluster.is_used:
            stack.enter_context(last_words(_cut_off(settings.out)))
        view = stack.enter_context(notebook_view() if is_notebook() else opened_view())
        stopping = stack.enter_context(Stopping(view.tell))
        view.advance("loading", 0.0)
        run = stack.enter_context(
            opened_run(
                settings,
                task=task,
                held_out=held_out,
                is_resumed=is_resumed,
                view=view,
                on_row=hear,
            )
        )
        return run.go(stopping)


def _cut_off(out: Path) -> str:
    """What a run says that could say nothing."""
    return (
        f"sortedrl: the run in {out} was cut short: its process was killed, or Ray's own processes "
        "on this machine were (gcs_server, raylet), and Ray ends every process that loses them. "
        f"Everything that was saved is intact; resume with: sortedrl train {out} --resume"
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


class Stopping:
    """Whether a stop was asked for, while it is entered."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is given a line for the person who asked."""
        self.is_asked = False
        self._tell = tell
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        """Listen to the signals; outside of the main thread there are none to listen to."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the signals to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal gave it

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_asked = True
        self._tell("stopping after this round is finished and saved (Ctrl-C again: at once)")
