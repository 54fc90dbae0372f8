"""The checkpoints of a run: the last few and the best, each a folder that is complete or ignored.

    update-000100/            the best
    update-000150/            the last but one
    update-000200/            the last
    update-000250.partial/    being written, or left by a process that was killed

Nothing outside of these folders is remembered: a checkpoint carries its own score, so a process
killed between saving and deleting leaves nothing but a folder too many for the next save.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from sortedrl.errors import CheckpointError
from sortedrl.training.checkpoint import PARTIAL, inspect, save, settle, verify

_NAME = re.compile(r"update-(\d{6,})")
_SCORE = "score.json"
_ABANDONED = ".abandoned"


class Checkpoints:
    """The folder that holds them."""

    def __init__(
        self, folder: Path, *, keep_last: int, keep_best: bool, warn: Callable[[str], None]
    ) -> None:
        """Nothing is read or written yet; `warn` is told of what is skipped or set aside."""
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._warn = warn

    def path_for(self, update: int) -> Path:
        """Where the checkpoint of an update lies."""
        return self._folder / f"update-{update:06d}"

    def save(
        self, update: int, write: Callable[[Path], None], *, score: float | None = None
    ) -> Path:
        """Save what `write` puts into a folder, and delete what need not be kept any more.

        Without a score a checkpoint is never the best one.
        """

        def write_with_score(folder: Path) -> None:
            write(folder)
            (folder / _SCORE).write_text(json.dumps({"score": score}) + "\n")

        self._settle()
        self._remove_leftovers()
        path = self.path_for(update)
        older = (folder for folder in self.complete() if folder != path)
        save(path, write_with_score, previous=next(older, None))
        self._set_future_aside(update)
        self._prune()
        return path

    def complete(self) -> list[Path]:
        """Those whose files all have their sizes, the newest first; contents are not read."""
        return [folder for folder in self._named() if _problem(folder, inspect) is None]

    @property
    def num_named(self) -> int:
        """How many there are, complete or not."""
        return len(self._named())

    def newest(self) -> Path | None:
        """The newest whose every byte is right; tells of those that had to be skipped."""
        self._settle()
        for folder in self._named():
            problem = _problem(folder, verify)
            if problem is None:
                return folder
            self._warn(f"checkpoint {folder.name} is skipped: {problem}")
        return None

    def best(self) -> Path | None:
        """The one with the highest score; of several, the oldest."""
        scores = {folder: _score(folder) for folder in reversed(self.complete())}
        scored = {folder: score for folder, score in scores.items() if score is not None}
        return max(scored, key=scored.__getitem__, default=None)

    def _named(self) -> list[Path]:
        """Everything with the name of a checkpoint, the newest first."""
        if not self._folder.is_dir():
            return []
        named = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(named, key=_update, reverse=True)

    def _settle(self) -> None:
        for path in self._folder.glob("update-*"):
            found = _NAME.match(path.name)
            if found:
                settle(self._folder / found[0])

    def _prune(self) -> None:
        complete = self.complete()
        best = self.best() if self._keep_best else None
        for folder in complete[self._keep_last :]:
            if folder == best:
                continue
            # Renamed first: half a checkpoint never has the name of a whole one.
            doomed = folder.with_name(folder.name + PARTIAL)
            try:
                folder.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                self._warn(f"{folder}: the old checkpoint cannot be deleted ({error.strerror})")

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(f"update-*{PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)

    def _set_future_aside(self, update: int) -> None:
        """Take the names of later updates away from a future that the run has left behind."""
        for folder in self._named():
            if _update(folder) > update:
                aside = _free_name(folder)
                folder.rename(aside)
                self._warn(
                    f"checkpoint {folder.name} is later than update {update}, from which this run "
                    f"went on; it is now called {aside.name}, delete it if you do not need it"
                )


def _update(folder: Path) -> int:
    return int(folder.name.removeprefix("update-"))


def _problem(folder: Path, check: Callable[[Path], object]) -> str | None:
    try:
        check(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _score(folder: Path) -> float | None:
    try:
        score = json.loads((folder / _SCORE).read_bytes())["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if isinstance(score, int | float) and not math.isnan(score) else None


def _free_name(folder: Path) -> Path:
    aside = folder.with_name(folder.name + _ABANDONED)
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}{_ABANDONED}-{number}")
    return aside
