"""Observed answer lengths from a file: CSV, JSONL, or the events of a run."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from sortedrl.errors import DataError
from sortedrl.events import Finish, read_events

_FIELDS = ("length", "tokens", "response_length")
_MOST_TOKENS = 10**9
_SHOWN_LETTERS = 80
_TEXT = "utf-8-sig"  # with or without the mark that spreadsheets put before UTF-8


def read_lengths(path: Path) -> list[int]:
    """The lengths in the file, in its order (for events: in the order of the data set).

    CSV: a header with one of the columns length, tokens, response_length; or one bare number per
    line. JSONL: objects with such a field, or bare numbers.
    """
    try:
        if path.suffix == ".csv":
            lengths = list(_from_csv(path))
        elif path.suffix == ".jsonl":
            lengths = _from_events(path) if _is_event_log(path) else list(_from_jsonl(path))
        else:
            raise DataError(path, "lengths are read from .csv and .jsonl files; rename or convert")
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(path, f"cannot be read ({reason}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(path, "is not UTF-8 text; save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(path, f"is not CSV ({error})") from error
    if not lengths:
        raise DataError(path, "holds no length; give at least one")
    return lengths


def _from_csv(path: Path) -> Iterator[int]:
    with path.open(encoding=_TEXT, newline="") as file:
        rows = csv.reader(file)
        column: int | None = None
        for row in rows:
            if not row or not any(cell.strip() for cell in row):
                continue
            if column is None:
                is_header = not _is_number(row[0])
                column = _column(path, row, rows.line_num) if is_header else 0
                if is_header:
                    continue
            if column >= len(row):
                raise DataError(path, f"row has no column {column + 1}", line=rows.line_num)
            yield _length(path, row[column], rows.line_num)


def _from_jsonl(path: Path) -> Iterator[int]:
    with path.open(encoding=_TEXT) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(path, f"not JSON: {error}", line=number) from error
            if isinstance(row, dict):
                name = next((name for name in _FIELDS if name in row), None)
                if name is None:
                    raise DataError(path, f"no field {' or '.join(_FIELDS)}", line=number)
                row = row[name]
            yield _length(path, row, number)


def _from_events(path: Path) -> list[int]:
    finished = {(e.prompt, e.sample): e.tokens for e in read_events(path) if isinstance(e, Finish)}
    return [tokens for _, tokens in sorted(finished.items())]


def _is_event_log(path: Path) -> bool:
    with path.open(encoding=_TEXT) as file:
        return file.readline(64).startswith('{"event":"begin"')


def _column(path: Path, header: list[str], line: int) -> int:
    names = [cell.strip().lower() for cell in header]
    for name in _FIELDS:
        if name in names:
            return names.index(name)
    raise DataError(
        path,
        f"header must name one of {', '.join(_FIELDS)}, got {names}; commas go between columns",
        line=line,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _length(path: Path, value: object, line: int) -> int:
    try:
        number = float(value) if isinstance(value, int | float | str) else float("nan")
    except (ValueError, OverflowError):
        number = float("nan")
    if isinstance(value, bool) or not 1 <= number <= _MOST_TOKENS or number != int(number):
        shown = (
            repr(value)
            if len(repr(value)) <= _SHOWN_LETTERS
            else f"{repr(value)[:_SHOWN_LETTERS]}..."
        )
        raise DataError(
            path,
            f"a length must be a whole number of at least 1 token, at most {_MOST_TOKENS:,}, "
            f"got {shown}",
            line=line,
        )
    return int(number)
