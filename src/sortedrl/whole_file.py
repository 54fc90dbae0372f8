"""A file written whole or not at all, and never over one that is not ours."""

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
    """Write the file; whatever happens, either all of it is new or the old one is untouched."""
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, piece by piece, which takes its place when the block ends well.

    Through a link its target is written; a device is written to as it is.
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
    """Refuse to replace a file that does not hold `mark` near its beginning, so is not ours.

    Without a mark, any file that holds something is refused.
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
        raise DataError(path, f"is {what}, which is left alone; remove it or choose another path")
