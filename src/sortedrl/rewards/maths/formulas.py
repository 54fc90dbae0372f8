r"""Formulas, parsed and compared by math-verify.

Where the library fails or would take too long:

- an answer that it cannot parse, or cannot compare with the gold, is not equal;
- a gold that it cannot parse is not a formula: the result is `None`, neither equal nor unequal;
- an answer with a tower of powers, a huge factorial, or a sum where the gold has none is not
  equal, nor is one that is nested deeper than any answer needs. This catches the simple cases; for
  the rest the caller needs a time limit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.rewards.maths.numbers import without_unit

_LONGEST = 400
_DEEPEST = 8
_MOST_BARS = 8
_OPERATOR = re.compile(r"\\(?:sum|prod|int|oint|lim)(?![A-Za-z])")
# Unevaluated operations, by kind: an answer may have those that its gold has.
_UNEVALUATED = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "sum": r"\\(?:sum|prod|i?int|oint|lim(?:sup|inf)?|sup|inf)(?![A-Za-z])"
        "|[\u2211\u222b\u220f]",
        "count": r"!|\\(?:d?t?binom|choose)(?![A-Za-z])",
        "divisor": r"\b(?:gcd|lcm|hcf|GCD|LCM|HCF)\b|\\(?:gcd|lcm|phi|varphi|sigma|tau)\s?\(",
        "remainder": r"\\(?:bmod|pmod|mod)(?![A-Za-z])|\bmod\b|%\s?[0-9]",
        "floor": r"\\[lr](?:floor|ceil)(?![A-Za-z])",
        "extreme": r"\\(?:max|min|det|deg|dim|arg)(?![A-Za-z])",
        "angle": r"\\(?:arc)?(?:sin|cos|tan|sec|csc|cot)h?(?![A-Za-z])|\\(?:Re|Im)(?![A-Za-z])",
        "logarithm": r"\\(?:log|ln|lg|exp)(?![A-Za-z])|e\s?\^",
        "root": r"\\sqrt(?![A-Za-z])|\^\s?\{[^{}]*+[/.]|\^\s?\{[^{}]*+\\frac",
    }.items()
}
_FACTORIAL = re.compile(r"\d{4}[\s)}]*!|![\s)}]*!|binom\s*\{\s*\d{5}")
_RAISED = re.compile(r"[)}]\^")
_CHAIN = re.compile(r"\^(?:\d+|[A-Za-z]|\\[a-z]+)\s*\^")
"""Powers of powers without brackets, such as 10^10^10."""
_EXPONENT = re.compile(r"\^\s*(?:[{(](?P<group>.*)|(?P<token>-?\d+|.))", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![A-Za-z])")
_DEGREES = re.compile(r"(?<![0-9.])([0-9]++(?:\.[0-9]++)?) ?\^\\circ")
_SYMBOL = re.compile(r"[A-Za-z]|\\[A-Za-z]+")
_IMAGINARY = re.compile(r"(?<![A-Za-z_\\])i(?=[A-Za-z]?(?![A-Za-z]))")
# Names that the library cannot read, because it takes E and e for Euler's number.
_RENAMED = tuple(
    (re.compile(name), new)
    for name, new in (
        (r"(?<![A-Za-z\\])E_", r"\\Xi_"),
        (r"(?<!\\log)_(?:\{\s*e\s*\}|e(?![A-Za-z]))", r"_{\\epsilon}"),
        (r"\\odot(?![A-Za-z])", r"\\sigma"),
    )
)


def same_formula(gold: str, answer: str, *, decimals: int) -> bool | None:
    """Whether two tidied formulas are equal; `None` if the gold cannot be parsed.

    Decimal numbers in them are compared to this many decimals.
    """
    if not _TRIGONOMETRY.search(gold):
        gold, answer = without_unit(gold), without_unit(answer)
    if len(answer) > _LONGEST or _depth(answer) > _DEEPEST or answer.count("|") > _MOST_BARS:
        return False
    if set(_costs(answer)) - set(_costs(gold)):
        return False
    if _SYMBOL.fullmatch(gold):
        # The library compares a lone symbol by its letters, so that 2x/2 would not be x.
        gold, answer = f"2({gold})", f"2({answer})"
    wanted = _parsed(gold)
    if all(isinstance(one, str) for one in wanted):
        return None
    is_equal = _library().verify(
        wanted,
        _parsed(answer),
        float_rounding=decimals,
        allow_set_relation_comp=True,  # 2 <= x < 5 is [2, 5)
        timeout_seconds=None,
    )
    return bool(is_equal)


def unevaluated(formula: str) -> set[str]:
    """The kinds of unevaluated operations in a formula."""
    return {kind for kind, pattern in _UNEVALUATED.items() if pattern.search(formula)}


def _depth(formula: str) -> int:
    """How deep its brackets are nested, of whatever kind."""
    depth = deepest = 0
    for sign in formula:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return deepest


def _costs(formula: str) -> Iterator[str]:
    """The kinds of things in a formula that sympy might not finish."""
    if _OPERATOR.search(formula):
        yield "operator"
    if _FACTORIAL.search(formula):
        yield "factorial"
    if _CHAIN.search(formula):
        yield "tower"
    has_letters = _has_letters(formula)
    size = 1
    for power in re.finditer(r"\^", formula):
        exponent = _exponent(formula[power.start() :])
        if re.search("[!^]", exponent) and not _has_letters(exponent):
            yield "tower"
        # Powers of powers multiply; only numbers are worked out where the base is no bracket.
        if not has_letters or _RAISED.match(formula, power.start() - 1):
            size *= max((int(digits[:9]) for digits in re.findall(r"\d+", exponent)), default=1)
    if size > (2_000 if has_letters else 100_000):
        yield "large power"


def _has_letters(formula: str) -> bool:
    """Whether there is a variable in it."""
    return re.search("[A-Za-z]", _COMMAND.sub("", formula)) is not None


def _exponent(text: str) -> str:
    """What stands in the exponent at the start of the text."""
    found = _EXPONENT.match(text)
    if found is None:
        return ""
    if found["group"] is None:
        return found["token"]
    depth = 1
    for place, sign in enumerate(found["group"]):
        depth += (sign in "{(") - (sign in "})")
        if depth == 0:
            return found["group"][:place]
    return found["group"]


@lru_cache(maxsize=4096)
def _parsed(formula: str) -> list[Any]:
    """A formula parsed by math-verify: sympy objects, or only text if it fails."""
    if _TRIGONOMETRY.search(formula):
        formula = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", formula)
    # Only an i that stands alone is read as the imaginary unit.
    formula = _IMAGINARY.sub(" i ", formula.replace(r"^\circ", ""))
    for name, new in _RENAMED:
        formula = name.sub(new, formula)
    library = _library()
    found: list[Any] = library.parse(
        f"${formula}$", library.extraction, parsing_timeout=None, raise_on_error=False
    )
    return found


@dataclass(frozen=True, slots=True)
class _Library:
    """The two functions of math-verify, and how it is to read a formula."""

    parse: Any
    verify: Any
    extraction: list[Any]


@lru_cache(maxsize=1)
def _library() -> _Library:
    try:
        from math_verify.grader import verify
        from math_verify.parser import LatexExtractionConfig, NormalizationConfig, parse
    except ImportError as error:
        raise ConfigError(
            "comparing formulas needs math-verify; pip install 'sortedrl[maths]'"
        ) from error
    # It warns once that its own time limit, a signal, is off: the caller has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Units are off: its list takes the `ab` of 2ab for one.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    reading = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)
    return _Library(parse, verify, [reading])
