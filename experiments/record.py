"""One result: what was measured, with everything needed to measure it again.

A result file is complete or not there: it is written whole, at the end of its piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.files import write_whole
from sortedrl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of one piece."""

    table: str
    piece: str
    command: str
    commit: str
    date: str
    machine: Mapping[str, str]
    seconds: float
    """Wall clock of the piece, everything included."""
    numbers: Mapping[str, Any]


class Results:
    """The result files in a folder: TABLE/PIECE.json."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read yet."""
        self.folder = folder

    def path(self, table: str, piece: str) -> Path:
        """The file of a piece."""
        return self.folder / table / f"{piece}.json"

    def has(self, table: str, piece: str) -> bool:
        """Whether a piece is done."""
        return self.path(table, piece).exists()

    def write(self, record: Record) -> None:
        """Keep a result."""
        path = self.path(record.table, record.piece)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(record), indent=1) + "\n"
        write_whole(path, text.encode())

    def read(self, table: str) -> Sequence[Record]:
        """All results of a table, by name."""
        return [_read(path) for path in sorted((self.folder / table).glob("*.json"))]


def _read(path: Path) -> Record:
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(str(path), f"is no result of an experiment: {error}") from error
