"""Atomic writes, and files that grow line by line.

A file that we did not write is never overwritten. In a file of lines only complete lines count: a
last line without its newline belongs to a run that was killed or is still writing, and readers skip
it. A resumed run truncates its files to their lengths at the checkpoint, so what was written after
the checkpoint is written again, once.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sortedrl.errors import DataError

_LOOKED_AT = 512
_GZIP = b"\x1f\x8b"


def write_whole(path: Path, content: bytes) -> None:
    """Write the file atomically: either all of it is new or the old one is untouched."""
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file to write to, renamed to `path` when the block succeeds.

    A symbolic link is followed; a device is written to directly.
    """
    path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            yield file
        return
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def refuse_foreign(path: Path, *, mark: bytes | None) -> None:
    """Refuse to replace a file that we did not write, recognised by `mark` near its beginning.

    Without a mark, any file that is not empty is refused.
    """
    try:
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            beginning = file.read(_LOOKED_AT)
        if beginning.startswith(_GZIP):
            with gzip.open(path) as packed:
                beginning = packed.read(_LOOKED_AT)
    except (OSError, EOFError, zlib.error):
        beginning = b""
    if mark is None or mark not in beginning:
        what = "a file" if mark is None else "a file that this command did not write"
        raise DataError(path, f"is {what} and is not replaced; remove it or choose another path")


class LineFile:
    """Appends lines to a file."""

    def __init__(self, path: Path, *, keep_bytes: int | None = None) -> None:
        """Create the file, replacing an older one; or keep its first bytes and append to them."""
        self._path = path
        with self._os_errors():
            if keep_bytes:
                _cut(path, keep_bytes)
            self._file: IO[bytes] = path.open("ab" if keep_bytes else "wb")

    def write(self, line: str) -> None:
        """Append a line, given without its newline; it may stay in memory for a while."""
        with self._os_errors():
            self._file.write(line.encode() + b"\n")

    def flush(self) -> None:
        """Make every line so far visible to other programs."""
        with self._os_errors():
            self._file.flush()

    def sync(self) -> int:
        """Write every line so far to the disk; returns the length of the file in bytes."""
        self.flush()
        with self._os_errors():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Write out what is buffered."""
        with self._os_errors():
            self._file.close()

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Raise an error of the operating system as a `DataError`."""
        try:
            yield
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); check the path and the free disk space"
            raise DataError(self._path, reason) from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The complete lines of a file, each with its number; an incomplete last one is skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise DataError(path, f"not UTF-8 text ({error.reason})", line=number) from error
            yield number, text


def _cut(path: Path, keep_bytes: int) -> None:
    """Truncate the file to its first bytes, which must be complete lines."""
    try:
        file = path.open("r+b")
    except FileNotFoundError as error:
        raise DataError(
            path,
            f"must hold the first {keep_bytes} bytes of the run to resume, but is missing; "
            "restore it next to the checkpoint, or start a new run in another folder",
        ) from error
    with file:
        found = file.seek(0, os.SEEK_END)
        file.seek(keep_bytes - 1)
        if found < keep_bytes or file.read(1) != b"\n":
            raise DataError(
                path,
                f"must hold {keep_bytes} bytes of complete lines for this checkpoint, found "
                f"{found} bytes or other lines; it belongs to another run or was changed: restore "
                "the right file, or start a new run in another folder",
            )
        file.truncate(keep_bytes)
