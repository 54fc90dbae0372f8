"""A puzzle in plain English, and its solution as numbered lines.

The words determine the puzzle: `reading.read_puzzle` gives it back, part by part.
Claims joined once are worded plainly (`Ada is a knight and Bruno is a knave`).
Inside another statement a join says first what it joins and how many parts follow
(`both ... and ...`, `at least one of these three holds: ...`), so that no reader has to guess
where it ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sortedrl.tasks.knights.cast import Roles
from sortedrl.tasks.knights.puzzle import Assignment, Claim, Compound, Puzzle, Statement

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
    """The puzzle as a text; the seed picks among ways to say the same."""
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
    """What somebody says, without a capital or a full stop."""
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
    """The statement in words that show where it ends, whatever follows."""
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
    """The parts after a colon; semicolons set them apart where they have commas of their own."""
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
