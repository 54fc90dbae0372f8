"""Rows from published Knights-and-Knaves sets in Parquet files.

The prompt is made from the column `quiz`; ready-made prompts in the file are not looked at.
Every row is checked: its solution must be the only one of its statements.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, get_args

from sortedrl.data.files import Record, read_records
from sortedrl.data.row import Row
from sortedrl.errors import DataError, unknown_name
from sortedrl.tasks.knights.canonical import Split
from sortedrl.tasks.knights.cast import Roles
from sortedrl.tasks.knights.puzzle import parse_puzzle
from sortedrl.tasks.knights.rows import row_in_words
from sortedrl.tasks.knights.solver import solutions

_Value = TypeVar("_Value")


def published_rows(path: Path, *, split: Split | None = None) -> list[Row]:
    """The rows of a Parquet file, or of all such files in a folder and the folders inside it.

    Of a folder the files whose names begin with another split than `split` are left out.
    Their place is `file:row`, with rows counted from 1.
    """
    if not path.is_dir():
        return _rows(path)
    found = sorted(path.rglob("*.parquet"))
    if not found:
        raise DataError(path, "a folder of puzzles must hold Parquet files, found none")
    others = [name for name in get_args(Split) if split is not None and name != split]
    files = [file for file in found if not file.stem.startswith(tuple(others))]
    if not files:
        raise DataError(
            path,
            f"must hold files of the split {split!r}, found only {found[0].name} and the like; "
            f"write split={others[0]} to take them all the same",
        )
    return [row for file in files for row in _rows(file)]


def _rows(path: Path) -> list[Row]:
    return [_row(record) for record in read_records(path)]


def _row(record: Record) -> Row:
    try:
        return _checked_row(record.values, record.place)
    except (ValueError, TypeError) as error:
        raise DataError(record.place, str(error)) from error


def _checked_row(record: Mapping[str, object], place: str) -> Row:
    names = _list_of(record, "names", str)
    solution = tuple(_list_of(record, "solution", bool))
    puzzle = parse_puzzle(_value(record, "statements", str))
    if not puzzle.people == len(names) == len(solution):
        raise ValueError(
            "names, solution and statements must be as many as there are people, got "
            f"{len(names)}, {len(solution)} and {puzzle.people}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"names must differ, got {', '.join(names)}")
    right = solutions(puzzle)
    if right != [solution]:
        raise ValueError(
            f"the solution must be the only one of the statements, got {list(solution)}, but "
            f"the statements have {[list(each) for each in right]}"
        )
    words = _value(record, "knight_knave", dict)
    roles = Roles(_value(words, "knight", str), _value(words, "knave", str))
    text = _value(record, "quiz", str)
    return row_in_words(puzzle, solution, names=names, roles=roles, text=text, place=place)


def _value(record: Mapping[str, object], column: str, kind: type[_Value]) -> _Value:
    """A value of the row; a `TypeError` where it is missing or of another type."""
    if column not in record:
        raise TypeError(unknown_name("column", column, record))
    value = record[column]
    if not isinstance(value, kind):
        raise TypeError(f"{column} must be of type {kind.__name__}, got {value!r:.100}")
    return value


def _list_of(record: Mapping[str, object], column: str, kind: type[_Value]) -> list[_Value]:
    values = _value(record, column, list)
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{column} must hold {kind.__name__} values, got {value!r:.100}")
    return values
