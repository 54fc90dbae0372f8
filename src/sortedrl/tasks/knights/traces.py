"""A way to the solution in words, to be imitated before reinforcement learning starts.

People are given roles in turn, knight first. As soon as a speaker's role and words cannot both
stand, whatever the others are, the last role is taken back. So each line follows from the roles
it names and one statement, and hard puzzles take many more lines than easy ones.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from sortedrl.tasks.knights.cast import Roles
from sortedrl.tasks.knights.puzzle import Assignment, Puzzle, holds
from sortedrl.tasks.knights.solver import everything, fitting_set, knight_sets
from sortedrl.tasks.knights.wording import KNIGHTS, answer_text, capitalised, listed, phrase

_OPENING = "I give out roles one person at a time, and take the last one back if it cannot stand."


@dataclass(frozen=True, slots=True)
class Step:
    """The roles of the first people, and the speaker whose words rule them out, if one does."""

    roles: Assignment
    ruled_out_by: int | None


def steps(puzzle: Puzzle) -> Iterator[Step]:
    """Everything tried, in order, up to the first solution; a `ValueError` if there is none."""
    fitting = [fitting_set(puzzle, speaker) for speaker in range(puzzle.people)]
    if not (yield from _steps((), everything(puzzle.people), fitting)):
        raise ValueError(f"a puzzle must have a solution to be explained, got {puzzle.text}")


def trace(puzzle: Puzzle, names: Sequence[str], *, roles: Roles = KNIGHTS) -> str:
    """The whole response: `<think>` the steps `</think><answer>` the solution `</answer>`."""
    lines = [_OPENING]
    solution: Assignment = ()
    for step in steps(puzzle):
        solution = step.roles
        lines += _step_lines(step, puzzle, names=names, roles=roles)
    lines.append("Now everyone has a role, and what they say fits it:")
    for name, is_knight, statement in zip(names, solution, puzzle.statements, strict=True):
        truth = "true" if holds(statement, solution) else "false"
        said = phrase(statement, names, roles=roles)
        lines.append(f"{name} is {roles.a(is_knight)}, and it is {truth} that {said}.")
    thoughts = "\n".join(lines)
    answer = answer_text(names, solution, roles=roles)
    return f"<think>\n{thoughts}\n</think><answer>\n{answer}\n</answer>"


def _steps(given: Assignment, possible: int, fitting: list[int]) -> Generator[Step, None, bool]:
    """Tries both roles of the next person; its result says whether a solution was reached."""
    people, person = len(fitting), len(given)
    if person == people:
        return True
    knights = knight_sets(people)[person]
    for is_knight in (True, False):
        left = possible & (knights if is_knight else ~knights)
        roles = (*given, is_knight)
        blamed = next((s for s in range(person + 1) if not left & fitting[s]), None)
        yield Step(roles, blamed)
        if blamed is None and (yield from _steps(roles, left, fitting)):
            return True
    return False


def _step_lines(step: Step, puzzle: Puzzle, *, names: Sequence[str], roles: Roles) -> Iterator[str]:
    given = list(zip(names, step.roles, strict=False))
    suppose = f"Suppose {listed([f'{name} is {roles.a(role)}' for name, role in given])}."
    if step.ruled_out_by is None:
        yield f"{suppose} Nothing speaks against it so far."
        return
    name, is_knight = given[step.ruled_out_by]
    said = phrase(puzzle.statements[step.ruled_out_by], names, roles=roles)
    truth = "false" if is_knight else "true"
    yield (
        f"{suppose} Then {name}, {roles.a(is_knight)}, would say something {truth}: "
        f'"{capitalised(said)}."'
    )
    still_knights = [other for other, role in given if role]
    if not step.roles[-1] and still_knights:
        last, _ = given[-1]
        yield f"Neither role is left for {last}, so back to {still_knights[-1]}."
