r"""Whether an answer is equal to the gold answer.

Both are tidied, split into parts, and each part is parsed as the first of these that fits:

    a number      with or without a unit: equal by exact value, up to rounding
    the empty set
    words         a choice letter, a name, a time: equal by spelling
    in a base     52_8: equal by digits
    a tuple       or an interval: equal place by place, with the same brackets
    a formula     equal by math-verify

The type of the gold decides how the answer is compared. If it is a number the answer must be one:
`2 + 3`, `\gcd(12, 18)` and `10/2` only restate a question. If it is a formula the answer must be
evaluated as far as the gold is, and not be copied from the question. Both rules are off with
`allow_unevaluated`. The parts of a list may come in any order, those of a tuple may not.

Where math-verify fails or would take too long:

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
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.rewards.maths.numbers import Numeral, numeral, without_unit
from sortedrl.rewards.maths.reading import (
    bracketed,
    folded,
    is_too_deep,
    is_words,
    parts,
    sides,
    spelled,
    tidied,
    without_text_commands,
    without_thousands,
)

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
_FORMULA_COMMAND = re.compile(r"\\[A-Za-z]+")
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
    return re.search("[A-Za-z]", _FORMULA_COMMAND.sub("", formula)) is not None


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


_MOST_PARTS = 64
_LONGEST_QUESTION = 20_000
_FLOAT_NOISE = Fraction(1, 10**14)
_IN_BASE = re.compile(r"(?P<digits>-?[0-9A-Z]++)_\{?(?P<base>[0-9]++)\}?")
_LABEL = re.compile(
    r"(?P<label>\((?P<letter>[A-J])\)|(?P<bare>[A-J])[).:])(?P<rest>(?: .*+)?)", re.DOTALL
)
_ANY_LABEL = re.compile(r"\([A-J]\)|\b[A-J]\b")
_EMPTY = frozenset(
    [
        r"\emptyset",
        r"\{\}",
        "emptyset",
        "theemptyset",
        "nullset",
        "empty",
        "nosolution",
        "nosolutions",
    ]
)
_NAME = re.compile(
    r"(?P<head>(?:[A-Za-z]++|\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|lambda"
    r"|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega"
    r"|angle|triangle|ell|hbar|overline|mathrm|text|vec)(?![A-Za-z])"
    r"|\{[A-Za-z ]*+\}|_ ?(?:\{[^{}]*+\}|\w)|'|\^\{-1\}| )++)(?:\([^()]*+\))? ?"
)
_SUM_OF_NAMES = re.compile(r"-?[0-9]*+ ?[A-Za-z](?: ?[-+] ?[0-9]*+ ?[A-Za-z])++")
_LETTERS = re.compile(r"[A-Za-z]++")
_COMMAND = re.compile(r"\\[A-Za-z]++")
_LEAD = re.compile(r"[A-Za-z][A-Za-z ]*+(?P<colon>:)? ?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The tolerances of the comparison."""

    relative: float = 1e-4
    """Relative tolerance of a rounded number, if the difference is also less than one unit in its
    last digit; whole numbers must be exact."""
    absolute: float = 0.0
    """Absolute difference that is always allowed."""
    is_measured: bool = False
    """Whether the gold is a measurement, so that a whole number may be a rounded one."""
    allow_unevaluated: bool = False
    """Whether an unevaluated expression is right if its value is."""
    question: str = ""
    """The question, to detect answers copied from it."""


@dataclass(frozen=True, slots=True)
class Equality:
    """Whether the two are equal, and whether math-verify could parse the gold."""

    is_equal: bool
    is_gold_read: bool = True


_EQUAL, _UNEQUAL = Equality(True), Equality(False)


def compare(gold: str, answer: str, rules: Rules) -> Equality:
    """Whether the answer is equal to the gold."""
    wanted, given = tidied(gold), tidied(answer)
    if folded(wanted) == folded(given):
        return _EQUAL
    if is_too_deep(given) or is_too_deep(wanted):
        return _UNEQUAL
    if _is_empty(wanted):
        return Equality(_is_empty(given) or folded(given) in (r"\phi", r"\Phi"))
    given = _without_label(wanted, given)
    is_read = True
    for golds in _readings(wanted, is_gold=True):
        for answers in _readings(given, is_gold=False):
            verdict = _compare_lists(golds, answers, rules)
            if verdict.is_equal:
                return verdict
            is_read = is_read and verdict.is_gold_read
    return Equality(False, is_read)


def compare_all(golds: list[str], answers: list[str], rules: Rules) -> Equality:
    """Whether the parts of gold and answer match one to one, in any order."""
    wanted = [part for gold in golds for part in parts(tidied(gold))]
    tidy = [tidied(answer) for answer in answers]
    if any(map(is_too_deep, tidy)):
        return _UNEQUAL
    is_read = True
    for split in (parts, lambda text: parts(without_thousands(text))):
        verdict = _compare_in_any_order(wanted, [p for text in tidy for p in split(text)], rules)
        if verdict.is_equal:
            return verdict
        is_read = is_read and verdict.is_gold_read
    return Equality(False, is_read)


def num_parts(gold: str) -> int:
    """The number of values in a gold."""
    return max(len(reading) for reading in _readings(tidied(gold), is_gold=True))


def _readings(tidy: str, *, is_gold: bool) -> list[list[str]]:
    """The possible lists of parts of a text: a comma can separate thousands or parts."""
    found = sides(tidy)
    if len(found) == 2 and found[1].startswith(r"\{") and _is_name(found[0]):
        tidy = found[1]
    if numeral(tidy, is_gold=is_gold) is not None:
        is_list = "," in tidy and ",0" not in tidy
        return [[tidy], parts(tidy)] if is_list else [[tidy]]
    joined = without_thousands(tidy)
    return [parts(tidy)] if joined == tidy else [parts(tidy), parts(joined)]


def _is_empty(tidy: str) -> bool:
    return folded(tidy) in _EMPTY or spelled(tidy) in _EMPTY


def _without_label(wanted: str, given: str) -> str:
    """The answer without the letter of a choice before it, or only the letter if the gold is one.

    Two letters are not a choice.
    """
    label = _LABEL.fullmatch(without_text_commands(given))
    if label is None:
        return given
    rest = label["rest"].strip()
    is_choice = len(spelled(wanted)) == 1 and is_words(wanted)
    if is_choice:
        is_one = _ANY_LABEL.search(rest) is None and len(parts(f"A {rest}")) == 1
        return (label["letter"] or label["bare"]) if is_one else given
    return rest if rest and label["letter"] and _ANY_LABEL.match(rest) is None else given


def _compare_lists(golds: list[str], answers: list[str], rules: Rules) -> Equality:
    if len(golds) == len(answers) == 1:
        return _compare_one(golds[0], answers[0], rules)
    if len(golds) == 1:
        inside = bracketed(golds[0])
        is_tuple = inside is not None and inside[0] == "()"
        return _compare_in_order(inside[1], answers, rules) if inside and is_tuple else _UNEQUAL
    if len(answers) == 1:
        inside = bracketed(answers[0])
        is_list = inside is not None and inside[0] in ("()", "[]")
        answers = inside[1] if inside and is_list else answers
    return _compare_in_any_order(golds, answers, rules)


def _compare_in_any_order(golds: list[str], answers: list[str], rules: Rules) -> Equality:
    if not 1 <= len(golds) == len(answers) <= _MOST_PARTS:
        return _UNEQUAL
    left = list(answers)
    is_read = True
    for gold in golds:
        for answer in sorted(left, key=lambda one: folded(one) != folded(gold)):
            verdict = _compare_one(gold, answer, rules)
            is_read = is_read and verdict.is_gold_read
            if verdict.is_equal:
                left.remove(answer)
                break
        else:
            return Equality(False, is_read)
    return _EQUAL


def _compare_in_order(golds: list[str], answers: list[str], rules: Rules) -> Equality:
    if len(golds) != len(answers):
        return _UNEQUAL
    for gold, answer in zip(golds, answers, strict=True):
        verdict = _compare_one(gold, answer, rules)
        if not verdict.is_equal:
            return verdict
    return _EQUAL


def _compare_one(gold: str, answer: str, rules: Rules) -> Equality:
    """Compare single values."""
    if folded(gold) == folded(answer):
        return _EQUAL
    wanted, given = _values(gold, rules), _values(answer, rules)
    if wanted is None:
        return _compare_formulas(gold, answer, rules)
    numbers = [numeral(value, is_gold=True) for value in wanted]
    known = [number for number in numbers if number is not None]
    is_number = len(known) == len(numbers)
    if given is None:
        # An equation says nothing about a value, but can be that of a curve.
        is_value = is_number or len(sides(gold)) == 1
        return _UNEQUAL if is_value else _compare_formulas(gold, answer, rules)
    if _has_other_name(gold, answer):
        return _UNEQUAL
    if is_number:
        return _compare_numbers(wanted, known, given, rules)
    return _compare_values(wanted[-1], given[-1], rules)


def _compare_values(gold: str, answer: str, rules: Rules) -> Equality:
    """Compare values that are neither lists nor numbers."""
    if folded(gold) == folded(answer):
        return _EQUAL
    if is_words(gold):
        if spelled(gold) == spelled(answer):
            return _EQUAL
        if re.search(r"\\text|[A-Z]| ", gold):
            return _UNEQUAL
    in_base = _IN_BASE.fullmatch(folded(gold))
    if in_base is not None:
        return Equality(folded(answer) == in_base["digits"])
    inside, other = bracketed(gold), bracketed(answer)
    if inside is not None and other is not None:
        if inside[0] != other[0] and len(inside[1]) == 2:
            return _UNEQUAL  # other ends of an interval
        return _compare_in_order(inside[1], other[1], rules)
    return _compare_formulas(gold, answer, rules)


def _compare_numbers(
    golds: list[str], known: list[Numeral], answers: list[str], rules: Rules
) -> Equality:
    """Whether the answer is the number, also in a chain of equal numbers."""
    read = [numeral(answer) for answer in answers]
    if rules.allow_unevaluated and read[-1] is None:
        # The library compares decimals after the point: a small gold needs more of them.
        value = known[-1].value
        decimals = 6 + (max(0, -_magnitude(value)) if value else 0)
        return Equality(same_formula(golds[-1], answers[-1], decimals=decimals) is True)
    is_worked_out = False
    for number, answer in zip(read, answers, strict=True):
        if number is None:
            return _UNEQUAL
        met = [
            text
            for gold, text in zip(known, golds, strict=True)
            if same_number(gold, number, rules)
        ]
        if not met:
            return _UNEQUAL
        if not any(_restates(text, number, answer, rules) for text in met):
            is_worked_out = True
    return Equality(is_worked_out)


def _restates(wanted: str, number: Numeral, answer: str, rules: Rules) -> bool:
    """Whether a number with the right value is an unevaluated division, or from the question."""
    gold = numeral(wanted, is_gold=True)
    if rules.allow_unevaluated or gold is None or folded(wanted) == folded(answer):
        return False
    if number.is_division and not gold.is_division:
        return True
    if number.form == "plain" and gold.is_whole:
        return False
    return _is_copied(answer, rules) and not _is_copied(wanted, rules)


def _compare_formulas(gold: str, answer: str, rules: Rules) -> Equality:
    if not rules.allow_unevaluated:
        # What a sine or a sum comes out to may have roots.
        allowed = unevaluated(gold)
        if unevaluated(answer) - (allowed | {"root"} if allowed else allowed):
            return _UNEQUAL
        if _is_copied(answer, rules):
            return _UNEQUAL
    is_equal = same_formula(gold, answer, decimals=6)
    return Equality(False, is_gold_read=False) if is_equal is None else Equality(is_equal)


def _is_copied(text: str, rules: Rules) -> bool:
    """Whether the text occurs in the question, and is more than a word or a whole number."""
    wanted = folded(text).replace(" ", "")
    if wanted.isalnum() or not wanted or not rules.question:
        return False
    words = tidied(rules.question[-_LONGEST_QUESTION:].replace("$", " $ ")).split(" ")
    question = "".join(map(folded, words))
    gaps = set(accumulate(len(folded(word)) for word in words)) | {0}
    place = question.find(wanted)
    while place >= 0:
        end = place + len(wanted)
        is_start = place in gaps or not _is_joined(question[place - 1])
        if is_start and (end in gaps or not _is_joined(question[end])):
            return True
        place = question.find(wanted, end)
    return False


def _is_joined(sign: str) -> bool:
    """Whether text next to this character is part of a longer expression."""
    return sign.isalnum() or sign in "\\^_"


def _values(tidy: str, rules: Rules) -> list[str] | None:
    r"""The value of a part: itself, or the right side of `x = ...` and the like.

    Several if a chain has several numbers. `None` for an equation without a value, such as
    `|x| = 7`, or one between names only.
    """
    found = sides(tidy)
    if len(found) < 2:
        return [_without_lead(tidy)]
    values = [side for side in found if not _is_name(side)]
    if not values:
        return None
    last = values[-1]
    given = _variables(last)
    numbers = []
    for side in values[:-1]:
        if numeral(side) is not None:
            numbers.append(side)
        elif _variables(side) - given and not _is_asked_for(side, tidy, rules):
            return None
    return [*numbers, last]


def _without_lead(tidy: str) -> str:
    """The part without words such as `The answer is` or `Total:` before a number."""
    flat = without_text_commands(tidy)
    lead = _LEAD.match(flat)
    if lead is None:
        return tidy
    words = lead[0].lower().rstrip(": ").split()
    is_lead = (lead["colon"] and len(words[0]) > 2) or (words and words[-1] == "is")
    rest = flat[lead.end() :]
    return rest if is_lead and "not" not in words and numeral(rest) is not None else tidy


def _is_name(side: str) -> bool:
    """Whether a side of an equation only names the other side: `x`, `f(x)`, `Area`."""
    name = _NAME.fullmatch(side)
    return name is not None and re.search("[A-Za-z]", name["head"]) is not None


def _has_other_name(gold: str, answer: str) -> bool:
    """Whether both assign a value to a letter, but to different ones: `y = 1`, `x = 1`."""
    heads = []
    for text in (gold, answer):
        found = sides(text)
        name = _NAME.fullmatch(found[0]) if len(found) > 1 else None
        if name is None:
            return False
        heads.append(name["head"].strip().casefold())
    return all(len(head) == 1 for head in heads) and heads[0] != heads[1]


def _variables(side: str) -> set[str]:
    return {letter for run in _LETTERS.findall(_COMMAND.sub(" ", side)) for letter in run}


def _is_asked_for(side: str, equation: str, rules: Rules) -> bool:
    """Whether the question asks for this sum of letters, as in `m + n = 33`."""
    return (
        _SUM_OF_NAMES.fullmatch(side) is not None
        and _is_copied(side, rules)
        and not _is_copied(equation, rules)
    )


def same_number(gold: Numeral, answer: Numeral, rules: Rules) -> bool:
    """Whether the number equals the gold, up to rounding.

    A percent sign on one side only may mean a hundredth. Two known units must be the same.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    scale = Fraction(1)
    if gold.is_percent != answer.is_percent:
        scale = Fraction(1, 100) if answer.is_percent else Fraction(100)
    return _is_near(gold, answer.value, answer.step, rules) or (
        scale != 1 and _is_near(gold, answer.value * scale, answer.step * scale, rules)
    )


def _is_near(gold: Numeral, value: Fraction, step: Fraction, rules: Rules) -> bool:
    """Whether a value with the precision `step` equals the gold up to rounding."""
    difference = abs(value - gold.value)
    if difference <= Fraction(rules.absolute):
        return True
    if gold.is_whole and not rules.is_measured:
        return False
    if difference <= abs(gold.value) * _FLOAT_NOISE:
        return True
    step = max(step, gold.step, Fraction(1 if rules.is_measured else 0))
    return difference < step and difference <= abs(gold.value) * Fraction(rules.relative)


def _magnitude(value: Fraction) -> int:
    """The order of magnitude of a number, within one."""
    return len(str(abs(value.numerator))) - len(str(value.denominator))
