"""Result files: the numbers of a trial, with everything needed to repeat it.

A result file is written atomically at the end of its trial.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sortedrl.core.files import write_whole
from sortedrl.errors import DataError
from sortedrl.runs.folder import device_name

_LIBRARIES = ("torch", "transformers", "triton", "trl", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of one trial."""

    table: str
    trial: str
    command: str
    commit: str
    date: str
    machine: Mapping[str, str]
    seconds: float
    """Wall time of the whole trial."""
    numbers: Mapping[str, Any]


_FIELDS = tuple(field.name for field in fields(Record))
_KEYS = {"trial": "piece"}
"""Names of fields in result files, where they differ."""


class Results:
    """The result files in a folder: TABLE/TRIAL.json."""

    def __init__(self, folder: Path) -> None:
        """Files are read on demand."""
        self.folder = folder

    def path(self, table: str, trial: str) -> Path:
        """The result file of a trial."""
        return self.folder / table / f"{trial}.json"

    def has(self, table: str, trial: str) -> bool:
        """Whether a trial has a result."""
        return self.path(table, trial).exists()

    def write(self, record: Record) -> None:
        """Write a result file."""
        path = self.path(record.table, record.trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {_KEYS.get(name, name): value for name, value in asdict(record).items()}
        text = json.dumps(fields, indent=1) + "\n"
        write_whole(path, text.encode())

    def read(self, table: str) -> Sequence[Record]:
        """All results of a table, by name."""
        return [_read(path) for path in sorted((self.folder / table).glob("*.json"))]


def _read(path: Path) -> Record:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        return Record(**{name: row[_KEYS.get(name, name)] for name in _FIELDS})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(str(path), f"is not a result of an experiment: {error!r}") from error


def machine(device: str) -> dict[str, str]:
    """The device, cores, Python and library versions."""
    facts = {
        "device": device_name(device),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts
