"""Files of a run: atomic writes, line-based logs, metrics and sample answers.

A file that we did not write is never overwritten. In a log only complete lines count: a last line
without newline belongs to a run that was killed or is still writing, and readers skip it. A
resumed run truncates its logs to their lengths at the checkpoint, so everything after it is
written again, once.

`metrics.jsonl` has one JSON object of numbers per update, described in docs/reference/metrics.md;
a number that is not finite is written as null, so that any JSON reader can read the file.
`answers.jsonl` has some answers of every update as text, one JSON object each; nothing is computed
from it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import IO, Any

from sortedrl.errors import DataError, os_errors

_LOOKED_AT = 512
_GZIP = b"\x1f\x8b"


def write_whole(path: Path, content: bytes) -> None:
    """Write the file atomically."""
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


def free_path(folder: Path, names: Iterable[str]) -> Path:
    """The first of these names that does not exist in the folder."""
    return next(path for name in names if not (path := folder / name).exists())


def refuse_foreign(path: Path, *, mark: bytes | None) -> None:
    """Refuse to replace a file that we did not write, recognised by `mark` near its start.

    Without a mark, any non-empty file is refused.
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
        """Create the file, replacing an existing one; or keep its first bytes and append."""
        advice = "; check the path and the free disk space"
        self._os_errors = partial(os_errors, path, "cannot be written", advice=advice)
        with self._os_errors():
            if keep_bytes:
                _cut(path, keep_bytes)
            self._file: IO[bytes] = path.open("ab" if keep_bytes else "wb")

    def write(self, line: str) -> None:
        """Append a line, given without newline; it may stay in the buffer for a while."""
        with self._os_errors():
            self._file.write(line.encode() + b"\n")

    def flush(self) -> None:
        """Make all lines visible to other programs."""
        with self._os_errors():
            self._file.flush()

    def sync(self) -> int:
        """Sync all lines to disk; returns the length of the file in bytes."""
        self.flush()
        with self._os_errors():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Flush and close."""
        with self._os_errors():
            self._file.close()


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


Value = float | int | str | None
"""The values of a row of metrics."""


class MetricsFile(LineFile):
    """Appends one row per update."""

    def __call__(self, values: Mapping[str, Value]) -> None:
        """Append the metrics of an update and flush."""
        row = {name: _finite(value) for name, value in values.items()}
        self.write(json.dumps(row, separators=(",", ":"), allow_nan=False))
        self.flush()


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """The rows of a file, in order; a last line without newline is skipped."""
    rows: list[dict[str, Value]] = []
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(path, f"not JSON: {error}", line=number) from error
        if not isinstance(row, dict) or any(isinstance(v, list | dict) for v in row.values()):
            raise DataError(path, "expected a JSON object of numbers and text", line=number)
        huge = [n for n, v in row.items() if isinstance(v, int) and abs(v) > sys.float_info.max]
        if huge:
            raise DataError(path, f"{huge[0]!r} is too large a number", line=number)
        rows.append(row)
    return rows


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_MOST = 2**63
_MOST_REWARD = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswer:
    """An answer that was trained on."""

    update: int
    """The update that trained on it, counted from 1."""
    prompt: int
    sample: int
    group: int
    versions: tuple[int, int]
    """The versions that sampled its oldest and its newest token."""
    tokens: int
    is_truncated: bool
    reward: float | None
    parts: Mapping[str, float]
    """The components of the reward, by name."""
    question: str
    response: str


class AnswerFile(LineFile):
    """Appends answers."""

    def __call__(self, answers: Iterable[LoggedAnswer]) -> None:
        """Append the answers of an update and flush."""
        for answer in answers:
            self.write(json.dumps(asdict(answer), separators=(",", ":"), default=dict))
        self.flush()


def read_answers(path: Path) -> list[LoggedAnswer]:
    """The answers of a file, in order; a last line without newline is skipped."""
    return [_answer(path, number, line) for number, line in read_lines(path)]


def _answer(path: Path, number: int, line: str) -> LoggedAnswer:
    try:
        row = json.loads(line)
        answer = LoggedAnswer(**{**row, "versions": tuple(row["versions"])})
        if not _is_sound(row):
            raise ValueError("a field has the wrong type")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        names = ", ".join(f.name for f in fields(LoggedAnswer))
        raise DataError(path, f"expected an object with {names}", line=number) from error
    return answer


def _is_sound(row: Mapping[str, Any]) -> bool:
    counts = [row[name] for name in ("update", "prompt", "sample", "group", "tokens")]
    parts, reward = row["parts"], row["reward"]
    if not isinstance(parts, dict) or len(row["versions"]) != 2:
        return False
    rewards = [*parts.values(), *([] if reward is None else [reward])]
    return (
        all(type(count) is int and abs(count) < _MOST for count in (*counts, *row["versions"]))
        and all(isinstance(value, int | float) and abs(value) <= _MOST_REWARD for value in rewards)
        and isinstance(row["is_truncated"], bool)
        and all(isinstance(row[name], str) for name in ("question", "response"))
    )
