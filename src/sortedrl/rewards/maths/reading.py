r"""Parsing of answers: the boxes of a response, normalised text, and the parts of an answer.

A box is complete when its braces balance, so a truncated box is not an answer. `\fbox` and
`\framebox` are boxes too, and so is a bare `\boxed 5`.

`tidied` keeps the meaning and drops the layout: `\dfrac`, `\left(`, `$`, thin spaces and Unicode
signs become the plain form, text stays in `\text{...}`. Every text is scanned a fixed number of
times, left to right: white space is collapsed first, and no pattern can backtrack.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile

_BOX_TOKEN = re.compile(
    r"(?P<box>\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*+(?P<brace>\{)?)"
    r"|\\\\(?!boxed|fbox|framebox)"  # a line break: the brace after it is a real one
    r"|\\[{}]"
    r"|(?P<open>\{)"
    r"|(?P<close>\})"
)
_BARE = re.compile(
    r"[-+]?(?:[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)(?:/[0-9]++)?%?|[A-Za-z](?![A-Za-z])"
)
_JOINED = re.compile(
    r"(?:[\s$.,;&]|\\[,;:\s()\[\]\\]|\\q?quad(?![A-Za-z])|\\text\{\s*+(?:and|or)\s*+\}|\b(?:and|or)\b"
    r"|\b[A-Za-z](?:_[0-9A-Za-z])?\s*+=)*+"
)
_SEPARATED = re.compile(r"[,;]|\b(?:and|or)\b")
_GREATEST_GAP = 200


@dataclass(frozen=True, slots=True)
class Box:
    """A complete box: its position, and that of its content."""

    start: int
    end: int
    inner: slice


@dataclass(frozen=True, slots=True)
class BoxedAnswer:
    """The answer in a text."""

    joined: tuple[str, ...]
    """The contents of the last complete box and of those before it, as long as only commas,
    `and` and `or` are between them: each claims to be the answer, or a part of it."""
    near: tuple[str, ...]
    """The contents of the last boxes that are near each other, ending with `joined`."""

    @property
    def last(self) -> str:
        """The content of the last complete box."""
        return self.joined[-1]


def boxed_answer(text: str) -> str | None:
    r"""The content of the last complete box; `None` if there is none.

    >>> boxed_answer(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> boxed_answer(r"so \boxed{\frac{1}{2}") is None
    True
    """
    answer = read_answer(text)
    return None if answer is None else answer.last


def read_answer(text: str) -> BoxedAnswer | None:
    """The boxes at the end of a text; `None` if there is none."""
    boxes = _boxes(text)
    if not boxes:
        return None
    gaps = [text[one.end : other.start] for one, other in pairwise(boxes)]
    contents = tuple(text[box.inner].strip() for box in boxes)
    return BoxedAnswer(
        joined=contents[-1 - _num_last(gaps, _is_separator) :],
        near=contents[-1 - _num_last(gaps, lambda gap: len(gap) <= _GREATEST_GAP) :],
    )


def has_box(text: str) -> bool:
    """Whether a box is begun in the text, complete or not."""
    return any(token["box"] for token in _BOX_TOKEN.finditer(text))


def _num_last(gaps: list[str], is_small: Callable[[str], bool]) -> int:
    """How many gaps at the end are small."""
    return sum(1 for _ in takewhile(is_small, reversed(gaps)))


def _is_separator(gap: str) -> bool:
    return (
        len(gap) <= _GREATEST_GAP
        and _JOINED.fullmatch(gap) is not None
        and _SEPARATED.search(gap) is not None
    )


def _boxes(text: str) -> list[Box]:
    """Every complete box that stands in no other, in order."""
    found: list[Box] = []
    open_braces: list[re.Match[str] | None] = []  # the command for a box, None for other braces
    for token in _BOX_TOKEN.finditer(text):
        if token["brace"]:
            open_braces.append(token)
        elif token["box"]:
            bare = _BARE.match(text, token.end())
            if bare is not None:
                found.append(Box(token.start(), bare.end(), slice(*bare.span())))
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            command = open_braces.pop()
            if command is not None:
                _close(text, command, token.start(), found)
    return found


def _close(text: str, command: re.Match[str], end: int, found: list[Box]) -> None:
    """Add the box that ends here; around nothing but another box, it has that one's content."""
    inside: list[Box] = []
    while found and found[-1].start >= command.end():
        inside.append(found.pop())
    inner = slice(command.end(), end)
    if len(inside) == 1:
        (box,) = inside
        if _is_blank(text, command.end(), box.start) and _is_blank(text, box.end, end):
            inner = box.inner
    found.append(Box(command.start(), end + 1, inner))


def _is_blank(text: str, start: int, end: int) -> bool:
    return not text[start:end].strip()


_SIGNS = {
    "-": "\u2212\u2013\u2010\u2011",
    " ": "\u00a0\u2009\u202f",
    "/": "\u00f7\u2044",
    r"\times ": "\u00d7",
    r"\cdot ": "\u22c5\u00b7",
    r"\pi ": "\u03c0",
    r"\infty ": "\u221e",
    r"\emptyset ": "\u2205",
    r"\le ": "\u2264",
    r"\ge ": "\u2265",
    r"\ne ": "\u2260",
    r"\in ": "\u2208",
    r"\cup ": "\u222a",
    r"\pm ": "\u00b1",
    r"\approx ": "\u2248",
    r"\sqrt ": "\u221a",
    r"^\circ ": "\u00b0",
    r"\ldots ": "\u2026",
    "^2": "\u00b2",
    "^3": "\u00b3",
    "": "\u20ac\u00a3\u00a5\u200b\u2060\ufeff",
}
# Fractions such as one half, and the digits and letters of full width.
_FRACTION_SIGNS = {
    sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\u2044"))
    for sign in "\u00bc\u00bd\u00be\u2153\u2154\u2155\u2156\u2157\u2158\u2159\u215a\u215b\u215c"
    "\u215d\u215e"
}
_WIDE = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_TRANSLATION = str.maketrans(
    {sign: new for new, signs in _SIGNS.items() for sign in signs} | _FRACTION_SIGNS | _WIDE
)
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\s++", " "),  # first, so that no other pattern meets more than one space
        (r"\\(?:boxed|fbox|framebox) ?(?=\{)", ""),
        (r"(\\\\)\[[-0-9.]++[a-z]{2}\]", r"\1 "),  # a line break of another height
        (r"\.{3,}+|\\[lc]?dots(?![A-Za-z])", r"\\ldots "),
        (r",\\! ?", ","),  # 10,\!080
        (r"(?<=[0-9])\{([,:])\}(?=[0-9])", r"\1"),
        (r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))", ""),  # 10\,080
        (r"(?<!\\)\\!|\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac ?\\pi ?([0-9])", r"\\frac{\\pi}{\1}"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:mbox|textnormal|textbf|textit|textrm|text|mathbf) ?\{", r"\\text{"),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset"),
        (r"\\leq?(?:slant)?(?![A-Za-z])", r"\\le "),
        (r"\\geq?(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\^ ?\{ ?\\circ ?\}|\^ ?\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"(?<!\\)\\[$()\[\]]|\$", ""),
        (r"\\%", "%"),
        (r"\^ ?\{? ?\\prime ?\\prime ?\}?", "''"),
        (r"\^ ?\{? ?\\prime(?![A-Za-z]) ?\}?", "'"),
        (r" ++", " "),
    )
)
_TEXT = re.compile(r"\\text\{([^{}]*+)\}")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname) ?\{([^{}]*+)\}")
_ONE_IN_BRACES = re.compile(r"(?<=[_^])\{(\w)\}")
_IDLE_SPACE = re.compile(r"(?<![0-9.]) | (?![0-9.])")
_MARKS = re.compile(r"[.\"'()]")
_WORDS = re.compile(r"[A-Z][a-z]|[A-Za-z]{3}|\b[ap]\.?m\b|\b[Nn]o\b|^\W?[A-Z]{1,2}\W?$")
_MATHEMATICS = re.compile(r"[\\^_{}=<>+*/|]")
_PIECE = re.compile(
    r"(?P<opening>\\\{|[(\[{])"
    r"|(?P<closing>\\\}|[)\]}])"
    r"|\\\\"  # a line break: the bracket after it is a real one
    r"|(?P<between>[,;]|\\text\{[ ,]*+(?:and|or)[ ,]*+\}|\b(?:and|or)\b)"
    r"|(?P<equals>(?<![<>!:\\])=(?!=)|\\approx(?![A-Za-z])|\\in(?![A-Za-z]))"
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![0-9.,(\[])[0-9]{1,3}(?:,[0-9]{3})++(?!,?[0-9])")
_DEEPEST = 12


def tidied(answer: str) -> str:
    r"""The answer without layout: the same mathematics, one spelling.

    >>> tidied(r"$\left( 3, \dfrac{\pi}{2} \right).$")
    '( 3, \\frac{\\pi}{2} )'
    """
    text = answer.translate(_TRANSLATION)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = text.strip("* ").rstrip(".,;:\\ ")
    for _ in range(_DEEPEST):
        inner = text[1:-1]
        if text.startswith("{") and text.endswith("}") and _is_balanced(inner):
            text = inner.strip()
    return text


def folded(tidy: str) -> str:
    """The tidied answer without text commands, redundant braces and redundant spaces.

    A space between two digits is not redundant: `1 1/2` is not `11/2`.
    """
    return _IDLE_SPACE.sub("", _ONE_IN_BRACES.sub(r"\1", _TEXT.sub(r"\1", tidy)))


def spelled(tidy: str) -> str:
    """The tidied answer for comparison as words: lower case, no extra spaces, stops or quotes."""
    return _IDLE_SPACE.sub("", _MARKS.sub("", _TEXT.sub(r"\1", tidy))).casefold()


def without_text_commands(tidy: str) -> str:
    r"""The tidied answer with `\text{...}` replaced by its content between spaces."""
    return " ".join(_TEXT_COMMAND.sub(r" \1 ", tidy).split())


def is_words(tidy: str) -> bool:
    r"""Whether the answer is text and not a formula: `\text{even}`, `Mrs. Hilt`, `3:30 p.m.`."""
    bare = _TEXT.sub(r" \1 ", tidy)
    if _MATHEMATICS.search(bare) or not re.search("[A-Za-z]", bare):
        return False
    return bare != tidy or _WORDS.search(bare) is not None


def parts(tidy: str) -> list[str]:
    r"""The answers in an answer: split at commas, `and` and `or` outside brackets, and at `\pm`.

    The braces of a set are dropped; other brackets are kept, since `(1, 2)` is one answer.

    >>> parts(r"\{1 \pm \sqrt{5}, (1, 2)\}")
    ['1 + \\sqrt{5}', '1 - \\sqrt{5}', '(1, 2)']
    """
    text = _TEXT.fullmatch(tidy)
    if text is not None:
        return [rf"\text{{{piece}}}" for piece in _split(text[1])]
    if tidy.startswith(r"\{") and tidy.endswith(r"\}") and _is_balanced(tidy[2:-2]):
        tidy = tidy[2:-2]
    return [one for piece in _split(tidy) for one in _signs(piece)]


def without_thousands(tidy: str) -> str:
    """The tidied answer without the commas that can separate thousands."""
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), tidy)


def bracketed(tidy: str) -> tuple[str, list[str]] | None:
    """The brackets of a tuple or an interval, such as `(]`, and its elements."""
    if len(tidy) < 2 or tidy[0] not in "([" or tidy[-1] not in ")]":
        return None
    inside = tidy[1:-1]
    found = _split(inside) if _is_balanced(inside) else []
    return (tidy[0] + tidy[-1], found) if len(found) > 1 else None


def sides(tidy: str) -> list[str]:
    r"""The sides of `=`, `\approx` and `\in` outside brackets."""
    return _split(tidy, at="equals")


def is_too_deep(tidy: str) -> bool:
    """Whether brackets are nested deeper than any answer needs."""
    return any(depth > _DEEPEST for _, depth in _depths(tidy))


def _signs(piece: str) -> list[str]:
    if len(_PLUS_MINUS.findall(piece)) != 1:
        return [piece]
    return [_PLUS_MINUS.sub(sign, piece) for sign in "+-"]


def _depths(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Every bracket and separator, with the depth after it."""
    depth = 0
    for piece in _PIECE.finditer(text):
        depth += 1 if piece["opening"] else -1 if piece["closing"] else 0
        yield piece, depth


def _is_balanced(text: str) -> bool:
    depths = [depth for _, depth in _depths(text)]
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def _split(text: str, *, at: str = "between") -> list[str]:
    """The text between the separators outside all brackets."""
    pieces, start = [], 0
    for piece, depth in _depths(text):
        if piece[at] and depth == 0:
            pieces.append(text[start : piece.start()])
            start = piece.end()
    pieces.append(text[start:])
    return [piece.strip() for piece in pieces if piece.strip()]
