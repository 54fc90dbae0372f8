"""A run that is followed: its record as of the last look, and what keeps it from being newer.

A run may be watched before it has started: until its log opens there is no record, and `note` says
what is waited for. A look that goes wrong leaves the record as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sortedrl.errors import DataError
from sortedrl.events import Begin, End
from sortedrl.report.record import BESIDE, RunRecord, run_names, with_files
from sortedrl.report.watch.tail import Tail

_Print = tuple[int, int] | None
"""Length and time of a file, by which a change shows; `None` where there is none."""


class FollowedRun:
    """A run's folder, or a bare log of events, looked at again and again."""

    def __init__(self, path: Path, *, name: str) -> None:
        self.path = path
        self.name = name
        self.record: RunRecord | None = None
        self.note: str | None = None
        self._prints: list[_Print] | None = None
        self._tail: Tail | None = None

    @property
    def is_ended(self) -> bool:
        """Whether its log says that the prompts are used up."""
        return self.record is not None and isinstance(self.record.events[-1], End)

    @property
    def written(self) -> float | None:
        """When its log was last written, in seconds since 1970, as of the last look."""
        log = None if self._prints is None else self._prints[1]
        return None if log is None else log[1] / 1e9

    def look(self) -> bool:
        """Read what is new; whether record or note may have changed."""
        # Taken before reading: what is written meanwhile is seen by the next look.
        beside = (self.path / name for name in BESIDE)
        prints = [_fingerprint(path) for path in (self.path, self._log, *beside)]
        if prints == self._prints:
            return False
        self._prints = prints
        try:
            self.note = self._read()
        except DataError as error:
            self.note = str(error)
        except OSError as error:
            self.note = f"{self.path} cannot be read ({error.strerror})"
        return True

    @property
    def _log(self) -> Path:
        return self.path if self.path.is_file() else self.path / "events.jsonl"

    def _read(self) -> str | None:
        """Renew the record; or tell what it waits for."""
        if not self.path.exists():
            return f"{self.path} does not exist yet; waiting for the run to start"
        log = self._log
        if self._tail is None or self._tail.path != log:
            self._tail = Tail(log)
        events = self._tail.look() if log.is_file() else []
        if not events:
            return "waiting for the run's first update"
        if not isinstance(events[0], Begin):
            raise DataError(log, "must open with 'begin', but does not; give the log of a run")
        self.record = with_files(RunRecord(name=self.name, events=events), self.path)
        return None


def followed(paths: Sequence[Path]) -> list[FollowedRun]:
    """The runs at these paths, each under a name of its own."""
    return [
        FollowedRun(path, name=name) for path, name in zip(paths, run_names(paths), strict=True)
    ]


def _fingerprint(path: Path) -> _Print:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
