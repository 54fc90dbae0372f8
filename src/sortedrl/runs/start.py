"""Whole runs in one call each, with progress and a clean stop: what the commands and Python use.

    ending = train(TrainSettings(model="runs/warm/model", task="gsm8k", out=Path("runs/gsm8k")))

The first Ctrl-C or SIGTERM requests a stop, which finishes and saves the round; a second Ctrl-C
stops at once. Ray kills every process that uses it when its own processes on this machine end, and
no code of ours runs then: so another process waits for this one to end, and prints how to resume.

A smoke run has the workers, ranks, algorithm and schedule of a run, with a tiny model, on CPUs. It
takes two updates and a few minutes, and shows whether the parts work together before GPUs are
rented for it. Its first lines list what it replaces.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING

from sortedrl.config.checks import require, require_native
from sortedrl.config.data import DataSettings, PeriodicEvaluation
from sortedrl.config.sizes import Chosen, size_line, sized
from sortedrl.config.train import Saving, SupervisedSettings, Tracking, TrainSettings
from sortedrl.core.files import Value, free_path
from sortedrl.data.catalogue import Task
from sortedrl.errors import EngineLost, TrainerLost
from sortedrl.models.shape import refuse_wrong_path
from sortedrl.models.tiny import is_tiny, tiny_settings
from sortedrl.report.live import opened_view
from sortedrl.report.terminal import progress, refuse_unwritable_folder, tell
from sortedrl.rewards.functions import RewardSource
from sortedrl.runs.folder import RunFolder
from sortedrl.runs.output import is_notebook, notebook_view
from sortedrl.runs.tasks import opened, threads, training_tasks

if TYPE_CHECKING:
    from sortedrl.runs.sft import SupervisedEnding
    from sortedrl.runs.training import Ending


Callback = Callable[[Mapping[str, Value]], object]
"""Called with the metrics of each update and each evaluation; returning `STOP` ends the run."""
STOP = "stop"

# Leaving the block writes to the pipe; the end of the process only closes it.
_WATCH = "import sys; sys.stdin.read() or sys.stderr.write(sys.argv[1] + chr(10))"


@contextmanager
def message_on_exit(message: str) -> Iterator[None]:
    """Print a message on standard error if this process ends within the block."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCH, message],
        stdin=subprocess.PIPE,
        # Ctrl-C stops the run alone.
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate(b"alive")


_NO_REWARD = RewardSource("sortedrl.rewards.maths:math_reward")
"""Rows of a file are opened with some reward; supervised training calls none."""


def train(
    settings: TrainSettings,
    *,
    is_resumed: bool = False,
    chosen: Chosen | None = None,
    reward: RewardSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> Ending:
    """Train with rewards until the run ends; `is_resumed` resumes from the newest checkpoint.

    Sizes that are not among the `chosen` settings follow the data; without `chosen` all settings
    are used as they are. A `reward` that is a Python object replaces that of the settings. On a
    cluster that lost its trainer, or all of its workers, the run resumes automatically.
    """
    is_list: bool = isinstance(callbacks, Sequence)
    require(
        is_list and all(map(callable, callbacks)),
        f"callbacks must be a list of functions, got {callbacks!r:.80}; give [callback]",
    )
    _refuse_early(settings)
    if not is_resumed:
        RunFolder(settings.out).refuse_second_run()
    # Before rows and model are read, which takes a while.
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
    """Check what needs neither rows nor weights: packages, and the paths of model and run."""
    require_native("training")
    if is_tiny(settings.model):
        tiny_settings(settings.model)
    refuse_wrong_path(settings.model)
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

    def on_row(row: Mapping[str, Value]) -> None:
        for callback in callbacks:
            if callback(row) == STOP:
                stopping.is_requested = True

    with ExitStack() as stack:
        if settings.cluster.is_used:
            stack.enter_context(message_on_exit(_cut_short(settings.out)))
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
                on_row=on_row,
            )
        )
        return run.go(stopping)


def _cut_short(out: Path) -> str:
    """The message about a run whose process was killed."""
    return (
        f"sortedrl: the run in {out} was cut short: its process was killed, or Ray's own processes "
        "on this machine were (gcs_server, raylet), and Ray ends every process that loses them. "
        "Everything that was saved is intact; resume with: "
        f"sortedrl train {quote(str(out))} --resume"
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

    with (
        threads(settings.threads, workers=1),
        Stopping(tell) as stopping,
        progress(1.0) as advance,
    ):
        return supervised_run(settings, task, stopping=stopping, advance=advance, tell=tell)


class Stopping:
    """Whether a stop was requested by a signal, inside a `with` block."""

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        message: str = "stopping after this round is finished and saved",
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """A request prints `message` with `tell`, and then calls `then`."""
        self.is_requested = False
        self._tell, self._message, self._then = tell, message, then
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        """Handle the signals; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal gave it

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_requested = True
        self._tell(f"{self._message} (Ctrl-C again: at once)")
        self._then()


_TASK = "knights_knaves:people=2,count=128,style=compact"
_UPDATES = 2
_MAX_TOKENS = 24
_SLOTS_EACH = 2
_GROUP_ANSWERS = 32
_PASS_TOKENS = 2048
_START_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class SmokeRun:
    """The settings of a smoke run, and lines that list what they replace."""

    settings: TrainSettings
    lines: Sequence[str]


def smoke_run(settings: TrainSettings) -> SmokeRun:
    """The smoke run of these settings, on the CPUs of this machine."""
    lines = []
    cluster, rollout, schedule = settings.cluster, settings.rollout, settings.schedule
    out = settings.out
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
                "kind separated in place of colocated: on CPUs a worker shares its bundle with one "
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
            out=free_path(out.parent, (f"{out.name}-smoke-{number}" for number in count(1))),
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
