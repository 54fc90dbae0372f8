"""A puzzle as text, in plain English or in a compact notation, with a worked response.

In English no name is a substring of another, so that a name in a text is unambiguous. The text
determines the puzzle: the tests parse it back.
Claims joined once are worded plainly (`Ada is a knight and Bruno is a knave`).
A nested join first states its kind and the number of its parts (`both ... and ...`, `at least one
of these three holds: ...`), so its end is unambiguous.

A trace, for supervised training before reinforcement learning, assigns roles in turn, knight first.
As soon as a speaker's role contradicts their statement, whatever the others are, the last role is
revoked (backtracking). So each line follows from the roles it names and one statement, and hard
puzzles take many more lines than easy ones.

The compact notation is for tiny models trained from scratch:

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

import random
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from sortedrl.config.checks import require
from sortedrl.data.knights_puzzle import (
    Assignment,
    Claim,
    Compound,
    Connective,
    Puzzle,
    Statement,
    assignment,
    everything,
    fitting_set,
    holds,
    knight_sets,
)

NAMES = (
    *("Ada", "Amir", "Anton", "Bella", "Bruno", "Carmen", "Clara", "Cyrus", "Dario", "Delia"),
    *("Diego", "Edith", "Elsa", "Emeka", "Farid", "Felix", "Fiona", "Gavin", "Greta", "Hana"),
    *("Helen", "Hugo", "Irene", "Isaac", "Jonas", "Julia", "Karim", "Kofi", "Lena", "Linus"),
    *("Mabel", "Marco", "Maya", "Nadia", "Nils", "Nora", "Omar", "Oscar", "Paula", "Priya"),
    *("Quinn", "Ravi", "Rosa", "Ruben", "Simon", "Stella", "Tariq", "Tessa", "Ulla", "Vera"),
    *("Viktor", "Wanda", "Xenia", "Yara", "Yusuf", "Zane", "Zelda"),
)
"""Common first names from many places; none is a word of the puzzles."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The words for those who tell the truth and for those who lie."""

    truthful: str = "knight"
    lying: str = "knave"

    def __post_init__(self) -> None:
        """Refuse words that a text could not distinguish."""
        for word in (self.truthful, self.lying):
            require(
                re.fullmatch(r"[a-z]+", word) is not None,
                f"knights.roles must be two nouns, each one word in lower case, got {word!r}",
            )
        require(
            self.truthful not in self.lying and self.lying not in self.truthful,
            "knights.roles must be two words, neither of them part of the other, got "
            f"{self.truthful!r} and {self.lying!r}",
        )

    def word(self, is_knight: bool) -> str:
        """The word for a role."""
        return self.truthful if is_knight else self.lying

    def a(self, is_knight: bool) -> str:
        """The word with its article: `a knight`, `an angel`."""
        word = self.word(is_knight)
        return f"an {word}" if word[0] in "aeiou" else f"a {word}"

    def plural(self, is_knight: bool) -> str:
        """The word for several: `knights`, `heroes`, `spies`."""
        word = self.word(is_knight)
        if re.search(r"([^aeiou]o|s|x|z|ch|sh)$", word):
            return f"{word}es"
        if re.search(r"[^aeiou]y$", word):
            return f"{word[:-1]}ies"
        return f"{word}s"


def draw_names(count: int, seed: int) -> tuple[str, ...]:
    """Different names, in the order in which the people are introduced."""
    generator = random.Random(seed)
    left = list(NAMES)
    return tuple(left.pop(int(generator.random() * len(left))) for _ in range(count))


NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")

KNIGHTS = Roles()

_INTRODUCTIONS = (
    "In a small harbour town everyone is either {a_knight} or {a_knave}. Whatever {a_knight} says "
    "is true, and whatever {a_knave} says is false. {Number} of the townspeople are standing "
    "before you: {names}.",
    "Only {knights} and {knaves} live in this valley; {knights} say nothing but the truth, and "
    "{knaves} nothing but falsehoods. Today you run into {number} of them, called {names}.",
    "You are visiting a village of {knights} and {knaves}. Every statement made by {a_knight} is "
    "true, and every statement made by {a_knave} is false. By the well you find {number} of the "
    "villagers: {names}.",
    "Each guest at tonight's dinner is {a_knight}, who never says anything false, or {a_knave}, "
    "who never says anything true. You share a table with {number} guests: {names}.",
)

_OR_NOTE = 'Where somebody says "or", both may be true.'

_REPORTS = (
    '{name} says: "{Statement}."',
    '{name} declares, "{Statement}."',
    '{name} insists: "{Statement}."',
    '{name} nods and says, "{Statement}."',
    '{name}: "{Statement}."',
    '{name}\'s answer is: "{Statement}."',
    'From {name} you hear: "{Statement}."',
    'The words of {name} are: "{Statement}."',
    '"{Statement}," says {name}.',
    '"{Statement}," {name} whispers.',
    '"{Statement}," is what {name} tells everyone.',
    '"{Statement}." Those are the words of {name}.',
    "{name} claims that {statement}.",
    "{name} swears that {statement}.",
    "{name} wants you to believe that {statement}.",
    "You learn from {name} that {statement}.",
    "According to {name}, {statement}.",
    "In {name}'s view, {statement}.",
)

_QUESTIONS = (
    "Which of them are {knights}, and which are {knaves}?",
    "What is each of them, {a_knight} or {a_knave}?",
    "Find out for each of them: {knight} or {knave}?",
)


def quiz(puzzle: Puzzle, names: Sequence[str], *, roles: Roles = KNIGHTS, seed: int = 0) -> str:
    """The puzzle as a text; the seed picks among equivalent wordings."""
    generator = random.Random(seed)
    words = {
        "knight": roles.truthful,
        "knave": roles.lying,
        "a_knight": roles.a(True),
        "a_knave": roles.a(False),
        "knights": roles.plural(True),
        "knaves": roles.plural(False),
        "number": number_word(puzzle.people),
        "Number": capitalised(number_word(puzzle.people)),
        "names": listed(names),
    }
    sentences = [_pick(_INTRODUCTIONS, generator).format_map(words)]
    if any(_says_or(statement) for statement in puzzle.statements):
        sentences.append(_OR_NOTE)
    for name, statement in zip(names, puzzle.statements, strict=True):
        said = phrase(statement, names, roles=roles)
        report = _pick(_REPORTS, generator)
        sentences.append(report.format(name=name, statement=said, Statement=capitalised(said)))
    sentences.append(_pick(_QUESTIONS, generator).format_map(words))
    return " ".join(sentences)


def phrase(statement: Statement, names: Sequence[str], *, roles: Roles = KNIGHTS) -> str:
    """A statement in words, without a capital or a full stop."""
    if _is_plain(statement) or isinstance(statement, Claim):
        return _inner(statement, names, roles)
    parts = [_inner(part, names, roles) for part in statement.parts]
    if not all(map(_is_plain, statement.parts)):
        return _inner(statement, names, roles)
    match statement.kind:
        case "and" | "or":
            return _joined(parts, statement.kind)
        case "<=>":
            return f"{parts[0]} if and only if {parts[1]}"
        case _:
            return _inner(statement, names, roles)


def answer_text(names: Sequence[str], solution: Assignment, *, roles: Roles = KNIGHTS) -> str:
    """The solution, one numbered line for each person: `(1) Ada is a knight`."""
    people = enumerate(zip(names, solution, strict=True), start=1)
    return "\n".join(f"({number}) {name} is {roles.a(role)}" for number, (name, role) in people)


def number_word(number: int) -> str:
    """A small number in letters, a larger one in digits."""
    return NUMBER_WORDS[number] if number < len(NUMBER_WORDS) else str(number)


def capitalised(text: str) -> str:
    """The text with a capital first letter, and the rest untouched."""
    return text[0].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b, and c`."""
    return _joined(parts, "and") if len(parts) > 1 else parts[0]


def _inner(statement: Statement, names: Sequence[str], roles: Roles) -> str:
    """The statement in words that show where it ends."""
    if isinstance(statement, Claim):
        return f"{names[statement.person]} is {roles.a(statement.is_knight)}"
    first, *others = statement.parts
    if statement.kind == "not" and isinstance(first, Claim):
        return f"{names[first.person]} is not {roles.a(first.is_knight)}"
    parts = [_inner(part, names, roles) for part in statement.parts]
    pause = "" if _is_plain(first) else ","
    count = number_word(len(parts))
    match statement.kind:
        case "not":
            return f"it is not the case that {parts[0]}"
        case "->":
            return f"if {parts[0]}{pause} then {parts[1]}"
        case "<=>":
            return f"either both or neither of these two hold: {_enumerated(statement, parts)}"
        case "and" if len(others) == 1:
            return f"both {parts[0]}{pause} and {parts[1]}"
        case "or" if len(others) == 1:
            return f"either {parts[0]}{pause} or {parts[1]}"
        case "and":
            return f"all {count} of these hold: {_enumerated(statement, parts)}"
        case "or":
            return f"at least one of these {count} holds: {_enumerated(statement, parts)}"


def _enumerated(statement: Compound, parts: Sequence[str]) -> str:
    """The parts after a colon, separated by semicolons if they contain commas."""
    word = "or" if statement.kind == "or" else "and"
    if all(map(_is_plain, statement.parts)):
        return _joined(parts, word)
    return f"{'; '.join(parts[:-1])}; {word} {parts[-1]}"


def _is_plain(statement: Statement) -> bool:
    """Whether it is a claim or the denial of one."""
    return isinstance(statement, Claim) or (
        statement.kind == "not" and isinstance(statement.parts[0], Claim)
    )


def _says_or(statement: Statement) -> bool:
    return isinstance(statement, Compound) and (
        statement.kind == "or" or any(map(_says_or, statement.parts))
    )


def _joined(parts: Sequence[str], word: str) -> str:
    """`a and b`, or `a, b, and c`."""
    if len(parts) == 2:
        return f"{parts[0]} {word} {parts[1]}"
    return f"{', '.join(parts[:-1])}, {word} {parts[-1]}"


def _pick(options: Sequence[str], generator: random.Random) -> str:
    return options[int(generator.random() * len(options))]


_OPENING = "I give out roles one person at a time, and take the last one back if it cannot stand."


@dataclass(frozen=True, slots=True)
class TraceStep:
    """The roles of the first people, and the speaker whose statement rules them out, if any."""

    roles: Assignment
    ruled_out_by: int | None


def steps(puzzle: Puzzle) -> Iterator[TraceStep]:
    """All steps up to the first solution; raises `ValueError` if there is none."""
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


def _steps(
    given: Assignment, possible: int, fitting: list[int]
) -> Generator[TraceStep, None, bool]:
    """Try both roles of the next person; returns whether a solution was reached."""
    people, person = len(fitting), len(given)
    if person == people:
        return True
    knights = knight_sets(people)[person]
    for is_knight in (True, False):
        left = possible & (knights if is_knight else ~knights)
        roles = (*given, is_knight)
        blamed = next((s for s in range(person + 1) if not left & fitting[s]), None)
        yield TraceStep(roles, blamed)
        if blamed is None and (yield from _steps(roles, left, fitting)):
            return True
    return False


def _step_lines(
    step: TraceStep, puzzle: Puzzle, *, names: Sequence[str], roles: Roles
) -> Iterator[str]:
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
