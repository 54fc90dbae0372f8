"""Rows of Knights and Knaves: generated from a seed, or read from published Parquet files.

Generated rows cycle through the numbers of people, so every range of rows is spread evenly over the
levels. The same settings give the same rows, and rows of `train` and `test` never share a puzzle,
not even under other names, for any seeds and counts.

A puzzle is sampled solution first, then a form for each speaker, then statements of that form until
one fits the speaker's role, so knights and knaves, and the forms, are about equally frequent.
Every puzzle has exactly one solution. Puzzles of one call have different canonical keys, and a
longer call starts with the puzzles of a shorter one.

The prompt of a published row is made from its column `quiz`; ready-made prompts in the file are
ignored. Every row is checked: its solution must be the only one of its statements.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from sortedrl.config.checks import require
from sortedrl.core.randomness import mix, uniform
from sortedrl.data.knights_puzzle import (
    Assignment,
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
    parse_puzzle,
    require_share,
    solutions,
    split_of_key,
    truth_set,
)
from sortedrl.data.knights_wording import (
    PEOPLE,
    Roles,
    answer_text,
    compact_answer,
    compact_prompt,
    compact_trace,
    draw_names,
    quiz,
    trace,
)
from sortedrl.data.rows import Record, Row, read_records
from sortedrl.errors import ConfigError, DataError, unknown_name

Form = Literal["claim", "not", "and", "or", "->", "<=>"]
"""The top of a statement: a claim about one person, or a connective."""

FORMS: tuple[Form, ...] = get_args(Form)
MIN_PEOPLE, MAX_PEOPLE, MAX_WIDTH, MAX_DEPTH = 2, 8, 8, 4

_Choice = TypeVar("_Choice")
_STATEMENT_TRIES = 40
_FRUITLESS_TRIES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementShape:
    """The forms and sizes of statements."""

    forms: tuple[Form, ...] = FORMS
    """Allowed forms of statements and their parts; claims inside others are always allowed."""
    width: int = 2
    """Maximum number of parts of an and, and of an or."""
    depth: int = 1
    """Maximum depth of connectives: 1 joins claims, 2 joins such joins."""

    def __post_init__(self) -> None:
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
    shape: StatementShape | None = None,
    seed: int = 0,
    split: Split = "train",
    test_share: float = 0.1,
    advance: Callable[[], None] | None = None,
) -> list[Puzzle]:
    """`count` different puzzles; raises `ConfigError` if there are too few.

    `advance` is called for each.
    """
    require(
        MIN_PEOPLE <= people <= MAX_PEOPLE,
        f"knights.people must lie in {MIN_PEOPLE}..{MAX_PEOPLE}, got {people}",
    )
    require_share(test_share)
    draw = _Draw(random.Random(mix(seed, people)), shape or StatementShape(), people)
    found: list[Puzzle] = []
    keys: set[str] = set()
    tries = fruitless = 0
    while len(found) < count:
        # The more are known, the longer it takes to find a new one.
        if fruitless > _FRUITLESS_TRIES + 20 * len(keys):
            raise ConfigError(
                f"{count} different {split} puzzles with {people} people were requested, but only "
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
    """Samples puzzles; of the generator's methods only `random` is used.

    The others may differ between Python versions.
    """

    def __init__(self, generator: random.Random, shape: StatementShape, people: int) -> None:
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
    """Whether the statement is informative, and no part of it is redundant."""
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


Style = Literal["words", "compact"]

_SYSTEM = (
    "You solve logic puzzles. Reason first, inside <think> </think>. Then give the result, and "
    "nothing else, inside <answer> </answer>: one line for each person, numbered in the order in "
    "which they are introduced. An answer begins like this:\n"
    "<answer>\n(1) Zoey is {a_knight}\n(2) ...\n</answer>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnightsSettings:
    """Generated Knights-and-Knaves puzzles."""

    people: tuple[int, int] = (3, 7)
    """Minimum and maximum number of people, 2 to 8; the number is the level of the row."""
    count: int = 1000
    """Total number of puzzles, spread evenly over the numbers of people."""
    seed: int = 0
    """Seed of the puzzles."""
    split: Split = "train"
    """train or test; the two have no puzzle in common."""
    test_share: float = 0.1
    """Share of all puzzles that belongs to test; keep it the same for both splits."""
    forms: tuple[Form, ...] = FORMS
    """Forms of statements: a plain claim about one person, or claims joined by a connective."""
    width: int = 2
    """Maximum number of parts of an and, and of an or."""
    depth: int = 1
    """Maximum depth of connectives: 1 joins claims, 2 joins such joins."""
    style: Style = "words"
    """words: English sentences and a chat prompt.
    compact: a few symbols, for a tiny model trained from scratch."""
    haste: float = 0.0
    """Style compact only: probability that a worked response gives up after a failed try and
    answers wrongly. A model that imitates such responses can improve by rewards."""
    roles: tuple[str, str] = ("knight", "knave")
    """Style words: the nouns for those who tell the truth and those who lie."""

    def __post_init__(self) -> None:
        low, high = self.people
        require(
            MIN_PEOPLE <= low <= high <= MAX_PEOPLE,
            f"knights.people must be two numbers in {MIN_PEOPLE}..{MAX_PEOPLE}, the smaller "
            f"first, got {low} and {high}",
        )
        require(self.count >= 1, f"knights.count must be at least 1, got {self.count}")
        for name, kind, names in (
            (self.split, "split", get_args(Split)),
            (self.style, "style", get_args(Style)),
        ):
            require(name in names, unknown_name(kind, name, names))
        require_share(self.test_share)
        require(
            self.style == "words" or self.roles == ("knight", "knave"),
            f"knights.roles needs style 'words', got {' and '.join(self.roles)} with style "
            "'compact', which uses letters instead; leave roles out",
        )
        require(
            0 <= self.haste < 1 and (self.haste == 0 or self.style == "compact"),
            f"knights.haste must lie in [0, 1) and needs style 'compact', got {self.haste} with "
            f"style {self.style!r}",
        )
        # Both check their values when they are made.
        _ = self.shape, Roles(*self.roles)

    @property
    def shape(self) -> StatementShape:
        """The forms and sizes of statements."""
        return StatementShape(forms=self.forms, width=self.width, depth=self.depth)


def knights_rows(
    settings: KnightsSettings, *, advance: Callable[[float], None] | None = None
) -> list[Row]:
    """The rows of these settings; raises `ConfigError` if there are too few puzzles.

    `advance` receives the share that is done.
    """
    low, high = settings.people
    number_found = itertools.count(1)

    def one_more() -> None:
        if advance is not None:
            advance(next(number_found) / settings.count)

    levels = high - low + 1
    puzzles = [
        generate(
            people,
            len(range(people - low, settings.count, levels)),
            shape=settings.shape,
            seed=settings.seed,
            split=settings.split,
            test_share=settings.test_share,
            advance=one_more,
        )
        for people in range(low, high + 1)
    ]
    return [
        _generated_row(settings, puzzles[number % levels][number // levels], number)
        for number in range(settings.count)
    ]


def row_in_words(
    puzzle: Puzzle,
    solution: Assignment,
    *,
    names: Sequence[str],
    roles: Roles,
    text: str,
    place: str,
) -> Row:
    """A row that asks a language model for the solution of the puzzle in the text."""
    system = _SYSTEM.format(a_knight=roles.a(True))
    return Row(
        prompt=({"role": "system", "content": system}, {"role": "user", "content": text}),
        fields={
            "names": list(names),
            "solution": list(solution),
            "statements": puzzle.text,
            "level": puzzle.people,
            "answer": answer_text(names, solution, roles=roles),
            "roles": [roles.truthful, roles.lying],
            "response": trace(puzzle, names, roles=roles),
        },
        place=place,
    )


def _generated_row(settings: KnightsSettings, puzzle: Puzzle, number: int) -> Row:
    (solution,) = solutions(puzzle)
    place = f"knights, seed {settings.seed}, {settings.split}:{number + 1}"
    if settings.style == "compact":
        response = compact_trace(
            puzzle,
            gives_up=lambda tried: uniform(settings.seed, number, tried) < settings.haste,
        )
        return _compact_row(puzzle, solution, response=response, place=place)
    roles = Roles(*settings.roles)
    names = draw_names(puzzle.people, mix(settings.seed, number, 0))
    text = quiz(puzzle, names, roles=roles, seed=mix(settings.seed, number, 1))
    return row_in_words(puzzle, solution, names=names, roles=roles, text=text, place=place)


def _compact_row(puzzle: Puzzle, solution: Assignment, *, response: str, place: str) -> Row:
    return Row(
        prompt=compact_prompt(puzzle),
        fields={
            "names": list(PEOPLE[: puzzle.people]),
            "solution": list(solution),
            "statements": puzzle.text,
            "level": puzzle.people,
            "answer": compact_answer(solution),
            "roles": ["knight", "knave"],
            "response": response,
        },
        place=place,
    )


_Value = TypeVar("_Value")


def published_rows(path: Path, *, split: Split | None = None) -> list[Row]:
    """The rows of a Parquet file, or of all such files in a folder and the folders inside it.

    In a folder, files whose names begin with another split than `split` are skipped.
    The place of a row is `file:row`, with rows counted from 1.
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
            f"must hold files of the split {split!r}, found only others such as {found[0].name}; "
            f"write split={others[0]} to use them anyway",
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
            "names, solution and statements must have one entry per person, got "
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
    """A value of the row; raises `TypeError` if it is missing or of another type."""
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
