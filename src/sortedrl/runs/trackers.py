"""Where a run's numbers go to be looked at: TensorBoard, Weights & Biases, trackio.

A tracker never stops a run: one that fails is disabled after one warning. The numbers themselves
are in `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from sortedrl.config.train import Tracking
from sortedrl.core.files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What the trackers are told about the run."""

    folder: Path
    """The folder of the run; its name is the name of the run."""
    settings: Mapping[str, object]
    """The resolved settings, as JSON values."""
    resumed_step: int | None = None
    """The step of the checkpoint that the run goes on from; `None` for a new run."""


class Tracker(Protocol):
    """One place that shows numbers."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Show the numbers of a step."""

    def close(self) -> None:
        """Bring everything out."""


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
    """A run of Weights & Biases or of trackio, which are called alike."""

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
    """A new run of a trackio project, or the same again; trackio knows runs by their names.

    Steps that come again after a resume are there twice.
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
        """Make each tracker; `warn` is told, once, of each that fails then or later."""
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            try:
                self._trackers[name] = make()
            except Exception as error:  # noqa: BLE001  foreign code, and no reason not to train
                self._switch_off(name, error)

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
                self._switch_off(name, error)

    def close(self) -> None:
        """Bring everything out; calling it again does nothing."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001  foreign code, and the run is over
                self._switch_off(name, error)
        self._trackers.clear()

    def _switch_off(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        self._warn(
            f"{name} failed and is disabled ({type(error).__name__}: {error}); "
            "the run continues, and its metrics are in metrics.jsonl"
        )


def open_trackers(tracking: Tracking, run: TrackedRun, *, warn: Callable[[str], None]) -> Trackers:
    """The trackers that were asked for, opened."""
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
