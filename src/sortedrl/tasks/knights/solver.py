"""Every solution of a puzzle, from sets of assignments kept as the bits of one integer.

Assignments are numbered: person `i` is a knave exactly if bit `i` of the number is set, so that
number 0 makes everyone a knight and person 0 changes fastest.
A statement is the set of the numbers under which it is true, so `and` is `&` and `or` is `|`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from sortedrl.tasks.knights.puzzle import Assignment, Claim, Puzzle, Statement

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
    """The assignments under which one speaker's words fit their role: both true, or neither."""
    truth = truth_set(puzzle.statements[speaker], puzzle.people)
    return everything(puzzle.people) ^ knight_sets(puzzle.people)[speaker] ^ truth


def consistent_set(puzzle: Puzzle) -> int:
    """The assignments under which everyone's words fit their role."""
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
