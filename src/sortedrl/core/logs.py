"""The metrics and sample answers of a run: `metrics.jsonl` and `answers.jsonl`.

`metrics.jsonl` has one JSON object of numbers per update; a number that is not finite is written as
null, so any JSON reader can read the file. `answers.jsonl` has some answers of every update as
text, one JSON object each; nothing is computed from it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sortedrl.core.files import LineFile, read_lines
from sortedrl.errors import DataError

Value = float | int | str | None
"""What a row of metrics may hold."""


class MetricsFile(LineFile):
    """Appends one row per update."""

    def __call__(self, values: Mapping[str, Value]) -> None:
        """Append the numbers of an update, at once visible to readers."""
        row = {name: _finite(value) for name, value in values.items()}
        self.write(json.dumps(row, separators=(",", ":"), allow_nan=False))
        self.flush()


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """The rows of a file, in order; a last line without its newline is skipped."""
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
    """The update that was trained on it, counted from 1."""
    prompt: int
    sample: int
    group: int
    versions: tuple[int, int]
    """The versions of the weights that wrote its oldest and its newest token."""
    tokens: int
    is_truncated: bool
    reward: float | None
    parts: Mapping[str, float]
    """The named parts of the reward."""
    question: str
    response: str


class AnswerFile(LineFile):
    """Appends answers."""

    def __call__(self, answers: Iterable[LoggedAnswer]) -> None:
        """Append the answers of an update, at once visible to readers."""
        for answer in answers:
            self.write(json.dumps(asdict(answer), separators=(",", ":"), default=dict))
        self.flush()


def read_answers(path: Path) -> list[LoggedAnswer]:
    """The answers of a file, in order; a last line without its newline is skipped."""
    return [_answer(path, number, line) for number, line in read_lines(path)]


def _answer(path: Path, number: int, line: str) -> LoggedAnswer:
    try:
        row = json.loads(line)
        answer = LoggedAnswer(**{**row, "versions": tuple(row["versions"])})
        if not _is_sound(row):
            raise ValueError("a field has a value of another type")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        names = ", ".join(f.name for f in fields(LoggedAnswer))
        raise DataError(path, f"expected an object with {names}", line=number) from error
    return answer


def _is_sound(row: Mapping[str, Any]) -> bool:
    """Whether every field has a value of its type."""
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
