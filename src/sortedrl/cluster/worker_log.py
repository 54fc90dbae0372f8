"""Where the words of a worker go: a file in the folder of the run.

A worker on another machine may not see that folder. It then writes to a file of its own, and the
controller brings the text over when it closes the worker.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFolder:
    """The folder of the logs, and the name of a file in it that proves it is the same one."""

    folder: Path
    mark: str

    @classmethod
    def opened(cls, folder: Path) -> LogFolder:
        """Make the folder, with its mark."""
        folder.mkdir(parents=True, exist_ok=True)
        marks = sorted(folder.glob(".controller-*"))
        mark = marks[0].name if marks else f".controller-{uuid.uuid4().hex}"
        (folder / mark).touch()
        return cls(folder=folder.absolute(), mark=mark)

    @property
    def is_here(self) -> bool:
        """Whether this machine sees the folder."""
        return (self.folder / self.mark).exists()


class WorkerLog:
    """All that a process says from now on, in a file."""

    def __init__(self, name: str, folder: LogFolder | None) -> None:
        """Begin; without a folder the words stay with Ray."""
        self.path: Path | None = None
        self.is_away = False
        """Whether the file is not in the folder of the run."""
        if folder is None:
            return
        self.is_away = not folder.is_here
        place = Path(tempfile.mkdtemp(prefix="sortedrl-")) if self.is_away else folder.folder
        self.path = place / f"{name}.log"
        file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def text_away(self) -> str | None:
        """The text of a file that the controller cannot see; `None` if it can, or there is none."""
        if self.path is None or not self.is_away:
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        return self.path.read_text(errors="replace")
