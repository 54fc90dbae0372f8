"""The folder of a run: its files, its lock, and which settings may change on resume.

run.json          the mark of a run: start, machine, commit; locked by the process that writes here
config.toml       every setting, as resolved
events.jsonl      all events
metrics.jsonl     one line of numbers for each update
answers.jsonl     some answers of each update, as text
inputs/           the model and the rows, where Python objects were given
checkpoints/      the last complete ones, and the best
logs/             output of the workers of a cluster
tensorboard/      the metrics as curves, if enabled
model/            the trained model, as transformers reads it

One process at a time writes to a folder. A new run touches nothing that is there already.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from sortedrl import __version__
from sortedrl.config.parsing import flat, under_new_keys
from sortedrl.config.train import TrainSettings
from sortedrl.core.files import write_whole
from sortedrl.errors import CheckpointError, ConfigError, DataError, os_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def run_facts(device: str) -> dict[str, str]:
    """Start time, machine and versions of a run, for `run.json`."""
    facts = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{device_name(device)}, {os.cpu_count()} CPU cores",
        "sortedrl": __version__,
    }
    found = commit(Path(__file__).parent)
    return facts | ({"commit": found} if found is not None else {})


def device_name(device: str) -> str:
    """The GPU or the processor by name."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def commit(folder: Path) -> str | None:
    """The commit of a folder that git tracks; `None` for any other, such as an installed package.

    `SORTEDRL_COMMIT` overrides it, for a copy without the history.
    """
    if given := os.environ.get("SORTEDRL_COMMIT"):
        return given
    if not _git(["ls-files", "."], folder):
        return None
    return _git(["describe", "--always", "--dirty", "--exclude=*"], folder)


def _git(arguments: Sequence[str], folder: Path) -> str | None:
    """What git prints; `None` where it is missing, or fails."""
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None


_MAY_CHANGE = (
    "out",
    "epochs",
    "max_updates",
    "device",
    "threads",
    "folder",
    "rollout.urls",
    "rollout.options",
    "rollout.weight_sync_folder",
    "rollout.cache_gib",
    "optimiser.learning_rate",
    "optimiser.schedule",
    "optimiser.warmup_steps",
    "optimiser.min_lr_ratio",
    "optimiser.max_grad_norm",
    "optimiser.max_bad_updates",
    "optimiser.state",
    "optimiser.gradients",
    "passes",
    "cluster",
    "rewards.workers",
    "rewards.time_limit_seconds",
    "rewards.memory_gib",
    "rewards.on_failure",
    "rewards.batch",
    "rewards.concurrency",
    "evaluation",
    "saving",
    "tracking",
)
"""Settings, and whole sections, that may change when a run is resumed.

They do not change which rows are trained on, in which order, or how answers are drawn and scored,
but the length of the run, its hardware, its memory, its learning rate from here on, and what is
logged and saved. The schedule of the learning rate follows the new `epochs` and `max_updates`.
"""
_MAY_FALL = ("engine.slots",)
"""May be lowered; not raised, as the bubble is measured against the slots of the start."""
_FORMAT = "sortedrl-run"


class RunFolder:
    """The paths in a run's folder."""

    def __init__(self, root: Path) -> None:
        """Nothing is read or written."""
        self.root = root
        self.mark = root / "run.json"
        self.config = root / "config.toml"
        self.events = root / "events.jsonl"
        self.metrics = root / "metrics.jsonl"
        self.answers = root / "answers.jsonl"
        self.checkpoints = root / "checkpoints"
        self.inputs = root / "inputs"
        self.model = root / "model"

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        logs = (self.events, self.metrics, self.checkpoints)
        return self.mark.exists() or (self.config.exists() and any(p.exists() for p in logs))

    def refuse_second_run(self, *, can_resume: bool = True) -> None:
        """Refuse a folder that holds a run already, or files that a run would overwrite."""
        if self.holds_run:
            advice = "resume it (--resume), or choose" if can_resume else "choose"
            raise ConfigError(f"{self.root} already holds a run; {advice} another folder (--out)")
        logs = (self.events, self.metrics, self.answers)
        written = (self.config, *logs, self.checkpoints, self.model)
        taken = [path.name for path in written if os.path.lexists(path)]
        if taken:
            raise ConfigError(
                f"a new run would overwrite {', '.join(taken)} in {self.root}, not written by a "
                "run of ours; move them, or choose another folder (--out)"
            )

    @contextmanager
    def left_as_found(self) -> Iterator[None]:
        """Remove the folders that were made in the block and are empty if it fails."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        try:
            yield
        except BaseException:
            for path in missing:
                with suppress(OSError):  # one that holds anything stays
                    path.rmdir()
            raise

    @contextmanager
    def created(
        self, config: str, *, facts: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[None]:
        """Start a run: make the folder, lock it, and write the settings and facts about the run.

        A block that fails before anything was logged leaves none of it behind. The lock ends with
        the block, or with the process, however that ends.
        """
        self.refuse_second_run()
        with os_errors(self.root, "cannot be written"):
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                file = self.mark.open("x")
            except FileExistsError as error:
                raise self._refusal_of_second() from error
        with file:
            self._lock(file)
            try:
                self._write_mark(facts)
                self.write(config)
                yield
            except BaseException:
                self._undo()
                raise

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """Lock the folder of a run that is resumed."""
        with os_errors(self.root, "cannot be written"):
            file = self.mark.open("a")
        with file:
            self._lock(file)
            self._write_mark({})
            yield

    def write(self, config: str) -> None:
        """Write the settings, in place of older ones."""
        with os_errors(self.root, "cannot be written"):
            write_whole(self.config, config.encode())

    def require_in_place(self) -> None:
        """Refuse to save into a folder that was moved or removed during the run."""
        if not self.mark.exists():
            raise CheckpointError(
                f"{self.root} was moved or deleted during the run, so nothing more can be saved "
                "there; resume the run from where its last checkpoint is, or start a new one"
            )

    def _lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refusal_of_second() from error
        except OSError as error:
            # Some network file systems have no locks, and a run continues without.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise DataError(self.mark, f"cannot be locked ({error.strerror})") from error

    def _write_mark(self, facts: Mapping[str, str]) -> None:
        with os_errors(self.mark, "cannot be written"):
            if not self.mark.stat().st_size:
                mark = {"format": _FORMAT, "version": 1, **facts}
                self.mark.write_text(json.dumps(mark) + "\n")

    def _undo(self) -> None:
        """Remove the files of a run that failed before it logged anything."""
        logs = (self.events, self.metrics, self.answers)
        if self.checkpoints.exists() or any(p.exists() and p.stat().st_size for p in logs):
            return
        for path in (*logs, self.config, self.mark):
            path.unlink(missing_ok=True)

    def _refusal_of_second(self) -> ConfigError:
        return ConfigError(
            f"another process is training in {self.root}; wait for it to finish, stop it, or "
            "choose another folder (--out)"
        )


def settings_at(settings: TrainSettings, folder: Path) -> TrainSettings:
    """The settings of a run whose folder now lies at `folder`: its inputs have moved with it."""
    before = settings.out
    evaluation = replace(
        settings.evaluation,
        tasks=tuple(_input_at(spec, before, folder) for spec in settings.evaluation.tasks),
    )
    return replace(
        settings,
        out=folder,
        model=_input_at(settings.model, before, folder),
        task=_input_at(settings.task, before, folder),
        evaluation=evaluation,
    )


def _input_at(spec: str, before: Path, folder: Path) -> str:
    """A model or a task; one of the inputs of the run is named by where they are now."""
    inputs, path = RunFolder(before).inputs, Path(spec)
    if not path.is_relative_to(inputs):
        return spec
    return str(RunFolder(folder).inputs / path.relative_to(inputs))


def as_saved(settings: DataclassInstance) -> dict[str, Any]:
    """Settings as JSON values, as a checkpoint has them."""
    saved: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return saved


def refuse_other_settings(saved: Mapping[str, Any], given: DataclassInstance) -> list[str]:
    """Refuse to resume with settings that would make it another run; returns other differences.

    `saved` are the settings of the checkpoint, as `as_saved` gave them.
    """
    allowed: list[str] = []
    refused: list[str] = []
    # A setting that is newer than the checkpoint was as it is by default.
    defaults = flat(as_saved(type(given)()))
    found = under_new_keys(saved)
    if isinstance(given, TrainSettings) and "out" in found:
        for name in ("model", "task"):
            found[name] = _input_at(found[name], Path(found["out"]), given.out)
    known = flat(found)
    for name, after in flat(as_saved(given)).items():
        before = known.get(name, defaults[name])
        if before == after:
            continue
        change = f"{name} was {before!r}, is {after!r}"
        (allowed if _may_change(name, before, after) else refused).append(change)
    if refused:
        raise ConfigError(
            f"a run must be resumed with the settings its checkpoint was saved with; "
            f"{'; '.join(refused)}; restore them (in config.toml or with flags), or start a new "
            "run (another --out), optionally from the checkpoint's model (--model)"
        )
    return allowed


def _may_change(name: str, before: object, after: object) -> bool:
    if name in _MAY_FALL:
        return isinstance(before, int) and isinstance(after, int) and after < before
    parts = name.split(".")
    return any(".".join(parts[:count]) in _MAY_CHANGE for count in range(1, len(parts) + 1))
