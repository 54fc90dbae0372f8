"""What an answer claims about each person, or why that cannot be told.

    answer    sentences, parted by full stops, semicolons, list markers and new lines
    sentence  [lead-in:] clause {, and clause}
    clause    people is [not] [a] role [, not [a] role]  |  [the] role are (people | none)
    people    name {, and name}  |  everyone
    is, are   also : = - -> and, for one person, nothing or brackets: "Zoey (knight)"
    list      a line "Knights:" and under it lines of names

A sentence with a name or a role is understood in full, or the whole answer is unclear; so is one
that names a stranger, contradicts itself or leaves somebody out. So an answer that offers two
solutions is never taken for either of them, and there is nothing to gain by hiding one.
Sentences without names and roles are skipped, unless they doubt or deny. Time is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.rewards.claim_words import (
    DENIALS,
    JOINTS,
    ROLES,
    Kind,
    Token,
    UnclearError,
    check_characters,
    plain,
    tokens_of,
    vocabulary_of,
)

_SHOWN_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Claims:
    """For each person in order, whether the answer calls them a knight."""

    is_knight: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Unclear:
    """Why it cannot be told what the answer claims."""

    reason: str


def read_claims(
    answer: str, *, names: Sequence[str], roles: tuple[str, str] = ROLES
) -> Claims | Unclear:
    """What the answer claims about each of the names; the first of the roles is the knight's."""
    try:
        check_characters(answer, alphabet="".join((*names, *roles)))
        reader = _Reader(len(names))
        sentence: list[Token] = []
        for token in tokens_of(plain(answer), vocabulary_of(names, roles)):
            if token.kind in ("stop", "blank"):
                reader.read(sentence, ends_block=token.kind == "blank")
                sentence = []
            else:
                sentence.append(token)
        return Claims(reader.verdict(names))
    except UnclearError as error:
        return Unclear(str(error))


class _Reader:
    """Reads sentence after sentence and keeps what they claim."""

    def __init__(self, num_people: int) -> None:
        self._everyone = range(num_people)
        self._is_knight: dict[int, bool] = {}
        self._absent: set[bool] = set()
        self._heading: bool | None = None
        self._is_heading_used = False
        self._tokens: Sequence[Token] = ()
        self._place = 0

    def verdict(self, names: Sequence[str]) -> tuple[bool, ...]:
        """What has been claimed about each person, once it has been about everybody."""
        for person, name in enumerate(names):
            if person not in self._is_knight:
                raise UnclearError(f"nothing is claimed about {name}")
        if self._absent & set(self._is_knight.values()):
            raise UnclearError("somebody has a role that nobody is said to have")
        return tuple(self._is_knight[person] for person in self._everyone)

    def read(self, sentence: Sequence[Token], *, ends_block: bool) -> None:
        """Take in one sentence; a blank line ends the list under a heading such as `Knights:`."""
        if sentence:
            self._tokens, self._place = sentence, 0
            kinds = [token.kind for token in sentence]
            first = next((i for i, kind in enumerate(kinds) if kind in ("name", "role")), None)
            if first is None:
                self._aside(kinds)
            else:
                colons = [i for i in range(first) if sentence[i].text == ":"]
                self._place = colons[-1] + 1 if colons else 0
                self._require(not DENIALS.intersection(kinds[: self._place]))
                self._claims()
        if ends_block and self._is_heading_used:
            self._heading = None

    def _aside(self, kinds: Sequence[Kind]) -> None:
        """A sentence without names and roles."""
        if self._heading is None:
            self._require(not DENIALS.intersection(kinds))
        else:
            self._require([*kinds] == ["none"])
            self._absent.add(self._heading)
            self._is_heading_used = True

    def _claims(self) -> None:
        """Clause after clause, or names under a heading."""
        self._take_all(*JOINTS)
        if self._heading is not None and self._next in ("name", "both"):
            self._claim(self._people(), self._heading)
            self._is_heading_used = True
            self._require(self._next is None)
            return
        self._require(self._heading is None or self._next in ("the", "role"))
        self._heading = None
        while self._next is not None:
            if self._next in ("the", "role"):
                self._role_and_people()
            else:
                self._people_and_role()
            self._require(self._take_all(*JOINTS) or self._next is None)

    def _people_and_role(self) -> None:
        is_collective = self._next in ("both", "all")
        people = self._people()
        is_linked = self._take("link")
        is_denied = self._take("is not")
        if not is_denied:
            is_linked |= self._take("is") | self._take("link")
            self._take_all("lead")
            is_collective |= self._take("both") | self._take("all")
            is_denied = self._take("not")
            # "Zoey, Ethan a knave" can be read in two ways, and so can "all are not knights".
            self._require(is_linked or len(people) == 1)
        self._require(not (is_denied and is_collective))
        is_bracketed = self._take("open")
        is_knight = self._role() != is_denied
        self._require(self._take("close") == is_bracketed)
        self._contrast(is_knight, is_denied=is_denied)
        self._claim(people, is_knight)

    def _contrast(self, is_knight: bool, *, is_denied: bool) -> None:
        """The same from the other side: `, not a knave` or, after a denial, `but a knight`."""
        place = self._place
        self._take("comma")
        has_but = self._take("but")
        if not has_but:
            self._take("and")
        if self._take("not"):
            self._require(self._role() != is_knight)
        elif is_denied and has_but and self._next in ("article", "role"):
            self._require(self._role() == is_knight)
        else:
            self._place = place

    def _role_and_people(self) -> None:
        is_knight = self._role()
        self._require(self._take("link") | self._take("is") | self._take("link"))
        if self._next is None:
            self._heading, self._is_heading_used = is_knight, False
        elif self._take("none"):
            self._absent.add(is_knight)
        else:
            self._claim(self._people(), is_knight)

    def _people(self) -> Sequence[int]:
        if self._take("all"):
            self._take_all("of them", "the")
            return self._everyone
        self._take("both")
        people: list[int] = []
        place = self._place
        while self._next == "name":
            people.append(self._tokens[self._place].value)
            self._place = place = self._place + 1
            if not self._take("comma") | self._take("and"):
                break
        self._place = place
        self._require(people != [])
        return people

    def _role(self) -> bool:
        self._take_all("article", "the")
        self._require(self._next == "role")
        self._place += 1
        return bool(self._tokens[self._place - 1].value)

    def _claim(self, people: Sequence[int], is_knight: bool) -> None:
        for person in people:
            if self._is_knight.setdefault(person, is_knight) != is_knight:
                raise UnclearError("one person is given both roles")

    @property
    def _next(self) -> Kind | None:
        """The kind of the next token; `None` at the end of the sentence."""
        return self._tokens[self._place].kind if self._place < len(self._tokens) else None

    def _take(self, kind: Kind) -> bool:
        is_next = self._next == kind
        self._place += is_next
        return is_next

    def _take_all(self, *kinds: Kind) -> bool:
        start = self._place
        while self._next in kinds:
            self._place += 1
        return self._place > start

    def _require(self, holds: bool) -> None:
        if not holds:
            text = " ".join(token.text for token in self._tokens[:_SHOWN_TOKENS])
            raise UnclearError(f"cannot tell what is meant by {text!r}")
