"""Puzzles with exactly one solution, drawn from a seed.

All puzzles belong to the requested split, and no two of one call share a canonical key.
The first puzzles of a longer call are those of a shorter one.

A solution is drawn first, then a form for each speaker, then statements of that form until one
fits the speaker's role: so knights and knaves, and their forms, are about equally frequent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from sortedrl.config.checks import require
from sortedrl.core.randomness import mix
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.tasks.knights.puzzle import (
    Claim,
    Compound,
    Connective,
    Puzzle,
    Split,
    Statement,
    canonical_key,
    consistent_set,
    everything,
    knight_sets,
    mentioned,
    number_of,
    require_share,
    split_of_key,
    truth_set,
)

Form = Literal["claim", "not", "and", "or", "->", "<=>"]
"""How a statement starts: a plain claim about one person, or a connective."""

FORMS: tuple[Form, ...] = get_args(Form)
MIN_PEOPLE, MAX_PEOPLE, MAX_WIDTH, MAX_DEPTH = 2, 8, 8, 4

_Choice = TypeVar("_Choice")
_STATEMENT_TRIES = 40
_FRUITLESS_TRIES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What statements look like."""

    forms: tuple[Form, ...] = FORMS
    """Allowed forms of statements and their parts; claims inside others are always allowed."""
    width: int = 2
    """Most parts of an and, and of an or."""
    depth: int = 1
    """Most connectives on the way down to a claim: 1 joins claims, 2 joins such joins."""

    def __post_init__(self) -> None:
        """Check the values."""
        require(bool(self.forms), f"knights.forms must name at least one of {', '.join(FORMS)}")
        for form in self.forms:
            require(form in FORMS, unknown_name("form", form, FORMS))
        require(
            2 <= self.width <= MAX_WIDTH,
            f"knights.width must lie in 2..{MAX_WIDTH}, got {self.width}",
        )
        require(
            1 <= self.depth <= MAX_DEPTH,
            f"knights.depth must lie in 1..{MAX_DEPTH}, got {self.depth}",
        )


def generate(
    people: int,
    count: int,
    *,
    shape: Shape | None = None,
    seed: int = 0,
    split: Split = "train",
    test_share: float = 0.1,
    advance: Callable[[], None] | None = None,
) -> list[Puzzle]:
    """`count` different puzzles; raises `ConfigError` if there are not so many.

    `advance` is called for each.
    """
    require(
        MIN_PEOPLE <= people <= MAX_PEOPLE,
        f"knights.people must lie in {MIN_PEOPLE}..{MAX_PEOPLE}, got {people}",
    )
    require_share(test_share)
    draw = _Draw(random.Random(mix(seed, people)), shape or Shape(), people)
    found: list[Puzzle] = []
    keys: set[str] = set()
    tries = fruitless = 0
    while len(found) < count:
        # The more are known, the longer it takes to find one of the few that are left.
        if fruitless > _FRUITLESS_TRIES + 20 * len(keys):
            raise ConfigError(
                f"{count} different {split} puzzles with {people} people were asked for, but only "
                f"{len(found)} were found in {tries} tries; lower knights.count, or allow more "
                "people, forms, width or depth"
            )
        tries += 1
        fruitless += 1
        puzzle = draw.puzzle()
        if puzzle is None:
            continue
        key = canonical_key(puzzle)
        if key in keys:
            continue
        fruitless = 0
        keys.add(key)
        if split_of_key(key, test_share) == split:
            found.append(puzzle)
            if advance is not None:
                advance()
    return found


class _Draw:
    """Draws puzzles; of the generator's methods only `random` is used.

    Its other methods may differ between Python versions.
    """

    def __init__(self, generator: random.Random, shape: Shape, people: int) -> None:
        self._random = generator.random
        self._shape = shape
        self._people = people
        self._inner_forms = tuple(form for form in shape.forms if form != "claim")

    def puzzle(self) -> Puzzle | None:
        """A puzzle with one solution, or `None` if this try failed."""
        solution = tuple(self._random() < 0.5 for _ in range(self._people))
        number = number_of(solution)
        statements: list[Statement] = []
        for speaker, is_knight in enumerate(solution):
            statement = self._spoken(speaker, number, is_knight)
            if statement is None:
                return None
            statements.append(statement)
        puzzle = Puzzle(tuple(statements))
        return puzzle if consistent_set(puzzle) == 1 << number else None

    def _spoken(self, speaker: int, number: int, is_knight: bool) -> Statement | None:
        """A statement that is true under the assignment exactly if the speaker is a knight."""
        form = self._choice(self._shape.forms)
        for _ in range(_STATEMENT_TRIES):
            statement = self._statement(form, self._shape.depth, list(range(self._people)))
            truth = truth_set(statement, self._people)
            is_true = bool(truth >> number & 1)
            if is_true == is_knight and _says_something(statement, truth, speaker, self._people):
                return statement
        return None

    def _statement(self, form: Form, depth: int, people: list[int]) -> Statement:
        """A statement; claims that stand directly in it take their person out of `people`."""
        if form == "claim":
            return self._claim(people)
        parts = 2
        if form == "not":
            parts = 1
        elif form in ("and", "or"):
            parts = min(2 + self._below(self._shape.width - 1), self._people)
        return Compound(form, tuple(self._part(form, depth - 1, people) for _ in range(parts)))

    def _part(self, around: Connective, depth: int, people: list[int]) -> Statement:
        if depth and self._inner_forms and self._random() < 0.5:
            form = self._choice(self._inner_forms)
            if not around == form == "not":
                is_denial = form == "not"
                return self._statement(
                    form, depth, people if is_denial else list(range(self._people))
                )
        return self._claim(people)

    def _claim(self, people: list[int]) -> Claim:
        return Claim(people.pop(self._below(len(people))), self._random() < 0.5)

    def _choice(self, options: Sequence[_Choice]) -> _Choice:
        return options[self._below(len(options))]

    def _below(self, bound: int) -> int:
        return int(self._random() * bound)


def _says_something(statement: Statement, truth: int, speaker: int, people: int) -> bool:
    """Whether the statement has information, and no part of it is redundant."""
    own = knight_sets(people)[speaker]
    if truth == own or truth == everything(people) ^ own:
        return False
    return _every_part_counts(statement, truth, people)


def _every_part_counts(statement: Statement, truth: int, people: int) -> bool:
    """Whether everyone mentioned matters, and no part of an `and` or `or` is redundant."""
    if isinstance(statement, Claim):
        return True
    knights = knight_sets(people)
    for person in mentioned(statement):
        # Shifting by 2**person turns the knave's assignments into the knight's.
        if not (truth ^ truth >> (1 << person)) & knights[person]:
            return False
    sets = [truth_set(part, people) for part in statement.parts]
    if statement.kind in ("and", "or") and any(
        _joined(statement.kind, sets[:place] + sets[place + 1 :], people) == truth
        for place in range(len(sets))
    ):
        return False
    return all(
        _every_part_counts(part, part_truth, people)
        for part, part_truth in zip(statement.parts, sets, strict=True)
    )


def _joined(kind: Connective, sets: Sequence[int], people: int) -> int:
    joined = everything(people) if kind == "and" else 0
    for truth in sets:
        joined = joined & truth if kind == "and" else joined | truth
    return joined
