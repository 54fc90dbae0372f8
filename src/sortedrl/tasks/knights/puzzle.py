"""A puzzle: one statement per person, and what a statement says under an assignment of roles.

Everything here is frozen and can be compared and hashed.
`Puzzle.text` and `parse_puzzle` are inverse to each other; the text is that of the published sets:

    (('lying', 1), ('and', ('telling-truth', 0), ('not', ('telling-truth', 1))))
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Connective = Literal["not", "and", "or", "->", "<=>"]
"""How statements are joined: negation, all of, at least one of, implication, equivalence."""

Assignment = tuple[bool, ...]
"""For each person, whether they are a knight."""

MAX_DEPTH = 32
"""Nesting beyond this is refused when text is read, so that no walk over a statement overflows."""

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
        """Refuse statements about people who are not there."""
        if not self.statements:
            raise ValueError("a puzzle needs at least one person, got no statement")
        for speaker, statement in enumerate(self.statements):
            for person in mentioned(statement):
                if not 0 <= person < self.people:
                    raise ValueError(
                        f"people are numbered 0..{self.people - 1} (one for each statement), but "
                        f"person {speaker} speaks of person {person}"
                    )

    @property
    def people(self) -> int:
        """Number of people."""
        return len(self.statements)

    @property
    def text(self) -> str:
        """The statements as the published sets write them."""
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


def depth(statement: Statement) -> int:
    """Connectives on the longest way down to a claim; 0 for a claim."""
    if isinstance(statement, Claim):
        return 0
    return 1 + max(depth(part) for part in statement.parts)


def mentioned(statement: Statement) -> frozenset[int]:
    """The people the statement speaks of."""
    if isinstance(statement, Claim):
        return frozenset((statement.person,))
    return frozenset().union(*(mentioned(part) for part in statement.parts))


def parse_puzzle(text: str) -> Puzzle:
    """The puzzle written as in the published sets; a `ValueError` says what is wrong with it."""
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
