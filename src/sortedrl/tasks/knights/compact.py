"""Knights and Knaves in a compact notation, for tiny models trained from scratch.

    A:B&c;B:a|C;C:A>B?      A says: B is a knight and C a knave. B says: A is a knave or ...

A capital is a knight, a small letter a knave: `B` claims that B is a knight, `b` that B is a
knave. `!` is not, `&` and, `|` or, `>` if-then, `=` if and only if; nested joins are
in brackets. The answer writes everyone in the order of the people: `ABc`.

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

from sortedrl.tasks.knights.puzzle import (
    Assignment,
    Claim,
    Connective,
    Puzzle,
    Statement,
    assignment,
    holds,
)

PEOPLE = "ABCDEFGH"
_SYMBOLS: dict[Connective, str] = {"not": "!", "and": "&", "or": "|", "->": ">", "<=>": "="}


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

    `gives_up` takes the number of a failed try; if true, the trace ends and answers with that try.
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
            tried.append(f"{letter}:{_written(statement, roles)}/{value:d}{verdict}")
            if not fits:
                break
        else:
            return _response(tried, roles)
        if gives_up(number):
            return _response(tried, roles)
    raise ValueError(f"a puzzle must have a solution to be explained, got {puzzle.text}")


def _response(tried: Sequence[str], roles: Assignment) -> str:
    return f"<think>{''.join(tried)}</think><answer>{compact_answer(roles)}</answer>"


def _letter(person: int, is_knight: bool) -> str:
    return PEOPLE[person] if is_knight else PEOPLE[person].lower()


def _written(statement: Statement, roles: Assignment | None = None) -> str:
    """The statement in symbols; with roles, each part is followed by its value.

    The value of a join that is the whole statement is left out.
    """
    if isinstance(statement, Claim):
        letter = _letter(statement.person, statement.is_knight)
        return letter if roles is None else f"{letter}{holds(statement, roles):d}"
    parts = [_part(part, roles) for part in statement.parts]
    symbol = _SYMBOLS[statement.kind]
    return symbol + parts[0] if statement.kind == "not" else symbol.join(parts)


def _part(part: Statement, roles: Assignment | None) -> str:
    text = _written(part, roles)
    if isinstance(part, Claim):
        return text
    text = text if part.kind == "not" else f"({text})"
    return text if roles is None else f"{text}{holds(part, roles):d}"
