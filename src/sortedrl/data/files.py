"""Records from files: JSON lines, a JSON list or Parquet, each with the place where it stands.

A file is read as a stream. What is malformed is refused with file, line and reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sortedrl.errors import ConfigError, DataError

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Record:
    """The named values of a row, and its place: `file:line`, or `file:row` where there are none."""

    place: str
    values: Mapping[str, object]


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in order."""
    readers = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        raise DataError(
            path, f"must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}; convert it to one"
        )
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})") from error


def plain(value: object) -> object:
    """A value as JSON can hold it; dates, decimals and the like become their text."""
    return json.loads(json.dumps(value, default=str))


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _record(_parsed(line, path, line=number), f"{path}:{number}")


def _json_list(path: Path) -> Iterator[Record]:
    values = _parsed(path.read_bytes(), path, line=None)
    if not isinstance(values, list):
        raise DataError(path, "must hold a list of objects; write one object per line to a .jsonl")
    for number, value in enumerate(values, start=1):
        yield _record(value, f"{path}:{number}")


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow; pip install 'sortedrl[data]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    fields = {name: plain(value) for name, value in values.items()}
                    yield Record(f"{path}:{number}", fields)
    except pyarrow.ArrowInvalid as error:
        raise DataError(path, f"not Parquet: {error}") from error


def _parsed(content: bytes, path: Path, *, line: int | None) -> object:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(path, f"not UTF-8: {error}", line=line) from error
    except json.JSONDecodeError as error:
        where = error.lineno if line is None else line
        raise DataError(
            path, f"not JSON: {error.msg} at column {error.colno}", line=where
        ) from error


def _record(value: object, place: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(place, f"a row must be an object with named values, got {value!r:.80}")
    return Record(place, value)
