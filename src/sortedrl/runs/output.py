"""How a run is shown besides its report: terminal lines, a notebook table, trackers.

A notebook shows the same view as a terminal, as a table that is redrawn in place; it needs only
IPython, and does nothing without it. A tracker (TensorBoard, Weights & Biases, trackio) never stops
a run: one that fails is disabled after one warning. The numbers themselves are in `metrics.jsonl`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from sortedrl.config.train import Tracking
from sortedrl.core.events import End, Event
from sortedrl.core.files import Value, write_whole
from sortedrl.core.meter import Figures, numbers
from sortedrl.evaluation.tables import percent
from sortedrl.report.live import View, activity
from sortedrl.report.live_state import Source
from sortedrl.report.terminal import thousands
from sortedrl.simulate.calls import html_table

if TYPE_CHECKING:
    from sortedrl.runs.training import Ending


_COLUMNS = 80


def update_line(
    update: int,
    *,
    numbers: Mapping[str, float],
    figures: Figures,
    done: float,
    seconds: float,
) -> str:
    """The line of one update, with the time left, in 80 columns; `done` is the share of the run.

    The speed is goodput: tokens trained on per second of rollout.
    """
    parts = [f"update {update:4d}"]
    if "reward/mean" in numbers:
        parts.append(f"reward {numbers['reward/mean']:6.3f}")
        parts.append(f"length {numbers['length/mean']:4.0f}")
    elif "held" in numbers:
        parts.append(f"held {numbers['held']:.0f} answers")
    parts += [f"bubble {100 * figures.bubble:2.0f} %", f"{thousands(figures.goodput):>6}/s"]
    if figures.staleness_max:
        parts.append(f"stale {figures.mean_staleness:.1f}")
    line = "  ".join(parts)
    for end in _progress(done, seconds):
        if len(line) + 2 + len(end) <= _COLUMNS:
            line += f"  {end}"
            break
    if numbers.get("skipped_steps"):
        line += "\n  skipped: the gradients were not finite"
    if numbers.get("unusable_answers"):
        line += f"\n  left out: {numbers['unusable_answers']:.0f} answers that were not finite"
    return line


def _progress(done: float, seconds: float) -> list[str]:
    """Progress and time left, the longest form first."""
    if not done > 0:
        return []
    left = f"{duration(seconds * (1 - done) / done)} left"
    return [f"{100 * done:3.0f} %, {left}", left, f"{100 * done:3.0f} %"]


def evaluation_line(update: int, scores: Mapping[str, float], rewards: Mapping[str, float]) -> str:
    """The scores of an evaluation: a line for each task; long names are cut."""
    lines = []
    for task, score in scores.items():
        reward = f", reward {rewards[task]:.3f}" if task in rewards else ""
        line = f"after update {update}: {percent(score)}{reward}  {task}"
        lines.append(line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 3]}...")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds as text.

    >>> [duration(s) for s in (8, 100, 7300)]
    ['8 s', '1 min 40 s', '2 h 1 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


_REASONS = {
    "data": "Finished: reached the end of the data",
    "updates": "Finished: reached max_updates",
    "target": "Finished: reached the target score",
    "asked": "Stopped on request",
}
_LONGER = {
    "data": "--epochs N",
    "updates": "--max-updates N",
    "target": "--evaluation.target SCORE",
}


def closing_table(ending: Ending) -> list[tuple[str, str]]:
    """The table at the end of a run."""
    figures, ledger = ending.figures, ending.figures.ledger
    table = [
        ("updates", f"{ending.updates:,}"),
        ("answers trained on", f"{figures.trajectories:,}"),
        ("tokens decoded / trained", f"{ledger.decoded:,} / {ledger.trained:,}"),
        ("bubble", percent(figures.bubble)),
        ("goodput", f"{thousands(figures.goodput)} tokens/s"),
        ("staleness, mean / max", f"{figures.mean_staleness:.2f} / {figures.staleness_max}"),
        ("time", duration(figures.seconds)),
    ]
    if ending.first_scores is not None and ending.last_scores is not None:
        for task, score in ending.last_scores.by_task.items():
            before = ending.first_scores.by_task.get(task)
            began = "" if before is None else f"{percent(before)} -> "
            table.append((f"accuracy, {task}", began + percent(score)))
        for task, reward in ending.last_scores.rewards_by_task.items():
            before = ending.first_scores.rewards_by_task.get(task)
            began = "" if before is None else f"{before:.3f} -> "
            table.append((f"reward, {task}", f"{began}{reward:.3f}"))
    return table


def closing_lines(ending: Ending, folder: Path) -> list[str]:
    """Why the run ended, and what to do next."""
    resume = f"sortedrl train {quote(str(folder))} --resume"
    if ending.reason == "asked":
        advice = f"Saved; resume with: {resume}"
    else:
        longer = _LONGER[ending.reason]
        advice = f"The model is in {folder / 'model'}; to train longer: {resume} {longer}"
    return [f"{_REASONS[ending.reason]}.", advice]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run, as the trackers name it."""

    folder: Path
    """The folder of the run; its name is the name of the run."""
    settings: Mapping[str, object]
    """The resolved settings, as JSON values."""
    resumed_step: int | None = None
    """The step of the checkpoint that the run resumes from; `None` for a new run."""


class Tracker(Protocol):
    """One place that shows numbers."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Show the numbers of a step."""

    def close(self) -> None:
        """Write everything that is buffered."""


class TensorBoard:
    """TensorBoard files in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        """Add a file, which hides the points from the first step of this run on.

        These are the ones after the checkpoint, or all that an older run left in the folder.
        """
        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(run.folder / "tensorboard"), purge_step=first_step)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """One point per number, on the disk at once: a killed run loses none."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Remote:
    """A run of Weights & Biases or of trackio, which have the same methods."""

    def __init__(self, run: Any) -> None:  # noqa: ANN401
        """The run as their `init` gives it."""
        self._run = run

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def weights_and_biases(project: str, run: TrackedRun) -> Remote:
    """A new run of a W&B project, or the same again.

    A step that comes again after a resume is ignored there, so it is never doubled.
    """
    return Remote(
        import_module("wandb").init(
            project=project,
            name=run.folder.name,
            id=_identity(run, "wandb"),
            dir=str(run.folder),
            config=dict(run.settings),
            resume="never" if run.resumed_step is None else "allow",
        )
    )


def trackio(project: str, run: TrackedRun) -> Remote:
    """A new run of a trackio project, or the same again; trackio identifies runs by name.

    Steps repeated after a resume appear twice.
    """
    return Remote(
        import_module("trackio").init(
            project=project,
            name=f"{run.folder.name}-{_identity(run, 'trackio')}",
            config=dict(run.settings),
            resume="never" if run.resumed_step is None else "allow",
        )
    )


class Trackers:
    """Several trackers as one, none of which can stop the run."""

    def __init__(
        self, makers: Mapping[str, Callable[[], Tracker]], *, warn: Callable[[str], None]
    ) -> None:
        """Make each tracker; `warn` is called once for each that fails, then or later."""
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            try:
                self._trackers[name] = make()
            except Exception as error:  # noqa: BLE001  foreign code, and no reason not to train
                self._disable(name, error)

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that work."""
        return tuple(self._trackers)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Show the numbers of a step everywhere."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(values, step=step)
            except Exception as error:  # noqa: BLE001  foreign code, and no reason to stop
                self._disable(name, error)

    def close(self) -> None:
        """Close all; calling it again does nothing."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001  foreign code, and the run is over
                self._disable(name, error)
        self._trackers.clear()

    def _disable(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        self._warn(
            f"{name} failed and is disabled ({type(error).__name__}: {error}); "
            "the run continues, and its metrics are in metrics.jsonl"
        )


def open_trackers(tracking: Tracking, run: TrackedRun, *, warn: Callable[[str], None]) -> Trackers:
    """The trackers of the settings, opened."""
    tracking.check_installed()
    makers: dict[str, Callable[[], Tracker]] = {}
    if tracking.tensorboard:
        makers["tensorboard"] = lambda: TensorBoard(run)
    if (wandb_project := tracking.wandb) is not None:
        makers["wandb"] = lambda: weights_and_biases(wandb_project, run)
    if (trackio_project := tracking.trackio) is not None:
        makers["trackio"] = lambda: trackio(trackio_project, run)
    return Trackers(makers, warn=warn)


def _identity(run: TrackedRun, tracker: str) -> str:
    """A name that no other run has, kept in the run's folder for when it is resumed."""
    path = run.folder / f"{tracker}_id"
    if run.resumed_step is not None and path.exists():
        return path.read_text(encoding="utf-8")
    identity = uuid4().hex[:16]
    write_whole(path, identity.encode())
    return identity


_SECONDS_PER_FRAME = 0.5
_SHOWN_ROWS = 8
_SHOWN_LINES = 6
_TABLE_COLUMNS = {
    "update": "update",
    "reward/mean": "reward",
    "length/mean": "length",
    "rollout/bubble": "bubble",
    "rollout/goodput": "tokens/s",
    "evaluation/score": "score",
}
"""The columns of the table, by the names in metrics.jsonl."""
_SHARES = ("rollout/bubble", "evaluation/score")
_FRAME = '<div><iframe srcdoc="{}" style="width: 100%; height: 900px; border: 0"></iframe></div>'
"""Inside a div: IPython warns of HTML that is only a frame."""

Show = Callable[[str], None]
"""Replaces the HTML of one output."""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


def show_page(html: str) -> None:
    """Show a whole page under the cell, in a frame of its own; outside of a notebook, nothing."""
    if is_notebook():
        _shown(_FRAME.format(escape(html)))


def _shown(html: str) -> Show:
    """Show HTML under the cell; returns what replaces it."""
    display = import_module("IPython.display")
    handle = display.display(display.HTML(html), display_id=True)
    return lambda changed: handle.update(display.HTML(changed))


@contextmanager
def notebook_view() -> Iterator[View]:
    """A view under the cell that runs."""
    view = NotebookView(_shown("loading"))
    try:
        yield view
    finally:
        view.draw()


class NotebookView:
    """The last updates as a table, the current activity above it, and the last lines below."""

    def __init__(self, show: Show) -> None:
        """Draw with `show`, at most twice a second."""
        self._show = show
        self._rows: deque[Mapping[str, Value]] = deque(maxlen=_SHOWN_ROWS)
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._what, self._done = "", 0.0
        self._drawn = 0.0

    def watch(self, source: Source) -> None:
        """The run is loaded; its events follow."""
        self._what = f"{source.schedule}, {source.slots} slots, on {source.device}"

    def __call__(self, event: Event) -> None:
        """Show the next event."""
        self._what = activity(event) or self._what
        if isinstance(event, End):
            self._what, self._done = f"finished: {event.trained:,} answers trained", 1.0
        self._draw_soon()

    def updated(self, row: Mapping[str, Value]) -> None:
        """Show a row of metrics, of an update or of an evaluation."""
        self._rows.append(row)
        self._draw_soon()

    def advance(self, what: str, done: float) -> None:
        """Show the current activity, and the share of the run that is done."""
        self._what, self._done = what, done
        self._draw_soon()

    def tell(self, line: str) -> None:
        """Show a line; that of an update is in the table already."""
        if not line.startswith("update "):
            self._lines.append(line)
        self._draw_soon()

    def draw(self) -> None:
        """Draw now."""
        self._drawn = time.monotonic()
        self._show(self._html())

    def _draw_soon(self) -> None:
        if time.monotonic() - self._drawn >= _SECONDS_PER_FRAME:
            self.draw()

    def _html(self) -> str:
        used = [name for name in _TABLE_COLUMNS if any(name in row for row in self._rows)]
        table = html_table(
            [_TABLE_COLUMNS[name] for name in used],
            [[_cell(name, row.get(name)) for name in used] for row in self._rows],
        )
        lines = escape("\n".join(self._lines))
        return (
            f'<div>{escape(self._what)}<br><progress value="{self._done:.4f}" max="1" '
            f'style="width: 100%"></progress>{table}'
            f"<pre>{lines}</pre></div>"
        )


def _cell(name: str, value: Value | None) -> str:
    if value is None:
        return ""
    if name in _SHARES and isinstance(value, float):
        return percent(value)
    return f"{value:,.3g}" if isinstance(value, float) else str(value)
