"""The numbers of a run on disk: one JSON object per update, in `metrics.jsonl`.

A number that is not finite is written as null, so any JSON reader can read the file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from sortedrl.errors import DataError
from sortedrl.line_file import LineFile, read_lines

Value = float | int | str | None
"""What a row of metrics may hold."""


class MetricsFile:
    """Appends one row per update."""

    def __init__(self, path: Path, *, keep_bytes: int | None = None) -> None:
        """Create the file in place of an older one; or keep its first bytes and go on there."""
        self._file = LineFile(path, keep_bytes=keep_bytes)

    def __call__(self, values: Mapping[str, Value]) -> None:
        """Append the numbers of an update; others can read them at once."""
        row = {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps(row, separators=(",", ":"), allow_nan=False))
        self._file.flush()

    def sync(self) -> int:
        """Push everything so far to the disk, and give the length of the file in bytes."""
        return self._file.sync()

    def close(self) -> None:
        """Write out what is left."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """The rows of a file, in order; a last line without its newline is left out."""
    rows: list[dict[str, Value]] = []
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(path, f"not JSON: {error}", line=number) from error
        if not isinstance(row, dict) or any(isinstance(v, list | dict) for v in row.values()):
            raise DataError(path, "expected a JSON object of numbers and words", line=number)
        huge = [n for n, v in row.items() if isinstance(v, int) and abs(v) > sys.float_info.max]
        if huge:
            raise DataError(path, f"{huge[0]!r} must be a smaller number", line=number)
        rows.append(row)
    return rows


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value
