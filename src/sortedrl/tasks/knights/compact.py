"""The same puzzles in few symbols, for a tiny model trained from scratch.

    A:B&c;B:a|C;C:A>B?      A says: B is a knight and C a knave. B says: A is a knave or ...

A capital is a knight, a small letter a knave: `B` claims that B is a knight, `b` that B is a
knave. `!` is not, `&` and, `|` or, `>` if-then, `=` if and only if; parts that are joins
themselves stand in brackets. The answer writes everyone in the order of the people: `ABc`.

The response tries every assignment in order, `#` before each, person A changing fastest, and
checks the speakers in turn up to the first whose words do not fit:

    <think>#ABC A:B1&c0/0-  #aBC a:B1&c0/0+ B:a1|C1/1+ C:A0>B1/1+</think><answer>aBC</answer>

(without the spaces). A check copies the speaker from the assignment and the statement from the
prompt, with 1 or 0 after each claim and each bracket, and after the negation of what precedes;
then `/` and the value of the whole; then `+` if that fits the speaker, `-` if not.
So each symbol follows from the nearest assignment, one statement, and the symbols just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from sortedrl.rewards.tags import TAGS
from sortedrl.tasks.knights.puzzle import (
    MAX_DEPTH,
    Assignment,
    Claim,
    Compound,
    Connective,
    Puzzle,
    Statement,
    assignment,
    holds,
)

PEOPLE = "ABCDEFGH"
ALPHABET: tuple[str, ...] = (*TAGS, *PEOPLE, *PEOPLE.lower(), *":;?!&|>=()#/01+-")
"""Every symbol of prompts and responses; a tag is one symbol."""

_SYMBOLS: dict[Connective, str] = {"not": "!", "and": "&", "or": "|", "->": ">", "<=>": "="}
_JOINS: dict[str, Connective] = {_SYMBOLS[kind]: kind for kind in _SYMBOLS if kind != "not"}


def split_symbols(text: str) -> list[str]:
    """The text as symbols of the alphabet; a `ValueError` names the first that is none."""
    symbols: list[str] = []
    position = 0
    while position < len(text):
        tag = next((tag for tag in TAGS if text.startswith(tag, position)), None)
        symbol = tag or text[position]
        if symbol not in ALPHABET:
            raise ValueError(f"{symbol!r} at place {position} is no symbol of the compact form")
        symbols.append(symbol)
        position += len(symbol)
    return symbols


def compact_prompt(puzzle: Puzzle) -> str:
    """The puzzle in symbols, as a question."""
    if puzzle.people > len(PEOPLE):
        raise ValueError(
            f"the compact form has letters for {len(PEOPLE)} people, got {puzzle.people}"
        )
    said = (f"{PEOPLE[i]}:{_written(s)}" for i, s in enumerate(puzzle.statements))
    return ";".join(said) + "?"


def compact_answer(roles: Assignment) -> str:
    """An assignment in letters: `aBC`."""
    return "".join(_letter(person, is_knight) for person, is_knight in enumerate(roles))


def compact_trace(puzzle: Puzzle, *, gives_up: Callable[[int], bool] = lambda number: False) -> str:
    """The whole response, up to the first solution; a `ValueError` if there is none.

    A teacher who gives up after a failed try, told by its number, answers with what failed.
    """
    tried: list[str] = []
    for number in range(1 << puzzle.people):
        roles = assignment(number, puzzle.people)
        tried.append(f"#{compact_answer(roles)}")
        for speaker, statement in enumerate(puzzle.statements):
            value = holds(statement, roles)
            fits = value == roles[speaker]
            letter = _letter(speaker, roles[speaker])
            verdict = "+" if fits else "-"
            tried.append(f"{letter}:{_evaluated(statement, roles)}/{value:d}{verdict}")
            if not fits:
                break
        else:
            return _response(tried, roles)
        if gives_up(number):
            return _response(tried, roles)
    raise ValueError(f"a puzzle must have a solution to be explained, got {puzzle.text}")


def _response(tried: Sequence[str], roles: Assignment) -> str:
    return f"<think>{''.join(tried)}</think><answer>{compact_answer(roles)}</answer>"


def read_prompt(text: str) -> Puzzle:
    """The puzzle that a prompt writes; a `ValueError` says where it cannot be understood."""
    if not text.endswith("?"):
        raise ValueError(f"a prompt must end with '?', got {text!r:.200}")
    statements: list[Statement] = []
    for speaker, said in enumerate(text[:-1].split(";")):
        start = f"{PEOPLE[speaker : speaker + 1]}:"
        if len(start) == 1 or not said.startswith(start):
            raise ValueError(
                f"statement {speaker + 1} must start with {start!r}, got {said!r:.200}"
            )
        statements.append(_Reader(said[len(start) :]).statement())
    return Puzzle(tuple(statements))


def read_answer(text: str) -> Assignment:
    """The assignment that an answer writes; a `ValueError` where it is none."""
    if not text or text.upper() != PEOPLE[: len(text)]:
        raise ValueError(
            f"an answer must write everyone in order, such as 'aBC', got {text!r:.200}"
        )
    return tuple(letter.isupper() for letter in text)


def _letter(person: int, is_knight: bool) -> str:
    return PEOPLE[person] if is_knight else PEOPLE[person].lower()


def _written(statement: Statement) -> str:
    if isinstance(statement, Claim):
        return _letter(statement.person, statement.is_knight)
    parts = [_bracketed(part, _written(part)) for part in statement.parts]
    symbol = _SYMBOLS[statement.kind]
    return symbol + parts[0] if statement.kind == "not" else symbol.join(parts)


def _evaluated(statement: Statement, roles: Assignment) -> str:
    """The statement with the value of every part behind it, except its own if it is a join."""
    if isinstance(statement, Claim):
        return f"{_letter(statement.person, statement.is_knight)}{holds(statement, roles):d}"
    parts = [_evaluated_part(part, roles) for part in statement.parts]
    symbol = _SYMBOLS[statement.kind]
    return symbol + parts[0] if statement.kind == "not" else symbol.join(parts)


def _evaluated_part(part: Statement, roles: Assignment) -> str:
    text = _bracketed(part, _evaluated(part, roles))
    return text if isinstance(part, Claim) else f"{text}{holds(part, roles):d}"


def _bracketed(part: Statement, text: str) -> str:
    return f"({text})" if isinstance(part, Compound) and part.kind != "not" else text


class _Reader:
    """Reads one statement symbol by symbol."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def statement(self) -> Statement:
        """The statement that is the whole text."""
        statement = self._joined(MAX_DEPTH)
        if self._place < len(self._text):
            self._refuse("the end")
        return statement

    def _joined(self, depth_left: int) -> Statement:
        """Parts with one kind of join between them."""
        parts = [self._part(depth_left)]
        symbol = self._peek()
        if symbol not in _JOINS:
            return parts[0]
        while self._peek() == symbol:
            self._place += 1
            parts.append(self._part(depth_left))
        return Compound(_JOINS[symbol], tuple(parts))

    def _part(self, depth_left: int) -> Statement:
        if depth_left < 0:
            raise ValueError(f"statements must not be nested deeper than {MAX_DEPTH}")
        symbol = self._peek()
        if not symbol or symbol.upper() not in f"{PEOPLE}!(":
            self._refuse("a person, '!' or '('")
        self._place += 1
        if symbol == "!":
            return Compound("not", (self._part(depth_left - 1),))
        if symbol == "(":
            inner = self._joined(depth_left - 1)
            if self._peek() != ")":
                self._refuse("')'")
            self._place += 1
            return inner
        return Claim(PEOPLE.index(symbol.upper()), symbol.isupper())

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _refuse(self, wanted: str) -> NoReturn:
        there = self._peek() or "the end"
        raise ValueError(f"{wanted} must come next in {self._text!r:.200}, got {there!r}")
