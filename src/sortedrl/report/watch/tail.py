"""A log of events that grows while it is read: what came since the last look is parsed, once.

The events are always those of the file's first `kept` bytes, which are whole lines; a last line
without its newline waits. A run that is resumed cuts its log and writes on: where the first bytes
are no longer those that were read, reading starts again. They are hashed at every look, which costs
little beside parsing them.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import IO

from sortedrl.errors import DataError
from sortedrl.events import Event, from_json

_PIECE_BYTES = 1 << 20


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
            if not self._begins_as_before(file):
                self._restart()
                file.seek(0)
            found = file.read()
        self._take(found[: found.rfind(b"\n") + 1])
        return self._events

    def _restart(self) -> None:
        # A new list: whoever was given the old one can go on with it.
        self._events: list[Event] = []
        self._digest = blake2b()
        self.kept = 0

    def _begins_as_before(self, file: IO[bytes]) -> bool:
        """Whether the bytes that were read are still there; the file then stands behind them."""
        digest, left = blake2b(), self.kept
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        return digest.digest() == self._digest.digest()

    def _take(self, lines: bytes) -> None:
        for line in lines.split(b"\n")[:-1]:
            try:
                self._events.append(from_json(line.decode()))
            except (ValueError, TypeError) as error:
                number = len(self._events) + 1
                self._restart()
                raise DataError(self.path, str(error), line=number) from error
        self._digest.update(lines)
        self.kept += len(lines)
