r"""Whether an answer says the same as the gold answer: by text, as numbers, then by math-verify.

The cheap ways come first and settle most answers without sympy: the same text, plain numbers, the
parts of a list in any order, the places of a tuple in theirs, words. A gold that math-verify
cannot read can only be met in one of these ways.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from sortedrl.rewards.formulas import same_formula
from sortedrl.rewards.latex import bracketed, folded, is_words, parts, spelled, tidied
from sortedrl.rewards.numerals import Numeral, numeral

_MOST_PARTS = 64
_FLOAT_NOISE = Fraction(1, 10**14)
_ASSIGNED = re.compile(
    r"(?:[A-Za-z]{1,3}|\\[A-Za-z]+)(?:_(?:\{[^{}]*\}|\w))?(?:\s*\([^()]*\))?\s*(?:=|\\in(?![A-Za-z]))"
)
_IN_BASE = re.compile(r"(?P<digits>-?[0-9A-Z]+)_\{?(?P<base>\d+)\}?")
_LABEL = re.compile(r"(?:\\text\{\s*)?\((?P<letter>[A-F])\)(?:\s*\})?\s*(?P<rest>[^\s,)].*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a number may be from the gold one."""

    relative: float = 1e-4
    """Share of the gold by which a rounded number may differ, if that is also less than its last
    digit counts; from a whole number nothing may differ."""
    absolute: float = 0.0
    """Difference that is always allowed."""
    is_measured: bool = False
    """Whether the gold is a measurement, so that a whole number may be a rounded one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the two are equal, and whether the gold was more than text to math-verify."""

    is_equal: bool
    is_gold_read: bool = True


_EQUAL, _UNEQUAL = Verdict(True), Verdict(False)


def compare(gold: str, answer: str, tolerance: Tolerance) -> Verdict:
    """Whether the answer says the same as the gold."""
    wanted, given = tidied(gold), tidied(answer)
    if folded(wanted) == folded(given):
        return _EQUAL
    if wanted.count("=") + given.count("=") == 1:
        wanted, given = _alike(wanted, given)
    label = _LABEL.fullmatch(given)
    if label is not None:
        is_choice = len(spelled(wanted)) == 1 and is_words(wanted)
        given = label["letter"] if is_choice else label["rest"]
    # A number with thousands separators looks like a list.
    answers = [given] if numeral(given) is not None else parts(given)
    if numeral(wanted) is not None:
        return _UNEQUAL if len(answers) > 1 else _compare_one(wanted, given, tolerance)
    sides = [side.strip() for side in re.split(r"=|\\approx", wanted)]
    if len(sides) > 1 and all(numeral(side) is not None for side in sides):
        return Verdict(any(compare(side, given, tolerance).is_equal for side in sides))
    golds = parts(wanted)
    if len(golds) == len(answers) == 1:
        return _compare_one(wanted, given, tolerance)
    if len(golds) == 1:
        inside = bracketed(wanted)
        return _UNEQUAL if inside is None else _compare_in_order(inside[1], answers, tolerance)
    if len(answers) == 1:
        inside = bracketed(given)
        answers = answers if inside is None else inside[1]
    return compare_all(golds, answers, tolerance)


def compare_all(golds: list[str], answers: list[str], tolerance: Tolerance) -> Verdict:
    """Whether every gold is met by an answer of its own, in any order, and none is left over."""
    if not 1 <= len(golds) == len(answers) <= _MOST_PARTS:
        return _UNEQUAL
    left = list(answers)
    is_read = True
    for gold in golds:
        for answer in sorted(left, key=lambda one: folded(one) != folded(gold)):
            verdict = _compare_one(gold, answer, tolerance)
            is_read = is_read and verdict.is_gold_read
            if verdict.is_equal:
                left.remove(answer)
                break
        else:
            return Verdict(False, is_read)
    return _EQUAL


def _compare_in_order(golds: list[str], answers: list[str], tolerance: Tolerance) -> Verdict:
    if len(golds) != len(answers):
        return _UNEQUAL
    for gold, answer in zip(golds, answers, strict=True):
        verdict = _compare_one(gold, answer, tolerance)
        if not verdict.is_equal:
            return verdict
    return _EQUAL


def _compare_one(gold: str, answer: str, tolerance: Tolerance) -> Verdict:
    """Compare what is no list: as text, as numbers, as tuples, as words, as formulas."""
    gold, answer = _alike(gold, answer)
    if folded(gold) == folded(answer):
        return _EQUAL
    wanted = numeral(gold)
    given = numeral(answer, has_word_unit=wanted is not None)
    if wanted is not None and given is not None:
        return Verdict(same_number(wanted, given, tolerance))
    if is_words(gold):
        if spelled(gold) == spelled(answer):
            return _EQUAL
        if re.search(r"\\text|[A-Z]| ", gold):
            return _UNEQUAL
    in_base = _IN_BASE.fullmatch(folded(gold))
    if in_base is not None:
        return Verdict(folded(answer) == in_base["digits"])
    inside, other = bracketed(gold), bracketed(answer)
    if inside is not None and other is not None:
        if inside[0] != other[0] and len(inside[1]) == 2:
            return _UNEQUAL  # other ends of an interval
        return _compare_in_order(inside[1], other[1], tolerance)
    # The library compares decimals after the point: a small gold needs more of them.
    decimals = 6 if wanted is None or not wanted.value else 6 + max(0, -_magnitude(wanted.value))
    is_equal = same_formula(gold, answer, decimals=decimals)
    return Verdict(False, is_gold_read=False) if is_equal is None else Verdict(is_equal)


def _alike(gold: str, answer: str) -> tuple[str, str]:
    """The two without `x =` where only one of them has it."""
    if re.search(r"=|\\in(?![A-Za-z])", gold):
        assigned = _ASSIGNED.match(gold)
        if assigned is not None and "=" not in answer and _ASSIGNED.match(answer) is None:
            return gold[assigned.end() :].strip(), answer
        return gold, answer
    assigned = _ASSIGNED.match(answer)
    if "=" in answer and not re.search(r"[<>!]=", answer):
        return gold, answer.rpartition("=")[2].strip()
    return gold, answer if assigned is None else answer[assigned.end() :].strip()


def same_number(gold: Numeral, answer: Numeral, tolerance: Tolerance) -> bool:
    """Whether the number is the gold one, up to its rounding.

    A per cent sign on one side only may stand for a hundredth.
    """
    scale = Fraction(1)
    if gold.is_percent != answer.is_percent:
        scale = Fraction(1, 100) if answer.is_percent else Fraction(100)
    return _is_near(gold, answer.value, answer.step, tolerance) or (
        scale != 1 and _is_near(gold, answer.value * scale, answer.step * scale, tolerance)
    )


def _is_near(gold: Numeral, value: Fraction, step: Fraction, tolerance: Tolerance) -> bool:
    """Whether a value, of which the last digit counts `step`, is the gold up to rounding."""
    difference = abs(value - gold.value)
    if difference <= Fraction(tolerance.absolute):
        return True
    if gold.is_whole and not tolerance.is_measured:
        return False
    if difference <= abs(gold.value) * _FLOAT_NOISE:
        return True
    step = max(step, gold.step, Fraction(1 if tolerance.is_measured else 0))
    return difference < step and difference <= abs(gold.value) * Fraction(tolerance.relative)


def _magnitude(value: Fraction) -> int:
    """The power of ten of a number, within one."""
    return len(str(abs(value.numerator))) - len(str(value.denominator))
