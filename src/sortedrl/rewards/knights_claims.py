r"""What an answer claims about each person, or why it is unclear.

    answer    sentences, separated by full stops, semicolons, list markers and new lines
    sentence  [lead-in] clause {, and clause}
    lead-in   "Answer:" | "I conclude that" | "Based on the statements,"
    clause    people is [not] [a] role {gloss}  |  [two] role [(gloss)] are (people | none)
    people    name {, and name}  |  everyone
    is, are   also : = - -> | "must be" and, for one person, nothing or brackets: "Zoey (knight)"
    gloss     ", not a knave" | "(truth-teller)" | "because her statement is true"
    list      a line "Knights:" and under it lines of names

A sentence with a name or a role is parsed completely, or the whole answer is unclear; an answer
that names an unknown person, contradicts itself or omits a person is unclear too. So an answer with
two solutions never counts as either of them, and hiding one gains nothing.
Only the words for the roles assign a role; statements that a person lies or tells the truth must
agree with it. Sentences without names and roles are skipped, unless they doubt or deny.
Markdown, simple HTML and LaTeX (`\boxed{}`, `\text{}`), tables and ticks are ignored.
Parsing takes linear time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

ROLES = ("knight", "knave")

_SHOWN_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Claims:
    """For each person in order, whether the answer calls them a knight."""

    is_knight: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Unclear:
    """Why the claims of an answer are unclear."""

    reason: str


def read_claims(
    answer: str, *, names: Sequence[str], roles: tuple[str, str] = ROLES
) -> Claims | Unclear:
    """What the answer claims about each of the names; the first of the roles is the knight's."""
    try:
        answer = _without_emoji_parts(answer)
        _check_characters(answer, alphabet="".join((*names, *roles)))
        vocabulary = _vocabulary(names, roles)
        reader = _Reader(len(names))
        sentence: list[_Token] = []
        for token in _tokens(_without_markup(_plain(answer), vocabulary), vocabulary):
            if token.kind in ("stop", "blank"):
                reader.read(sentence, ends_block=token.kind == "blank")
                sentence = []
            else:
                sentence.append(token)
        return Claims(reader.verdict(names))
    except _UnclearError as error:
        return Unclear(str(error))


def vocabulary_fault(names: Sequence[str], roles: tuple[str, str] = ROLES) -> str | None:
    """Why answers with these names and roles cannot be parsed; `None` if they can."""
    for word in (*names, *roles):
        if not _WORD.fullmatch(_plain(word)) or not word[0].isalpha():
            return f"each name and role must be one word, got {word!r}"
    words = [*map(_plain, names), *_forms(roles[0]), *_forms(roles[1])]
    if len(set(words)) < len(words):
        return f"names and roles must all differ, got {[*names, *roles]}"
    return None


class _UnclearError(Exception):
    """Carries the reason from any depth of the reader to `read_claims`."""


_Verb = Literal["is", "is not", "link", "not", "verbal"]
_Joint = Literal["comma", "and", "but", "lead", "opening", "reason"]
_People = Literal["name", "both", "all", "of them", "none", "count", "only", "pronoun"]
_Doubt = Literal["doubt", "hedge"]
_Rest = Literal[
    "role", "only", "truth", "article", "the", "open", "close", "stop", "blank", "other"
]
_Kind = _Verb | _Joint | _People | _Doubt | _Rest

_WORDS: Mapping[_Kind, str] = {
    "is": "is are be being 's",
    "is not": "isn't aren't",
    "link": ": = == - -- -> --> => ==> | \u2261",
    "not": "not",
    # Between a person and a role: "turns out to be", "has been identified as", "must be".
    "verbal": "must has have been to turns turn out as identified determined confirmed shown "
    "proven proved found established classified deduced concluded revealed",
    "and": "and & with",
    "but": "but while whereas although though however meanwhile",
    "comma": ", / \u2022 \u00b7",
    # Only words that affirm: any run of them may open a clause or follow its verb.
    "lead": "so therefore thus hence consequently accordingly then finally overall also too indeed "
    "clearly certainly definitely surely obviously necessarily ultimately always actually simply "
    "role identity status type statement statements",
    # Words that introduce a claim without changing its meaning.
    "opening": "in conclusion conclusions summary short total i we you can now my our your "
    "conclude find know see deduce infer determine derive obtain get say state declare "
    "deduction that this those there here follows following follow means mean implies imply shows "
    "show answer answers solution solutions result results final correct complete unique "
    "consistent assignment identities roles am at last well ok okay finished done first "
    "firstly second secondly third thirdly next lastly fourth fifth sixth seventh eighth sum up "
    "let's let us me summarize summarise exactly precisely reasoning analysis "
    "logic clear evident certain sure confident yes alright end such gives give tells leads "
    "meaning summarized",
    "only": "only",
    "reason": "because since due given based from per by according after considering under upon "
    "for having putting",
    "pronoun": "he she they it who which",
    "both": "both",
    "all": "everyone everybody all each every",
    "of them": "of them these people persons person inhabitants islanders characters",
    "none": "none nobody",
    "count": "no one two three four five six seven eight 0 1 2 3 4 5 6 7 8",
    "article": "a an",
    "the": "the",
    "open": "( [",
    "close": ") ]",
    "stop": ". ; !",
    # Refused before a claim; in a sentence without names they say nothing about one.
    "hedge": "think thinks thought believe believes believed feel suspect seem seems seemed appear "
    "appears says said claims claimed stated asserts asserted would should ought example "
    "examples hypothesis hypothetical scenario option",
    # Refused everywhere, since they may reverse the sentences around them.
    "doubt": "? < or either neither nor whether if unless except otherwise alternatively maybe "
    "perhaps possibly possible probably presumably apparently likely unlikely could might may "
    "guess assume assuming assumed suppose supposing supposed hypothetically unsure uncertain "
    "unknown never cannot wrong incorrect opposite reverse reversed inverse "
    "swapped swap versa contrary doubt doubtful impossible contradiction contradicts contradictory "
    "deny denies denied reject rejected refute refuted disproved invalid mistaken mistake hardly "
    "kidding joke sometimes usually mostly partly half instead pretend negation negated ignore "
    "\u2717 \u2718 \u2715 \u2716 \u2610 \u2612 \u2613 \u274c \u274e \u2753 \u2754 \u26d4 "
    "\U0001f6ab \U0001f44e \U0001f645 \U0001f937 \U0001f914 \U0001f643 \U0001f3b2 \U0001f91e "
    "\U0001f500 \U0001f501 \U0001f502 \U0001f503 \U0001f504 \u2260 \u00ac",
}
_DENIALS: frozenset[_Kind] = frozenset(("not", "is not", "none"))
_JOINTS: tuple[_Kind, ...] = ("comma", "and", "but", "lead")
_LEAD_INS: tuple[_Kind, ...] = (*_JOINTS, "opening", "pronoun", "of them")
_AFTER_OPENING: tuple[_Kind, ...] = ("is", "link", "verbal", "truth")
_COUNTS: Mapping[str, int] = {
    word: number % 9 for number, word in enumerate(_WORDS["count"].split())
}
_KINDS: Mapping[str, _Kind] = {word: kind for kind in _WORDS for word in _WORDS[kind].split()}
_SIGNS: Mapping[str, str] = {
    **dict.fromkeys("*`", ""),  # so that kn*a*ve is read as it is rendered
    **dict.fromkeys('_"{}$\u201c\u201d\u201e\u00ab\u00bb', " "),
    **dict.fromkeys("\u2018\u2019\u02bc", "'"),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u2192\u21d2\u27f6\u27f9\u2794\u279c\u27a1\u21a6", "->"),
    **{chr(ord(sign) + 0xFEE0): sign for sign in ":,;?!()"},  # their wide forms
    "\u3002": ".",
}
_SIGN_TABLE = str.maketrans(dict(_SIGNS))
_TRUE, _FALSE = "\ue000", "\ue001"
"""Placeholders for all words for telling the truth and lying; not allowed in answers."""
_BULLETS = "-+>#\u2022\u2023\u25e6\u25aa\u25cf\u00b7| \t"
_MARKER = re.compile(r"[(\[]?\d{1,3}[.):\]]{0,2}|[\u2460-\u2473]|[(\[]?([a-z]|[ivx]{2,4})[.)\]]")
_WORD = re.compile(
    r"'s\b|[^\W\d_][^\W_]*(?:'(?!s\b)[^\W_]+)*"  # a word, with the apostrophes inside it
    r"|\(\d{1,3}\)|\d{1,3}[.)](?=\s|$)"  # a list marker inside a line
    r"|[-=]+>?|!\w|[^\s']"  # an exclamation mark before a word may be a programmer's not
)
_TELLS = r"(?:tells?|telling|told|speaks?|speaking)\s++(?:only\s++)?(?:the\s++)?"
_TRUTH = re.compile(
    rf"\b(?:(?P<true>truth(?:-|\s?)tellers?|truthful|honest|true|{_TELLS}truth)"
    rf"|(?P<false>liars?|untruthful|dishonest|untrue|false|lies?|lied|lying|{_TELLS}(?:lies|lie)))\b"
)
_EMOJI = "[\u2600-\u27bf\u2b50-\u2b55\U0001f300-\U0001faff]"
_EMOJI_PARTS = re.compile(rf"(?<={_EMOJI})\ufe0f|(?P<digit>\d)\ufe0f?\u20e3")
# Anything else in HTML or LaTeX may strike a claim out, and is left to make the answer unclear.
_MARKUP = re.compile(
    r"(?P<line></?(?:br|p|ul|ol|li|div|h[1-6]|table|thead|tbody|tr)\s?/?>|\\\\|\\n(?![a-z])"
    r"|\\(?:begin|end)\s?(?:aligned|align|itemize|enumerate|center|gathered)\b|\\item\b)"
    r"|(?P<cell></?t[dh]>)"
    r"|(?P<arrow>\\(?:to|rightarrow|longrightarrow|implies|mapsto)\b)"
    r"|(?P<and>\\(?:land|wedge)\b)"
    r"|(?P<nothing></?(?:b|strong|i|em|u|span|code|center|mark)>|&nbsp;|&(?=\s?[=:-])"
    r"|\\[ ,;:!()\[\]]|\\(?:boxed|fbox|mbox|emph|underline|checkmark|quad|qquad"
    r"|(?:text|math)(?:bf|it|rm|sf|tt|up)?)\b)"
)
_AFFIRMED = re.compile(
    r"\b(?:only\s++possible|(?:without|beyond)\s++(?:a\s++|any\s++)?doubt|no\s++doubt"
    r"|(?:no|without)\s++(?:any\s++)?contradictions?|all\s++in\s++all"
    r"|if\s++you\s++(?:have|need)\s++(?:any\s++)?(?:more\s++|further\s++)?(?:questions?|help)"
    r"|(?:any|every)\s++other\s++(?:\w++\s++)?leads?\s++to\s++(?:a\s++)?contradictions?)\b"
)


class _Token(NamedTuple):
    """A word of an answer."""

    kind: _Kind
    text: str
    value: int = 0
    """The number of the person, a count, or 1 for the knight's role and for the truth."""


def _forms(role: str) -> set[str]:
    """A role as it may be written: one of them, or several."""
    word = _plain(role)
    return {word, word + "s", word + "es"}


def _vocabulary(names: Sequence[str], roles: tuple[str, str]) -> dict[str, _Token]:
    """The tokens of all known words; names take precedence over words of the grammar."""
    tokens = {word: _Token(kind, word, _COUNTS.get(word, 0)) for word, kind in _KINDS.items()}
    tokens[_TRUE], tokens[_FALSE] = _Token("truth", "true", 1), _Token("truth", "false", 0)
    for person, name in enumerate(names):
        tokens[_plain(name)] = _Token("name", name, person)
    for role, is_knight in zip(roles, (True, False), strict=True):
        tokens |= {word: _Token("role", word, is_knight) for word in _forms(role)}
    return tokens


def _plain(text: str) -> str:
    """The text in small letters, with one sign for each kind of quote, dash and arrow."""
    return text.casefold().translate(_SIGN_TABLE)


def _without_emoji_parts(text: str) -> str:
    """Emoji of one character each; a digit in a box is a list marker."""
    return _EMOJI_PARTS.sub(lambda match: f"({match['digit']}) " if match["digit"] else "", text)


def _check_characters(text: str, *, alphabet: str) -> None:
    """Refuse invisible characters, and letters that only look like those of names and roles."""
    known = {*alphabet.casefold(), *alphabet.upper(), *alphabet, *_SIGNS, *"\n\r\t"}
    for character in sorted(set(text) - known):
        category = unicodedata.category(character)
        if category[0] == "C" or (category[0] in "LM" and not character.isascii()):
            raise _UnclearError(f"the character {character!r} is not allowed in an answer")


def _without_markup(text: str, vocabulary: Mapping[str, _Token]) -> str:
    """The text as rendered, with words for lying and telling the truth replaced by placeholders."""

    def rendered(match: re.Match[str]) -> str:
        return {"line": "\n", "cell": " | ", "arrow": " -> ", "and": " and "}.get(
            match.lastgroup or "", " "
        )

    def truth(match: re.Match[str]) -> str:
        if match[0] in vocabulary:  # somebody, or a role, is called so
            return match[0]
        return _TRUE if match.lastgroup == "true" else _FALSE

    text = _MARKUP.sub(rendered, text)
    text = re.sub(_EMOJI, lambda match: match[0] if match[0] in vocabulary else " ", text)
    return _TRUTH.sub(truth, _AFFIRMED.sub(" ", text))


def _tokens(text: str, vocabulary: Mapping[str, _Token]) -> Iterator[_Token]:
    """The tokens of all lines, each line followed by a stop, or by a blank if it is empty."""
    for line in text.splitlines():
        words = _WORD.findall(_without_marker(line, vocabulary))
        for word, following in zip_longest(words, words[1:]):
            token = vocabulary.get(word, _other(word))
            if word in ("a", "an") and following in vocabulary:
                # The name A and the article: only the article stands before a role.
                token = _Token("article", word) if vocabulary[following].kind == "role" else token
            if token.kind == "doubt":
                raise _UnclearError(f"{word!r} leaves open what is claimed")
            yield token
        yield _Token("stop" if words else "blank", "")


def _other(word: str) -> _Token:
    if len(word) > 1 and word[-1] in ".)":
        return _Token("stop", word)
    return _Token("doubt" if word.endswith("n't") else "other", word)


def _without_marker(line: str, vocabulary: Mapping[str, _Token]) -> str:
    line = line.lstrip(_BULLETS).rstrip("| \t")
    marker = _MARKER.match(line)
    if marker and (marker[1] not in vocabulary or vocabulary[marker[1]].kind != "name"):
        line = line[marker.end() :].lstrip(_BULLETS)
    return line


class _Reader:
    """Reads sentence after sentence and keeps what they claim."""

    def __init__(self, num_people: int) -> None:
        self._everyone = range(num_people)
        self._is_knight: dict[int, bool] = {}
        self._is_truthful: dict[int, bool] = {}
        self._counts: dict[bool, int] = {}
        self._heading: bool | None = None
        self._is_heading_used = False
        self._tokens: Sequence[_Token] = ()
        self._place = 0

    def verdict(self, names: Sequence[str]) -> tuple[bool, ...]:
        """The claimed role of each person; raises `_UnclearError` if one is missing."""
        for person, name in enumerate(names):
            if person not in self._is_knight:
                raise _UnclearError(f"nothing is claimed about {name}")
        if any(self._is_knight[who] != self._is_truthful[who] for who in self._is_truthful):
            raise _UnclearError("a knight is said to lie, or a knave to tell the truth")
        roles = list(self._is_knight.values())
        for role, count in self._counts.items():
            if roles.count(role) != count:
                raise _UnclearError(
                    f"a role that {count} people are said to have is given to {roles.count(role)}"
                )
        return tuple(self._is_knight[person] for person in self._everyone)

    def read(self, sentence: Sequence[_Token], *, ends_block: bool) -> None:
        """Parse one sentence; a blank line ends the list under a heading such as `Knights:`."""
        if sentence:
            self._tokens, self._place = sentence, 0
            kinds = [token.kind for token in sentence]
            first = next((i for i, kind in enumerate(kinds) if kind in ("name", "role")), None)
            if first is None:
                self._aside(kinds)
            elif not self._is_remark(kinds):
                self._skip_lead_in(kinds, first)
                self._claims()
        if ends_block and self._is_heading_used:
            self._heading = None

    def _aside(self, kinds: Sequence[_Kind]) -> None:
        """A sentence without names and roles."""
        if self._heading is None:
            self._require(self._affirms(0, len(kinds)))
        else:
            self._require([*kinds] == ["none"])
            self._count(self._heading, 0)
            self._is_heading_used = True

    def _is_remark(self, kinds: Sequence[_Kind]) -> bool:
        """Whether names are only mentioned: `These are the roles of Zoey and Ethan:`."""
        return (
            self._heading is None
            and kinds[0] in ("opening", "of them", "the", "lead", "reason", "pronoun")
            and not {"role", "truth", "hedge", *_DENIALS}.intersection(kinds)
        )

    def _affirms(self, start: int, stop: int) -> bool:
        """Whether nothing in the range denies or is called a lie."""
        return not any(
            token.kind in _DENIALS or (token.kind == "truth" and not token.value)
            for token in self._tokens[start:stop]
        )

    def _skip_lead_in(self, kinds: Sequence[_Kind], first: int) -> None:
        """Skip a lead-in that ends in a colon, or a reason followed by a comma."""
        ends = [i + 1 for i in range(first) if self._tokens[i].text in (":", "|")]
        is_reason = "reason" in kinds[:2] or self._tokens[0].text in ("as", "in", "to")
        if not ends and is_reason:
            ends = [i + 1 for i in range(first) if kinds[i] == "comma"]
        if ends:
            self._place = ends[-1]
            self._require(self._affirms(0, self._place) and "hedge" not in kinds[: self._place])

    def _claims(self) -> None:
        """Clause after clause, or names under a heading."""
        self._take_lead_in()
        if self._heading is not None and self._next in ("name", "both"):
            self._claim(self._people(), self._heading)
            self._is_heading_used = True
            self._require(self._next is None)
            return
        self._require(self._heading is None or self._next in ("the", "count", "role"))
        self._heading = None
        is_joined = True
        while self._next is not None:
            start = self._place
            if self._next in ("the", "count", "role"):
                self._require(is_joined)
                self._role_and_people()
            else:
                # "Zoey is a knight Ethan is a knave", but not "Zoey knight Ethan knave".
                is_linked = self._people_and_role()
                self._require(is_joined or (is_linked and self._tokens[start].kind == "name"))
                if is_linked and self._kind_at(self._place + 1) == "name":
                    self._take("link")
                if is_linked and self._next == "name":
                    is_joined = False
                    continue
            is_joined = self._take_lead_in()
            self._require(is_joined or self._next is None)

    def _take_lead_in(self) -> bool:
        """Skip words that join clauses or introduce a claim: `so we conclude that`."""
        start, is_open = self._place, False
        while (kind := self._next) is not None:
            following = self._kind_at(self._place + 1)
            if kind in _LEAD_INS:
                is_open |= kind != "comma"
            elif kind in ("reason", "count", "only"):
                # "Since Zoey is a knight, ...", "One can see that ...", but "two knights: ...".
                starts = ("name", "the", "opening") if kind == "reason" else ("opening",)
                if following not in starts and not (kind == "reason" and is_open):
                    break
                is_open = True
            elif kind in ("the", "article"):
                if following not in _LEAD_INS:
                    break
            elif not is_open or kind not in _AFTER_OPENING:
                break
            elif kind == "truth":
                self._require(bool(self._tokens[self._place].value))
            self._place += 1
        return self._place > start

    def _people_and_role(self) -> bool:
        """Parse a clause such as `Zoey is a knight`; returns whether a verb or sign links it."""
        is_collective = self._next in ("both", "all")
        people = self._people()
        is_linked = self._take("link")
        is_denied = self._take("is not")
        if not is_denied:
            start = self._place
            self._take_all("is", "link", "verbal", "lead")
            is_linked |= any(token.kind != "lead" for token in self._tokens[start : self._place])
            is_collective |= self._take("both") | self._take("all")
            is_denied = self._take("not")
            # "Zoey, Ethan a knave" can be read in two ways, and so can "all are not knights".
            self._require(is_linked or len(people) == 1)
        self._require(not (is_denied and is_collective))
        is_bracketed = self._take("open")
        self._take_all("article", "the")
        if self._next == "truth":
            self._place += 1
            is_truthful = bool(self._tokens[self._place - 1].value) != is_denied
            self._require(self._take("close") == is_bracketed)
            self._note_truth(people, is_truthful)
            return is_linked
        is_knight = self._role() != is_denied
        self._require(self._take("close") == is_bracketed)
        self._contrast(is_knight, is_denied=is_denied)
        self._glosses(is_knight)
        self._claim(people, is_knight)
        return is_linked

    def _contrast(self, is_knight: bool, *, is_denied: bool) -> None:
        """The same from the other side: `, not a knave` or, after a denial, `but a knight`."""
        place = self._place
        is_bracketed = self._take("open")
        self._take("comma")
        has_but = self._take("but")
        if not has_but:
            self._take("and")
        if self._take("not"):
            self._require(self._role() != is_knight)
            self._require(self._take("close") == is_bracketed)
        elif is_denied and has_but and self._next in ("article", "role"):
            self._require(self._role() == is_knight)
        else:
            self._place = place

    def _glosses(self, is_knight: bool) -> None:
        """Parse the meaning of a role or its reason: `(a liar)`, `since she tells the truth`."""
        while self._next is not None:
            place = self._place
            if self._next == "open":
                self._bracket(is_knight)
                continue
            self._take("comma")
            if self._gives_reason():
                if not self._skip_reason():
                    self._place = place
                    return
                continue
            self._take_all("comma", "and", "link", "lead", "pronoun", "is", "article", "opening")
            if self._next != "truth":
                self._place = place
                return
            self._require(bool(self._tokens[self._place].value) == is_knight)
            self._place += 1

    def _gives_reason(self) -> bool:
        token = self._tokens[self._place] if self._place < len(self._tokens) else None
        return token is not None and (token.kind == "reason" or token.text == "as")

    def _bracket(self, is_knight: bool) -> None:
        """A remark in brackets, without names; what it says of roles and lies must agree."""
        while not self._take("close"):
            self._require(self._next is not None)
            token = self._tokens[self._place]
            self._place += 1
            self._require(token.kind not in (*_DENIALS, "name", "hedge"))
            if token.kind in ("role", "truth"):
                self._require(bool(token.value) == is_knight)

    def _skip_reason(self) -> bool:
        """Skip a reason that names no role; one that does is an ordinary clause."""
        stop, is_comparison = self._place, self._tokens[self._place].text == "as"
        while (kind := self._kind_at(stop)) is not None:
            if kind == "role":
                return False
            self._require(kind not in _DENIALS and not (kind == "name" and is_comparison))
            after = stop
            if kind in ("comma", "and", "but"):
                while self._kind_at(after) in _LEAD_INS:
                    after += 1
                if self._kind_at(after) in (None, "name", "role", "the", "count", "all", "both"):
                    break
            stop = max(after, stop + 1)
        self._place = stop
        return True

    def _role_and_people(self) -> None:
        """A clause such as `the knights are Zoey and Mia`, or `two knights`."""
        self._take("the")
        count = self._tokens[self._place].value if self._next == "count" else None
        self._place += count is not None
        is_knight = self._role()
        if count is not None:
            self._count(is_knight, count)
        if self._next == "open" and self._kind_at(self._place + 1) == "name":
            self._place += 1
            self._claim(self._people(), is_knight)
            self._require(self._take("close"))
            return
        if self._next == "open":
            self._bracket(is_knight)
        if not self._take_all("link", "is"):
            self._require(count is not None)
        elif self._next is None:
            self._heading, self._is_heading_used = is_knight, False
        elif self._take("none"):
            self._count(is_knight, 0)
        else:
            is_bracketed = self._take("open")
            self._claim(self._people(), is_knight)
            self._require(self._take("close") == is_bracketed)

    def _people(self) -> Sequence[int]:
        if self._take("all"):
            self._take_all("of them", "the")
            if self._next == "count":
                self._require(self._tokens[self._place].value == len(self._everyone))
                self._place += 1
            self._take_all("of them", "the")
            return self._everyone
        is_pair = self._take("both") and len(self._everyone) == 2
        if is_pair and self._next != "name":
            self._take_all("of them", "the")
            return self._everyone
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
        is_denied = self._kind_at(self._place - 1) in _DENIALS
        self._take_all("article", "the")
        is_only = self._take("only")
        self._require(self._next == "role" and not (is_only and is_denied))
        token = self._tokens[self._place]
        self._place += 1
        if is_only and not token.text.endswith("s"):
            self._count(bool(token.value), 1)
        return bool(token.value)

    def _claim(self, people: Sequence[int], is_knight: bool) -> None:
        for person in people:
            if self._is_knight.setdefault(person, is_knight) != is_knight:
                raise _UnclearError("one person is given both roles")

    def _note_truth(self, people: Sequence[int], is_truthful: bool) -> None:
        for person in people:
            if self._is_truthful.setdefault(person, is_truthful) != is_truthful:
                raise _UnclearError("one person is said both to lie and to tell the truth")

    def _count(self, is_knight: bool, count: int) -> None:
        if self._counts.setdefault(is_knight, count) != count:
            raise _UnclearError("two different counts are given for one role")

    @property
    def _next(self) -> _Kind | None:
        """The kind of the next token; `None` at the end of the sentence."""
        return self._kind_at(self._place)

    def _kind_at(self, place: int) -> _Kind | None:
        return self._tokens[place].kind if place < len(self._tokens) else None

    def _take(self, kind: _Kind) -> bool:
        is_next = self._next == kind
        self._place += is_next
        return is_next

    def _take_all(self, *kinds: _Kind) -> bool:
        start = self._place
        while self._next in kinds:
            self._place += 1
        return self._place > start

    def _require(self, holds: bool) -> None:
        if not holds:
            text = " ".join(token.text for token in self._tokens[:_SHOWN_TOKENS])
            raise _UnclearError(f"cannot parse {text!r}")
