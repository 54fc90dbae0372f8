"""A log of events that grows while it is read: what came since the last look is parsed, once.

The events are always those of the file's first `kept` bytes, which are whole lines; a last line
without its newline waits. A run that is resumed cuts its log and writes on: where the file got
shorter, or the bytes at its beginning or just before the place reached are no longer those that
were read, reading starts again.
"""

from __future__ import annotations

from pathlib import Path

from sortedrl.errors import DataError
from sortedrl.events import Event, from_json

_MARK_BYTES = 4096
"""How much of the beginning, and of the last lines read, must still be there."""


class Tail:
    """The events of a log, as far as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restart()

    def look(self) -> list[Event]:
        """Every event of the log by now; `DataError` names a line that holds none.

        After such a line the next look starts at the beginning: it may have been written over.
        """
        with self.path.open("rb") as file:
            beginning = file.read(len(self._beginning))
            file.seek(self.kept - len(self._last))
            # The mark and what follows it come from one read, so that they belong together.
            found = file.read()
            if beginning != self._beginning or not found.startswith(self._last):
                self._restart()
                file.seek(0)
                found = file.read()
        self._take(found[len(self._last) :])
        return self._events

    def _restart(self) -> None:
        # A new list: whoever was given the old one can go on with it.
        self._events: list[Event] = []
        self.kept = 0
        self._beginning = b""
        self._last = b""

    def _take(self, found: bytes) -> None:
        whole = found[: found.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            try:
                self._events.append(from_json(line.decode()))
            except (ValueError, TypeError) as error:
                number = len(self._events) + 1
                self._restart()
                raise DataError(self.path, str(error), line=number) from error
        self.kept += len(whole)
        self._beginning = (self._beginning + whole[:_MARK_BYTES])[:_MARK_BYTES]
        self._last = (self._last + whole[-_MARK_BYTES:])[-_MARK_BYTES:]
