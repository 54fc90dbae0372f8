r"""Answers as they are written in LaTeX: one spelling for the same text, and their parts.

`tidied` keeps the meaning and drops the layout: `\dfrac`, `\left(`, `$`, thin spaces and Unicode
signs become the plain form, text stays in `\text{...}`. Each text is read a fixed number of times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_SIGNS = {
    "-": "\u2212\u2013\u2010\u2011",
    " ": "\u00a0\u2009\u202f",
    "/": "\u00f7\u2044",
    r"\times ": "\u00d7",
    r"\cdot ": "\u22c5\u00b7",
    r"\pi ": "\u03c0",
    r"\infty ": "\u221e",
    r"\le ": "\u2264",
    r"\ge ": "\u2265",
    r"\in ": "\u2208",
    r"\cup ": "\u222a",
    r"\pm ": "\u00b1",
    r"\approx ": "\u2248",
    r"^\circ ": "\u00b0",
    "^2": "\u00b2",
    "^3": "\u00b3",
    r"\frac{1}{2}": "\u00bd",
    "": "\u20ac\u00a3\u200b\u2060\ufeff",
}
_TRANSLATION = str.maketrans({sign: new for new, signs in _SIGNS.items() for sign in signs})
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:boxed|fbox|framebox)\s*(?=\{)", ""),
        (r"(\\\\)\[[-\d.]+[a-z]{2}\]", r"\1 "),  # a line break of another height
        (r",\\!\s*", ","),  # 10,\!080
        (r"(?<=\d)\{([,:])\}(?=\d)", r"\1"),
        (r"(?<=\d)\\,(?=\d{3})", ""),  # 10\,080
        (r"(?<!\\)\\!|\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*\\pi\s*(\d)", r"\\frac{\\pi}{\1}"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:mbox|textnormal|textbf|textit|textrm|text|mathbf)\s*\{", r"\\text{"),
        (r"\\leq?(?:slant)?(?![A-Za-z])", r"\\le "),
        (r"\\geq?(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"(?<!\\)\\[$()\[\]]|\$", ""),
        (r"\\%", "%"),
        (r"\^\s*\{?\s*\\prime\s*\\prime\s*\}?", "''"),
        (r"\^\s*\{?\s*\\prime(?![A-Za-z])\s*\}?", "'"),
        (r"\s+", " "),
    )
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NUMBER_IN_TEXT = re.compile(r"\\text\{\(?(\d[\d.,]*)\)?\}")
_ONE_IN_BRACES = re.compile(r"(?<=[_^])\{(\w)\}")
_MARKS = re.compile(r"[\s.\"'()]+")
_WORDS = re.compile(r"[A-Z][a-z]|[A-Za-z]{3}|\b[ap]\.?m\b|\b[Nn]o\b|^\W*[A-Z]{1,2}\W*$")
_MATHEMATICS = re.compile(r"[\\^_{}=<>+*/|]")
_PIECE = re.compile(
    r"(?P<opening>\\\{|[(\[{])"
    r"|(?P<closing>\\\}|[)\]}])"
    r"|\\\\"  # a line break: the bracket after it is a real one
    r"|(?P<between>[,;]|\\text\{[\s,]*(?:and|or)[\s,]*\}|\b(?:and|or)\b)"
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


def tidied(answer: str) -> str:
    r"""The answer without layout: the same mathematics, one spelling.

    >>> tidied(r"$\left( 3, \dfrac{\pi}{2} \right).$")
    '( 3, \\frac{\\pi}{2} )'
    """
    text = answer.translate(_TRANSLATION)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = text.strip("* ").rstrip(".,;:\\ ")
    if text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    number = _NUMBER_IN_TEXT.fullmatch(text)
    return text if number is None else number[1]


def folded(tidy: str) -> str:
    """The tidied answer without spaces, text commands and idle braces."""
    return _ONE_IN_BRACES.sub(r"\1", _TEXT.sub(r"\1", tidy)).replace(" ", "")


def spelled(tidy: str) -> str:
    """The tidied answer as words are compared: small letters, no spaces, full stops or quotes."""
    return _MARKS.sub("", _TEXT.sub(r"\1", tidy)).casefold()


def is_words(tidy: str) -> bool:
    r"""Whether the answer is text and no formula: `\text{even}`, `Mrs. Hilt`, `3:30 p.m.`."""
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


def bracketed(tidy: str) -> tuple[str, list[str]] | None:
    """The brackets of a tuple or an interval, such as `(]`, and what stands between its commas."""
    if len(tidy) < 2 or tidy[0] not in "([" or tidy[-1] not in ")]":
        return None
    inside = tidy[1:-1]
    found = _split(inside) if _is_balanced(inside) else []
    return (tidy[0] + tidy[-1], found) if len(found) > 1 else None


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


def _split(text: str) -> list[str]:
    """What stands between the separators outside all brackets."""
    pieces, start = [], 0
    for piece, depth in _depths(text):
        if piece["between"] and depth == 0:
            pieces.append(text[start : piece.start()])
            start = piece.end()
    pieces.append(text[start:])
    return [piece.strip() for piece in pieces if piece.strip()]
