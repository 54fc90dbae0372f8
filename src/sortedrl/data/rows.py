"""Rows of a data set, from files (JSON lines, a JSON list, Parquet) or the `datasets` library.

    file, hub or folder -> Record, with its place -> Row: prompt, fields, place

A file is streamed, and a malformed record is refused with file, line and reason. The values of a
row can always be written as JSON, sent to another process and encoded as UTF-8: text, integers,
finite numbers, booleans, null, and lists and objects of these.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import numbers
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from sortedrl.config.checks import is_utf8
from sortedrl.config.data import DataSettings
from sortedrl.core.files import write_whole
from sortedrl.errors import ConfigError, DataError, os_errors, unknown_name

Message = Mapping[str, str]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The prompt, the fields for the reward, and the place of the row.

    `fields` holds all other columns: by convention `answer` (the gold answer), `level` (how
    hard it is: a number or a word) and `response` (an answer to imitate).
    """

    prompt: str | tuple[Message, ...]
    fields: Mapping[str, object]
    place: str
    question: str | None = None
    """The question without surrounding instructions; `None` if they are not separate."""
    tools: Sequence[Mapping[str, object]] = ()
    """Schemas of the tools for the chat template."""

    @property
    def text(self) -> str:
        """The question for display: the last user message."""
        if isinstance(self.prompt, str):
            return self.prompt
        said = [message["content"] for message in self.prompt if message["role"] == "user"]
        return said[-1] if said else self.prompt[-1]["content"]


SUFFIXES = (".jsonl", ".json", ".parquet")

_MOST_LEVELS = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_WRITTEN_AS_TEXT = (
    *(datetime.date, datetime.time, datetime.timedelta),
    *(decimal.Decimal, uuid.UUID),
)


@dataclass(frozen=True, slots=True)
class Record:
    """The named values of a row, and its place: `file:line`, or `file:row` if it has no lines."""

    place: str
    values: Mapping[str, object]


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in order."""
    readers = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            path, f"must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}; convert it to one"
        )
    if "\0" in str(path):
        raise DataError(repr(str(path)), "a path cannot contain a NUL character")
    if path.is_dir():
        raise DataError(path, "must be a file, is a folder; name the file inside it")
    with os_errors(path, "cannot be read"):
        yield from reader(path)


def records_from(rows: Iterable[object]) -> Iterator[Record]:
    """The records of Python objects: mappings such as `{"prompt": ..., "answer": ...}`.

    A list may contain plain prompts as text. The rows of a `datasets.Dataset` are mappings too.
    """
    if isinstance(rows, Mapping):
        raise DataError(
            "rows",
            f"must be a list of rows, got one {type(rows).__name__} with {sorted(map(str, rows))}; "
            "give one split of a DatasetDict (rows['train']), or a list with a dict for each row",
        )
    for number, row in enumerate(rows, start=1):
        place = f"row {number}"
        if isinstance(row, str) and isinstance(rows, list | tuple):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise DataError(
                place,
                f"must be a dict such as {{'prompt': ..., 'answer': ...}}, got {row!r:.80}; a "
                "pandas table becomes one with table.to_dict('records')",
            )
        yield record_of(row, place)


def write_records(records: Iterable[Record], path: Path) -> int:
    """Write records as JSON lines, which `read_records` reads back; returns their number."""
    lines = [json.dumps(dict(record.values), ensure_ascii=False) for record in records]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


def record_of(values: Mapping[str, object], place: str) -> Record:
    """Convert the values to JSON; raises `DataError` naming a column that cannot be converted.

    Dates, decimals and the like become text; bytes are decoded as UTF-8.
    """
    plain = {}
    for name, value in values.items():
        try:
            plain[_text(name)] = _plain(value, 1)
        except ValueError as error:
            raise DataError(place, f"the column {name!r:.80} {error}") from error
    return Record(place, plain)


def _plain(value: object, levels: int) -> object:
    """Convert a value to JSON; raises `ValueError` if it has no JSON form."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, numbers.Real):  # numpy's as well
        return int(value) if isinstance(value, numbers.Integral) else _finite(float(value))
    if isinstance(value, bytes):
        return _decoded(value)
    if isinstance(value, _WRITTEN_AS_TEXT):
        return str(value)
    if not isinstance(value, list | tuple | dict):
        raise ValueError(
            f"must hold text, numbers, lists or objects, got {type(value).__name__}; "
            "leave the column out"
        )
    if levels > _MOST_LEVELS:
        raise ValueError(f"must be nested at most {_MOST_LEVELS} levels deep; flatten it")
    if isinstance(value, dict):
        return {_text(name): _plain(inner, levels + 1) for name, inner in value.items()}
    return [_plain(inner, levels + 1) for inner in value]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must have text for names, got {value!r:.80}")
    if not is_utf8(value):
        raise ValueError(
            f"has half a character (a lone surrogate), which cannot be encoded as UTF-8, in "
            f"{value!a:.80}; the text was truncated or decoded wrongly"
        )
    return value


def _finite(value: float) -> float | None:
    """The number; NaN, which marks missing values in Parquet files, becomes `None`."""
    if math.isinf(value):
        raise ValueError(f"must hold finite numbers, got {value}")
    return None if math.isnan(value) else value


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"has bytes that are not UTF-8 text ({error.reason} at byte {error.start}); "
            "leave the column out, or store it as text"
        ) from error


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = _beginning(line, path)
            if line.strip():
                yield _record(_parsed(line, path, line=number), f"{path}:{number}")


def _json_list(path: Path) -> Iterator[Record]:
    values = _parsed(_beginning(path.read_bytes(), path), path, line=None)
    if not isinstance(values, list):
        raise DataError(path, "must hold a list of objects; write one object per line to a .jsonl")
    for number, value in enumerate(values, start=1):
        yield _record(value, f"{path}:{number}")


def _beginning(content: bytes, path: Path) -> bytes:
    """The start of a file, without the byte order mark."""
    if content.startswith(_GZIP):
        raise DataError(path, "is compressed with gzip; unpack it (gunzip)")
    return content.removeprefix(_BYTE_ORDER_MARK)


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
            names = file.schema_arrow.names
            _refuse_duplicates(names, path)
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                columns = [
                    _column(batch.column(place), name, path) for place, name in enumerate(names)
                ]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield record_of(dict(zip(names, values, strict=True)), f"{path}:{number}")
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise DataError(path, f"not Parquet: {error}") from error


def _refuse_duplicates(names: Sequence[str], path: Path) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DataError(path, f"each column must have a unique name, got {name!r} twice")


def _column(column: object, name: str, path: Path) -> list[object]:
    """The values of a column; those without a Python value are refused."""
    try:
        values: list[object] = column.to_pylist()  # type: ignore[attr-defined]
    except (ValueError, KeyError, OverflowError, ImportError) as error:
        raise DataError(
            path, f"the column {name!r} cannot be read ({error}); store it as text"
        ) from error
    return values


def _parsed(content: bytes, path: Path, *, line: int | None) -> object:
    try:
        return json.loads(
            content.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise DataError(path, f"not UTF-8: {error}", line=line) from error
    except json.JSONDecodeError as error:
        where = error.lineno if line is None else line
        raise DataError(
            path, f"not JSON: {error.msg} at column {error.colno}", line=where
        ) from error
    except RecursionError as error:
        reason = f"must be nested at most {_MOST_LEVELS} levels deep; flatten it"
        raise DataError(path, reason, line=line) from error
    except _RefusedError as error:
        raise DataError(path, str(error), line=line) from error
    except ValueError as error:
        reason = f"a whole number must have at most {sys.get_int_max_str_digits()} digits"
        raise DataError(path, f"{reason}; write it as text", line=line) from error


class _RefusedError(Exception):
    """Valid JSON, but not allowed in a row."""


def _no_number(text: str) -> NoReturn:
    raise _RefusedError(f"numbers must be finite, got {text}; write null where there is none")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RefusedError(f"each name of an object must occur once, got {twice!r:.80} twice")
    return values


def _record(value: object, place: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(place, f"a row must be an object with named values, got {value!r:.80}")
    return record_of(value, place)


def read_hub(name: str, *, subset: str | None, split: str) -> Iterator[Record]:
    """The records of one split of a data set, in order."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ConfigError(
            f"{name}: reading data sets by name needs `datasets`; pip install 'sortedrl[data]'"
        ) from error
    try:
        if (Path(name) / "dataset_info.json").exists():
            loaded = datasets.load_from_disk(name)
            if loaded.split not in (None, split):
                raise ValueError(f"it is the split {str(loaded.split)!r}")
        elif (Path(name) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)[split]
        else:
            loaded = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, LookupError, RuntimeError, DatasetsError) as error:
        raise DataError(
            name,
            f"cannot be loaded as a data set with split {split!r}: {error}; "
            "check the name and the connection, name another split (split=...), or give a local "
            "file; files of the maths sets are searched in --folder, or in $SORTEDRL_DATA",
        ) from error
    # Plain Python values, whatever format the data set was saved with.
    for number, values in enumerate(loaded.with_format(None), start=1):
        yield record_of(values, f"{name}/{split}:{number}")


_ROLES = ("system", "user", "assistant", "tool", "developer")


def rows_of(records: Iterable[Record], settings: DataSettings) -> Iterator[Row]:
    """The rows; raises `DataError` for one without a usable prompt."""
    for record in records:
        yield _row(record, settings)


def _row(record: Record, settings: DataSettings) -> Row:
    fields = dict(record.values)
    prompt = _prompt(_taken(fields, settings.prompt_field, record), record)
    if settings.answer_field is not None:
        fields["answer"] = _taken(fields, settings.answer_field, record)
    return Row(prompt=prompt, fields=fields, place=record.place)


def _taken(fields: dict[str, object], name: str, record: Record) -> object:
    if not record.values:
        raise DataError(record.place, "the row is empty; drop it")
    if name not in fields:
        hint = "; name the column with the question as prompt_field (in files: data.prompt_field)"
        raise DataError(
            record.place,
            unknown_name("column", name, record.values) + (hint if name == "prompt" else ""),
        )
    return fields.pop(name)


def _prompt(value: object, record: Record) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(record.place, "the prompt is empty; drop the row")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(
            record.place,
            f"the prompt must be text or a list of chat messages, got {value!r:.80}; "
            "name another column as prompt_field",
        )
    return tuple(_message(message, record) for message in value)


def _message(message: object, record: Record) -> Message:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise DataError(
            record.place, f"a chat message must have `role` and `content`, got {message!r:.80}"
        )
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise DataError(record.place, unknown_name("role", str(role), _ROLES))
    if not isinstance(content, str):
        raise DataError(record.place, f"a message's content must be text, got {content!r:.80}")
    return {"role": role, "content": content}


def with_system(row: Row, system: str) -> Row:
    """The row with a system message before its prompt."""
    prompt = row.prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        raise DataError(row.place, "the row has its own system message; leave system out")
    return replace(row, prompt=({"role": "system", "content": system}, *messages))
