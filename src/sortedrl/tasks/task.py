"""A task: rows, the reward that scores their answers, and when an answer counts as right.

A model that is evaluated on what it was trained on is measured for its memory. So rows can be
compared by what they ask: the same question is the same in other white space, under another system
message, with and without the instruction after it; and a puzzle is the same under other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sortedrl.data.row import Row
from sortedrl.rewards.source import RewardSource
from sortedrl.tasks.knights.canonical import canonical_key
from sortedrl.tasks.knights.generator import MAX_PEOPLE
from sortedrl.tasks.knights.puzzle import parse_puzzle


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rows and their reward under one name."""

    name: str
    rows: Sequence[Row]
    reward: RewardSource
    correct_from: float = 1.0
    """The reward from which an answer counts as right, where the reward has no part `correct`."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of two tasks that ask the same: their numbers in each, counted from 0."""

    trained: frozenset[int]
    asked: tuple[int, ...]


def shared_rows(trained: Sequence[Row], asked: Sequence[Row]) -> Shared:
    """The rows trained on that are asked in an evaluation too, and the other way round."""
    places: dict[str, list[int]] = {}
    for number, row in enumerate(trained):
        for key in _keys(row):
            places.setdefault(key, []).append(number)
    found: set[int] = set()
    again = []
    for number, row in enumerate(asked):
        twins = [place for key in _keys(row) for place in places.get(key, ())]
        if twins:
            again.append(number)
            found.update(twins)
    return Shared(frozenset(found), tuple(again))


def _keys(row: Row) -> Iterator[str]:
    """What a row asks, in the forms by which it can be found again."""
    if isinstance(row.prompt, str):
        yield _spaced(row.prompt)
    else:
        said = [message for message in row.prompt if message["role"] != "system"]
        while said and said[-1]["role"] == "assistant":  # the beginning of an answer
            said.pop()
        yield _spaced("\n".join(message["content"] for message in said))
    if row.question is not None:
        yield _spaced(row.question)
    statements = row.fields.get("statements")
    if isinstance(statements, str):
        try:
            puzzle = parse_puzzle(statements)
        except ValueError:
            return  # a column of the user's own that is called so
        if puzzle.people <= MAX_PEOPLE:
            yield canonical_key(puzzle)


def _spaced(text: str) -> str:
    """The text with single spaces; capitals stay, as they tell compact puzzles apart."""
    return " ".join(text.split())
