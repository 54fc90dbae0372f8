"""The puzzle behind a text, in words (ours or that of published sets) or in compact symbols.

A report is a sentence with one name outside the statement, the speaker's:

    "<statement>," says Ada.        Ada says: "<statement>."        Ada claims that <statement>.

Every person speaks exactly once. Sentences whose statement cannot be read are no reports: the
introduction and the question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sortedrl.data.knights_puzzle import MAX_DEPTH, Claim, Compound, Connective, Puzzle, Statement
from sortedrl.data.knights_wording import KNIGHTS, NUMBER_WORDS, PEOPLE, Roles
from sortedrl.rewards.tags import TAGS

_REPORTS = (
    re.compile(r'"(?P<statement>[^"]+?)[,.]?"(?P<frame>[^".]+)\.'),
    re.compile(r'(?P<frame>[^".?]+)"(?P<statement>[^"]+?)\.?"\.?'),
    re.compile(r'(?P<frame>[^".?,]+?(?: that|,)) (?P<statement>[^".?]+)\.'),
)
_SENTENCE_END = re.compile(r'[.?!]"?\s+|"\.\s+')
_TOKEN = re.compile(r"[\w'-]+|[,;:]")


def read_puzzle(text: str, names: Sequence[str], *, roles: Roles = KNIGHTS) -> Puzzle:
    """The puzzle that the text words; a `ValueError` names the person whose words are missing."""
    said: dict[int, Statement] = {}
    position = 0
    while position < len(text):
        report = _report(text, position, names, roles)
        if report is None:
            end = _SENTENCE_END.search(text, position)
            position = end.end() if end else len(text)
            continue
        speaker, statement, position = report
        if speaker in said:
            raise ValueError(f"everyone must speak once, but {names[speaker]} speaks twice")
        said[speaker] = statement
    for speaker, name in enumerate(names):
        if speaker not in said:
            raise ValueError(f"everyone must speak once, but no statement by {name} can be read")
    return Puzzle(tuple(said[speaker] for speaker in range(len(names))))


def read_statement(text: str, names: Sequence[str], *, roles: Roles = KNIGHTS) -> Statement:
    """The statement that a phrase words; a `ValueError` says where it cannot be understood."""
    reader = _Reader(text, names, roles)
    statement = reader.whole()
    reader.expect_end()
    return statement


def _report(
    text: str, position: int, names: Sequence[str], roles: Roles
) -> tuple[int, Statement, int] | None:
    """Speaker, statement and the place after it, if a report starts here."""
    for pattern in _REPORTS:
        match = pattern.match(text, position)
        if match is None:
            continue
        speakers = [
            person
            for person, name in enumerate(names)
            if re.search(rf"\b{re.escape(name)}\b", match["frame"])
        ]
        if len(speakers) != 1:
            continue
        try:
            statement = read_statement(match["statement"], names, roles=roles)
        except ValueError:
            continue
        rest = text[match.end() :].lstrip()
        return speakers[0], statement, len(text) - len(rest)
    return None


class _Reader:
    """Reads a statement word by word; which form it has, its first words say."""

    def __init__(self, text: str, names: Sequence[str], roles: Roles) -> None:
        self._text = text
        self._names = names
        self._roles = roles
        self._words: list[str] = _TOKEN.findall(text)
        self._place = 0

    def whole(self) -> Statement:
        """A statement that nothing surrounds: claims may be joined without a leading word."""
        first = self._part(MAX_DEPTH)
        if self._place == len(self._words):
            return first
        if self._skip("if and only if"):
            return Compound("<=>", (first, self._part(MAX_DEPTH)))
        parts = [first]
        joined_by: Connective | None = None
        while joined_by is None:
            has_comma = self._skip(",")
            joined_by = "and" if self._skip("and") else "or" if self._skip("or") else None
            if not has_comma and joined_by is None:
                raise self._error("'and', 'or' or 'if and only if'")
            parts.append(self._part(MAX_DEPTH))
        return Compound(joined_by, tuple(parts))

    def expect_end(self) -> None:
        """Refuse words that are left over."""
        if self._place < len(self._words):
            raise self._error("the end")

    def _part(self, depth_left: int) -> Statement:
        if depth_left < 0:
            raise ValueError(f"statements must not be nested deeper than {MAX_DEPTH}")
        inner = depth_left - 1
        if self._skip("it is not the case that"):
            return Compound("not", (self._part(inner),))
        if self._skip("if"):
            first = self._part(inner)
            self._skip(",")
            self._expect("then")
            return Compound("->", (first, self._part(inner)))
        if self._skip("either both or neither of these two hold :"):
            return Compound("<=>", self._parts(2, "and", inner))
        if self._skip("both"):
            return Compound("and", self._parts(2, "and", inner))
        if self._skip("either"):
            return Compound("or", self._parts(2, "or", inner))
        if self._skip("all"):
            count = self._number()
            self._expect("of these hold :")
            return Compound("and", self._parts(count, "and", inner))
        if self._skip("at least one of these"):
            count = self._number()
            self._expect("holds :")
            return Compound("or", self._parts(count, "or", inner))
        return self._claim()

    def _parts(self, count: int, word: str, depth_left: int) -> tuple[Statement, ...]:
        """`count` statements: commas or semicolons between them, and the word before the last."""
        parts = [self._part(depth_left)]
        while len(parts) < count:
            is_last = len(parts) == count - 1
            has_comma = self._skip(",") or self._skip(";")
            if is_last:
                self._expect(word)
            elif not has_comma:
                raise self._error("a comma or a semicolon")
            parts.append(self._part(depth_left))
        return tuple(parts)

    def _claim(self) -> Statement:
        name = self._next("a name")
        if name not in self._names:
            self._place -= 1
            raise self._error(f"one of the names {', '.join(self._names)}")
        self._expect("is")
        is_denied = self._skip("not")
        if not self._skip("a"):
            self._expect("an")
        word = self._next("a role")
        if word not in (self._roles.truthful, self._roles.lying):
            self._place -= 1
            raise self._error(f"{self._roles.truthful} or {self._roles.lying}")
        claim = Claim(self._names.index(name), word == self._roles.truthful)
        return Compound("not", (claim,)) if is_denied else claim

    def _number(self) -> int:
        word = self._next("a number")
        if word in NUMBER_WORDS:
            return NUMBER_WORDS.index(word)
        if word.isdecimal():
            return int(word)
        self._place -= 1
        raise self._error("a number")

    def _next(self, wanted: str) -> str:
        if self._place == len(self._words):
            raise self._error(wanted)
        self._place += 1
        return self._words[self._place - 1]

    def _skip(self, words: str) -> bool:
        """Whether these words come next; then they are passed over."""
        wanted = words.split()
        there = self._words[self._place : self._place + len(wanted)]
        # Only the first word of a statement may have a capital that is not its own.
        if there and there[0] not in self._names:
            there = [there[0].lower(), *there[1:]]
        if there != wanted:
            return False
        self._place += len(wanted)
        return True

    def _expect(self, words: str) -> None:
        if not self._skip(words):
            raise self._error(repr(words))

    def _error(self, wanted: str) -> ValueError:
        there = " ".join(self._words[self._place : self._place + 4]) or "the end"
        return ValueError(f"{wanted} must come next in {self._text!r:.200}, got {there!r}")


ALPHABET = (*TAGS, *PEOPLE, *PEOPLE.lower(), *":;?!&|>=()#/01+-")
_JOINS: dict[str, Connective] = {"&": "and", "|": "or", ">": "->", "=": "<=>"}


def split_symbols(text: str) -> list[str]:
    """A compact text as symbols; a tag is one symbol."""
    symbols = re.findall(r"</?(?:think|answer)>|.", text, re.DOTALL)
    assert set(symbols) <= set(ALPHABET)
    return symbols


def read_compact(prompt: str) -> Puzzle:
    """The puzzle that a compact prompt writes."""
    said = [part.split(":") for part in prompt.removesuffix("?").split(";")]
    assert [name for name, _ in said] == list(PEOPLE[: len(said)])
    statements = []
    for _, symbols in said:
        rest = list(reversed(symbols))
        statements.append(_compact_joined(rest))
        assert not rest
    return Puzzle(tuple(statements))


def _compact_joined(rest: list[str]) -> Statement:
    parts = [_compact_part(rest)]
    symbol = rest[-1] if rest else ""
    while symbol in _JOINS and rest and rest[-1] == symbol:
        rest.pop()
        parts.append(_compact_part(rest))
    return parts[0] if len(parts) == 1 else Compound(_JOINS[symbol], tuple(parts))


def _compact_part(rest: list[str]) -> Statement:
    symbol = rest.pop()
    if symbol == "!":
        return Compound("not", (_compact_part(rest),))
    if symbol == "(":
        inner = _compact_joined(rest)
        assert rest.pop() == ")"
        return inner
    return Claim(PEOPLE.index(symbol.upper()), symbol.isupper())
