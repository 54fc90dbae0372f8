"""A puzzle: one statement per person, its solutions, and a key that is the same under other names.

All types are frozen, comparable and hashable.
`Puzzle.text` and `parse_puzzle` are inverse to each other; the text is that of the published sets:

    (('lying', 1), ('and', ('telling-truth', 0), ('not', ('telling-truth', 1))))

Solutions come from sets of assignments stored as the bits of one integer. Person `i` is a knave
exactly if bit `i` of the number of an assignment is set, so number 0 makes everyone a knight and
person 0 changes fastest. A statement is the set of the numbers under which it is true, so `and` is
`&` and `or` is `|`.

Two puzzles have the same canonical key exactly if renaming and reordering the people, and
reordering the parts of `and`, `or` and `<=>`, turns one into the other. People are coloured by what
they say and by who speaks of them, until the colours are stable (colour refinement). If people
still share a colour, each of them is individualised in turn, and the smallest text is the key.
Interchangeable people are tried only once, so symmetric puzzles are fast too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Literal, TypeAlias, get_args

from sortedrl.config.checks import require

Connective = Literal["not", "and", "or", "->", "<=>"]
"""How statements are joined: negation, all of, at least one of, implication, equivalence."""

Assignment = tuple[bool, ...]
"""For each person, whether they are a knight."""

MAX_DEPTH = 32
"""Deeper nesting is refused in parsed text, so that recursion over a statement cannot overflow."""

_CONNECTIVES = get_args(Connective)


@dataclass(frozen=True, slots=True)
class Claim:
    """`person` is a knight, or is a knave."""

    person: int
    is_knight: bool


@dataclass(frozen=True, slots=True)
class Compound:
    """Statements joined by a connective: one under `not`, two under `->` and `<=>`."""

    kind: Connective
    parts: tuple[Statement, ...]

    def __post_init__(self) -> None:
        """Refuse a connective with the wrong number of parts."""
        if self.kind not in _CONNECTIVES:
            raise ValueError(
                f"a connective must be one of {', '.join(_CONNECTIVES)}, got {self.kind!r}"
            )
        least, most = _ARITY[self.kind]
        if len(self.parts) < least or (most is not None and len(self.parts) > most):
            wanted = str(least) if most == least else f"at least {least}"
            raise ValueError(f"{self.kind!r} joins {wanted} statements, got {len(self.parts)}")


Statement: TypeAlias = Claim | Compound

_ARITY: dict[Connective, tuple[int, int | None]] = {
    "not": (1, 1),
    "and": (2, None),
    "or": (2, None),
    "->": (2, 2),
    "<=>": (2, 2),
}


@dataclass(frozen=True, slots=True)
class Puzzle:
    """What each person says; person `i` says `statements[i]`."""

    statements: tuple[Statement, ...]

    def __post_init__(self) -> None:
        """Refuse statements about unknown people."""
        if not self.statements:
            raise ValueError("a puzzle needs at least one person, got no statement")
        for speaker, statement in enumerate(self.statements):
            for person in mentioned(statement):
                if not 0 <= person < self.people:
                    raise ValueError(
                        f"people are numbered 0..{self.people - 1} (one per statement), but "
                        f"person {speaker} speaks of person {person}"
                    )

    @property
    def people(self) -> int:
        """Number of people."""
        return len(self.statements)

    @property
    def text(self) -> str:
        """The statements in the format of the published sets."""
        return repr(tuple(_as_tuple(statement) for statement in self.statements))


def holds(statement: Statement, assignment: Assignment) -> bool:
    """Whether the statement is true under these roles."""
    if isinstance(statement, Claim):
        return assignment[statement.person] == statement.is_knight
    values = [holds(part, assignment) for part in statement.parts]
    match statement.kind:
        case "not":
            return not values[0]
        case "and":
            return all(values)
        case "or":
            return any(values)
        case "->":
            return not values[0] or values[1]
        case "<=>":
            return values[0] == values[1]


def mentioned(statement: Statement) -> frozenset[int]:
    """The people the statement speaks of."""
    if isinstance(statement, Claim):
        return frozenset((statement.person,))
    return frozenset().union(*(mentioned(part) for part in statement.parts))


def parse_puzzle(text: str) -> Puzzle:
    """Parse the format of the published sets; a `ValueError` says what is wrong."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"statements must be a tuple of nested tuples of names and numbers, got {text!r:.200}"
        ) from error
    if not isinstance(value, tuple):
        raise ValueError(f"statements must be a tuple, got {text!r:.200}")
    return Puzzle(tuple(_from_tuple(part, MAX_DEPTH) for part in value))


def _as_tuple(statement: Statement) -> tuple[object, ...]:
    if isinstance(statement, Claim):
        return ("telling-truth" if statement.is_knight else "lying", statement.person)
    return (statement.kind, *(_as_tuple(part) for part in statement.parts))


def _from_tuple(value: object, depth_left: int) -> Statement:
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"a statement must be a tuple such as ('lying', 0), got {value!r:.200}")
    kind, *rest = value
    if kind in ("telling-truth", "lying"):
        if len(rest) != 1 or type(rest[0]) is not int:
            raise ValueError(
                f"{kind!r} must be followed by one person's number, got {value!r:.200}"
            )
        return Claim(rest[0], kind == "telling-truth")
    if kind not in _CONNECTIVES:
        known = ", ".join(("telling-truth", "lying", *_CONNECTIVES))
        raise ValueError(f"a statement must start with one of {known}, got {kind!r:.200}")
    if depth_left == 0:
        raise ValueError(f"statements must not be nested deeper than {MAX_DEPTH}")
    return Compound(kind, tuple(_from_tuple(part, depth_left - 1) for part in rest))


MAX_PEOPLE = 16
"""A set has a bit for each of the `2 ** people` assignments."""


@cache
def everything(people: int) -> int:
    """The set of all assignments."""
    if not 1 <= people <= MAX_PEOPLE:
        raise ValueError(f"the solver takes 1..{MAX_PEOPLE} people, got {people}")
    return (1 << (1 << people)) - 1


@cache
def knight_sets(people: int) -> tuple[int, ...]:
    """For each person, the set of assignments that make them a knight."""
    full = everything(people)
    # Blocks of 2**i ones and 2**i zeros in turn, starting with ones.
    return tuple(full // ((1 << (1 << person)) + 1) for person in range(people))


def truth_set(statement: Statement, people: int) -> int:
    """The set of assignments under which the statement is true."""
    return _truth_set(statement, knight_sets(people), everything(people))


def fitting_set(puzzle: Puzzle, speaker: int) -> int:
    """The assignments under which a speaker's statement fits their role: both true, or neither."""
    truth = truth_set(puzzle.statements[speaker], puzzle.people)
    return everything(puzzle.people) ^ knight_sets(puzzle.people)[speaker] ^ truth


def consistent_set(puzzle: Puzzle) -> int:
    """The assignments under which everyone's statement fits their role."""
    left = everything(puzzle.people)
    for speaker in range(puzzle.people):
        left &= fitting_set(puzzle, speaker)
    return left


def solutions(puzzle: Puzzle) -> list[Assignment]:
    """Every assignment that solves the puzzle, in the order of their numbers."""
    return [assignment(number, puzzle.people) for number in members(consistent_set(puzzle))]


def members(numbers: int) -> Iterator[int]:
    """The assignment numbers in a set, in order."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest


def assignment(number: int, people: int) -> Assignment:
    """The assignment with this number."""
    return tuple(not number >> person & 1 for person in range(people))


def number_of(roles: Assignment) -> int:
    """The number of an assignment."""
    return sum(1 << person for person, is_knight in enumerate(roles) if not is_knight)


def _truth_set(statement: Statement, knights: tuple[int, ...], full: int) -> int:
    if isinstance(statement, Claim):
        knight = knights[statement.person]
        return knight if statement.is_knight else full ^ knight
    sets = [_truth_set(part, knights, full) for part in statement.parts]
    first = sets[0]
    match statement.kind:
        case "not":
            return full ^ first
        case "and":
            for other in sets[1:]:
                first &= other
            return first
        case "or":
            for other in sets[1:]:
                first |= other
            return first
        case "->":
            return (full ^ first) | sets[1]
        case "<=>":
            return full ^ first ^ sets[1]


Split = Literal["train", "test"]


def canonical_key(puzzle: Puzzle) -> str:
    """The text of the puzzle after the renaming that makes it smallest."""
    search = _Search(puzzle)
    return min(search.text(places) for places in search.leaves([0] * puzzle.people))


def split_of_key(key: str, test_share: float) -> Split:
    """The split of a canonical key."""
    require_share(test_share)
    digest = blake2b(key.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) < test_share * 2**64 else "train"


def require_share(test_share: float) -> None:
    """Refuse a share that leaves one of the splits almost empty."""
    require(
        0.001 <= test_share <= 0.999,
        f"knights.test_share must lie in 0.001..0.999, got {test_share}; if you need no "
        "test set, keep the default and use the split 'train'",
    )


class _Search:
    """Searches the orders of people that colours cannot distinguish."""

    def __init__(self, puzzle: Puzzle) -> None:
        self._statements = puzzle.statements
        spoken_of = [mentioned(statement) for statement in puzzle.statements]
        self._speakers_about = [
            [s for s, people in enumerate(spoken_of) if person in people and s != person]
            for person in range(puzzle.people)
        ]

    def leaves(self, colours: list[int]) -> Iterator[list[int]]:
        """Colours that differ for everyone: positions 0, 1, ... for the people."""
        colours = self._settled(colours)
        shared = _first_shared(colours)
        if shared is None:
            yield colours
            return
        tried: list[int] = []
        for person in shared:
            if any(self._interchangeable(person, other) for other in tried):
                continue
            tried.append(person)
            singled_out = [2 * colour + 1 for colour in colours]
            singled_out[person] -= 1
            yield from self.leaves(singled_out)

    def text(self, places: list[int]) -> str:
        labels = [str(place) for place in places]
        texts = [""] * len(places)
        for place, statement in zip(places, self._statements, strict=True):
            texts[place] = _text(statement, labels)
        return ";".join(texts)

    def _settled(self, colours: list[int]) -> list[int]:
        """Refine the colours until another round distinguishes no more people."""
        num_colours = 0
        while True:
            looks = [self._looks(person, colours) for person in range(len(colours))]
            ranks = {look: rank for rank, look in enumerate(sorted(set(looks)))}
            colours = [ranks[look] for look in looks]
            if len(ranks) in (num_colours, len(colours)):
                return colours
            num_colours = len(ranks)

    def _looks(self, person: int, colours: list[int]) -> tuple[int, str, tuple[str, ...]]:
        """The features that distinguish a person: colour, own statement, statements about them."""
        labels = [str(colour) for colour in colours]
        labels[person] = "*"
        heard = sorted(
            f"{colours[speaker]}:{_text(self._statements[speaker], labels)}"
            for speaker in self._speakers_about[person]
        )
        return colours[person], _text(self._statements[person], labels), tuple(heard)

    def _interchangeable(self, one: int, other: int) -> bool:
        """Whether swapping these two leaves the puzzle unchanged."""
        places = list(range(len(self._statements)))
        before = self.text(places)
        places[one], places[other] = other, one
        return self.text(places) == before


def _first_shared(colours: list[int]) -> list[int] | None:
    """The people of the first colour that several have."""
    for colour in range(len(colours)):
        people = [person for person, own in enumerate(colours) if own == colour]
        if len(people) > 1:
            return people
    return None


def _text(statement: Statement, labels: Sequence[str]) -> str:
    """The statement with people by label and unordered parts sorted."""
    if isinstance(statement, Claim):
        return ("+" if statement.is_knight else "-") + labels[statement.person]
    parts = [_text(part, labels) for part in statement.parts]
    if statement.kind != "->":
        parts.sort()
    return f"{statement.kind}({','.join(parts)})"
