r"""Plain numbers as people write them, read exactly: `1,080`, `\frac{3}{4}`, `7 \times 10^{37}`.

A number keeps how it was written, since that says how far its digits can be trusted. What is no
plain number is `None`: nothing is evaluated here, and no number has more than 1,000 digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_GREATEST_LENGTH = 200
_GREATEST_POWER = 400
_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_ARGUMENT = rf"(?:\{{\s*[-+]?{_PLAIN}\s*\}}|\d)"
_TEN_TO = r"10\s*\^\s*(?:\{\s*(?P<braced>[-+]?\d+)\s*\}|(?P<bare>[-+]?\d+))"
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"(?P<plain>{_PLAIN})(?:[eE](?P<exponent>[-+]?\d+))?",
        rf"(?:(?P<plain>{_PLAIN})\s*(?:\\times|\\cdot|\*|x)\s*)?{_TEN_TO}",
        rf"(?:(?P<whole>\d+)\s*)?\\frac\s*(?P<over>{_ARGUMENT})\s*(?P<under>{_ARGUMENT})",
        rf"(?:(?P<whole>\d+)\s+)?(?P<over>{_PLAIN})\s*/\s*(?P<under>{_PLAIN})",
    )
)
_POWERS = ("exponent", "braced", "bare")
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?"
_TEXT_UNIT = re.compile(
    r"(?:\s*(?:\\text\{[^{}]*\}"
    r"|\\(?:mathrm|operatorname)\s*\{(?!\s*[ied]\s*\})[^{}]*\}"  # i, e and d are mathematics
    rf"|\\AA){_POWER}"
    r"|\s*\^\\circ\s*[CF]?"
    r"|(?<=\d)(?:\s*'+|st|nd|rd|th))+$"
)
_WORD_UNIT = re.compile(
    rf"(?:\s+|(?<=\d)(?=[A-Za-z]{{2}}))(?!pi\b)[A-Za-z]+(?:[\s/.]+[A-Za-z]+)*{_POWER}\s*$"
)


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number, and how it was written."""

    value: Fraction
    step: Fraction
    """What its last digit counts, where it has a decimal point or a power of ten and so may be
    rounded; otherwise 0."""
    is_percent: bool
    """With a per cent sign."""

    @property
    def is_whole(self) -> bool:
        """Whether it is written as a whole number."""
        return not self.step and self.value.denominator == 1


def without_unit(tidy: str) -> str:
    r"""The tidied answer without a unit in text at its end: `\text{ cm}^2`, a degree sign.

    >>> without_unit(r"12\sqrt{13}\text{ feet}")
    '12\\sqrt{13}'
    """
    return _TEXT_UNIT.sub("", tidy).strip() or tidy


def numeral(tidy: str, *, has_word_unit: bool = False) -> Numeral | None:
    """The plain number a tidied answer is, without its unit.

    A unit in plain letters, `5 km`, looks like a product: it is left out only if asked for.
    """
    if len(tidy) > _GREATEST_LENGTH:
        return None
    text = without_unit(tidy.removeprefix(r"\approx").strip())
    if has_word_unit:
        text = _WORD_UNIT.sub("", text)
    is_percent = text.endswith("%")
    text, is_negative = _unsigned(text.removesuffix("%").strip())
    for form in _FORMS:
        found = form.fullmatch(text)
        if found is not None:
            groups = found.groupdict()
            is_scaled = any(groups.get(power) for power in _POWERS)
            scale = _scale(groups)
            value = None if scale is None else _value(groups)
            if scale is None or value is None:
                return None
            decimals = (groups.get("plain") or "").partition(".")[2]
            step = scale / 10 ** len(decimals) if decimals or is_scaled else Fraction(0)
            return Numeral(value * scale * (-1 if is_negative else 1), step, is_percent)
    return None


def _unsigned(text: str) -> tuple[str, bool]:
    """The number without its sign and one pair of parentheses, and whether it is negative."""
    is_negative = text.startswith("-")
    text = text.removeprefix("-" if is_negative else "+").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
        if text.startswith("-"):
            return text[1:].strip(), not is_negative
    return text, is_negative


def _scale(groups: dict[str, str | None]) -> Fraction | None:
    """The power of ten of the number; `None` if it is out of all proportion."""
    power = next((int(groups[name] or 0) for name in _POWERS if groups.get(name)), 0)
    return Fraction(10) ** power if abs(power) <= _GREATEST_POWER else None


def _value(groups: dict[str, str | None]) -> Fraction | None:
    if not groups.get("under"):
        return _plain(groups.get("plain") or "1")
    over, under = _plain(groups["over"]), _plain(groups["under"])
    return None if under == 0 else _plain(groups.get("whole") or "0") + over / under


def _plain(digits: str | None) -> Fraction:
    return Fraction((digits or "").strip("{} ").replace(",", ""))
