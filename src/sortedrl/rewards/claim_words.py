"""The words of an answer about knights and knaves, each with what it can mean there.

Names and roles are read in any capitals, with the signs of Markdown taken away; a word that
leaves open what is claimed, or a character that cannot be seen, makes the answer unclear at once.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

ROLES = ("knight", "knave")


def vocabulary_fault(names: Sequence[str], roles: tuple[str, str] = ROLES) -> str | None:
    """Why an answer about these names and roles cannot be read; `None` if it can."""
    for word in (*names, *roles):
        if not _WORD.fullmatch(plain(word)) or not word[0].isalpha():
            return f"each name and role must be one word, got {word!r}"
    words = [*map(plain, names), *_forms(roles[0]), *_forms(roles[1])]
    if len(set(words)) < len(words):
        return f"names and roles must all differ, got {[*names, *roles]}"
    return None


def _forms(role: str) -> set[str]:
    """A role as it may be written: one of them, or several."""
    word = plain(role)
    return {word, word + "s", word + "es"}


class UnclearError(Exception):
    """Carries the reason from any depth of the reader to `claims.read_claims`."""


_Verb = Literal["is", "is not", "link", "not"]
_Joint = Literal["comma", "and", "but", "lead"]
_People = Literal["name", "both", "all", "of them", "none"]
_Rest = Literal["role", "article", "the", "open", "close", "stop", "blank", "doubt", "other"]
Kind = _Verb | _Joint | _People | _Rest

_WORDS: Mapping[Kind, str] = {
    "is": "is are 's",
    "is not": "isn't aren't",
    "link": ": = == - -- -> --> => ==>",
    "not": "not",
    "and": "and &",
    "but": "but while whereas",
    "comma": ",",
    # Only words that affirm: any run of them may open a clause or follow its verb.
    "lead": "so therefore thus hence consequently then finally overall also in conclusion summary "
    "short we have conclude find know that it follows",
    "both": "both",
    "all": "everyone everybody all each",
    "of them": "of them these people persons person inhabitants islanders characters",
    "none": "none nobody",
    "article": "a an",
    "the": "the",
    "open": "(",
    "close": ")",
    "stop": ". ; !",
    # Refused wherever they stand, since they may turn the sentences around them.
    "doubt": "? < or either neither nor whether if unless except otherwise alternatively maybe "
    "perhaps possibly possible probably presumably apparently likely unlikely could might may "
    "guess assume assuming assumed suppose supposing supposed hypothetically unsure uncertain "
    "unknown never cannot false wrong incorrect untrue lie lies opposite reverse reversed inverse "
    "swapped versa contrary",
}
DENIALS: frozenset[Kind] = frozenset(("not", "is not", "none"))
JOINTS: tuple[Kind, ...] = get_args(_Joint)
_KINDS: Mapping[str, Kind] = {word: kind for kind in _WORDS for word in _WORDS[kind].split()}
_SIGNS: Mapping[str, str] = {
    **dict.fromkeys("*`", ""),  # so that kn*a*ve is read as it is rendered
    **dict.fromkeys('_"\u201c\u201d\u201e\u00ab\u00bb', " "),
    **dict.fromkeys("\u2018\u2019\u02bc", "'"),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u2192\u21d2\u27f6\u2794\u279c", "->"),
    **{chr(ord(sign) + 0xFEE0): sign for sign in ":,;?!()"},  # their wide forms
    "\u3002": ".",
}
_SIGN_TABLE = str.maketrans(dict(_SIGNS))
_BULLETS = "-+>#\u2022\u2023\u25e6\u25aa\u25cf\u00b7 \t"
_MARKER = re.compile(r"[(\[]?\d{1,3}[.):\]]{0,2}|[\u2460-\u2473]|[(\[]?([a-z]|[ivx]{2,4})[.)\]]")
_WORD = re.compile(
    r"'s\b|[^\W\d_][^\W_]*(?:'(?!s\b)[^\W_]+)*"  # a word, with the apostrophes inside it
    r"|\(\d{1,3}\)|\d{1,3}[.)](?=\s|$)"  # a list marker inside a line
    r"|[-=]+>?|!\w|[^\s']"  # an exclamation mark before a word may be a programmer's not
)


class Token(NamedTuple):
    """A word of an answer."""

    kind: Kind
    text: str
    value: int = 0
    """The number of the person, or 1 for the knight's role and 0 for the knave's."""


def vocabulary_of(names: Sequence[str], roles: tuple[str, str]) -> dict[str, Token]:
    """The tokens of all words with a meaning; a name goes before a word of the grammar."""
    tokens = {word: Token(kind, word) for word, kind in _KINDS.items()}
    for person, name in enumerate(names):
        tokens[plain(name)] = Token("name", name, person)
    for role, is_knight in zip(roles, (True, False), strict=True):
        tokens |= {word: Token("role", word, is_knight) for word in _forms(role)}
    return tokens


def plain(text: str) -> str:
    """The text in small letters, with one sign for each kind of quote, dash and arrow."""
    return text.casefold().translate(_SIGN_TABLE)


def check_characters(text: str, *, alphabet: str) -> None:
    """Refuse what cannot be seen, and letters that only look like those of names and roles."""
    known = {*alphabet.casefold(), *alphabet.upper(), *alphabet, *_SIGNS, *"\n\r\t"}
    for character in sorted(set(text) - known):
        category = unicodedata.category(character)
        if category[0] == "C" or (category[0] in "LM" and not character.isascii()):
            raise UnclearError(f"the character {character!r} has no place in an answer")


def tokens_of(text: str, vocabulary: Mapping[str, Token]) -> Iterator[Token]:
    """The tokens of all lines, each line followed by a stop, or by a blank if it is empty."""
    for line in text.splitlines():
        words = _WORD.findall(_without_marker(line, vocabulary))
        for word, following in zip_longest(words, words[1:]):
            token = vocabulary.get(word, _other(word))
            if word in ("a", "an") and following in vocabulary:
                # The name A and the article: only the article stands before a role.
                token = Token("article", word) if vocabulary[following].kind == "role" else token
            if token.kind == "doubt":
                raise UnclearError(f"{word!r} leaves open what is claimed")
            yield token
        yield Token("stop" if words else "blank", "")


def _other(word: str) -> Token:
    if len(word) > 1 and word[-1] in ".)":
        return Token("stop", word)
    return Token("doubt" if word.endswith("n't") else "other", word)


def _without_marker(line: str, vocabulary: Mapping[str, Token]) -> str:
    line = line.lstrip(_BULLETS)
    marker = _MARKER.match(line)
    if marker and (marker[1] not in vocabulary or vocabulary[marker[1]].kind != "name"):
        line = line[marker.end() :].lstrip(_BULLETS)
    return line
