r"""Plain numbers as people write them, read exactly: `1,080`, `1\frac{3}{4}`, `7 \times 10^{37}`.

    number      sign, then 1080 | 1,080 | 1 080 | 0.5 | 0.1\overline{6} | 3/4 | \frac34 | 1 3/4
                           | 1\frac34 | 5e3 | 5 \times 10^3 | 10^{-3}
    with it     a currency before it; behind it a percent or degree sign, `million`, a unit

Nothing is evaluated here: `2 + 3`, `5!` and `\sqrt{25}` are no plain numbers. A unit is words, and
words that change the value (`5 squared`, `5 and a half`), that look like variables (`5 x`, `5 i`)
or that name another number are none. No number has more than 1,000 digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from sortedrl.rewards.maths.reading import without_text_commands

_GREATEST_LENGTH = 200
_GREATEST_POWER = 400
_MOST_UNIT_WORDS = 8

Form = Literal["plain", "fraction", "scientific"]

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]{1,3}(?: [0-9]{3})++(?![0-9])|[0-9]++)"
_PLAIN = (
    rf"(?:(?P<whole>{_WHOLE})(?:\.(?P<decimals>[0-9]*+))?|\.(?P<only>[0-9]++))"
    r"(?:\\(?:overline|bar) ?\{(?P<repeated>[0-9]++)\})?"
)
_INTEGER = r"[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++"
_ARGUMENT = rf"(?:\{{ ?[-+]?(?:{_INTEGER}) ?\}}|[0-9])"
_POWER = r"10 ?\^ ?(?:\{ ?(?P<braced>[-+]?[0-9]++) ?\}|(?P<bare>[-+]?[0-9]++))"
# In this order: the longer form first.
_FORMS: tuple[tuple[Form, re.Pattern[str]], ...] = (
    ("scientific", re.compile(rf"{_PLAIN} ?(?:\\times|\\cdot|\*|x) ?{_POWER}")),
    ("scientific", re.compile(_POWER)),
    ("scientific", re.compile(rf"{_PLAIN}[eE](?P<exponent>[-+]?[0-9]++)")),
    (
        "fraction",
        re.compile(
            rf"(?:(?P<mixed>[0-9]++) ?)?\\frac ?(?P<over>{_ARGUMENT}) ?(?P<under>{_ARGUMENT})"
        ),
    ),
    (
        "fraction",
        re.compile(
            rf"(?:(?P<mixed>[0-9]++) )?(?P<over>{_INTEGER}) ?/ ?(?P<under>-?(?:{_INTEGER}))"
            r"(?![.,]?[0-9])"
        ),
    ),
    ("plain", re.compile(rf"{_PLAIN}(?P<more> ?\\ldots)?(?![0-9])")),
)
_CURRENCY = re.compile(r"(?:USD|EUR|GBP|INR|Rs\.?|US) ?(?=[-0-9.])")
_UNIT_TOKEN = re.compile(
    r"(?P<word>[A-Za-z]++(?:-[A-Za-z]{3,}+)?|\\(?:AA|Omega|mu|ell)(?![A-Za-z]))"
    r"|(?P<power>\^ ?(?:\{ ?-?[0-9] ?\}|-?[0-9](?![0-9])))"
    r"|(?P<degree>\^\\circ(?: ?[CFK](?![A-Za-z]))?)"
    r"|(?P<percent>%)"
    r"|(?P<quotes>'{1,2}(?!'))"
    r"|(?P<joint>[ ./(){}-]|\\cdot(?![A-Za-z])|\\frac(?![A-Za-z]))"
)
_MAGNITUDES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_NUMBER_WORDS = {
    word: value
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen twenty".split()
    )
}
_NO_UNIT = frozenset(
    # Other numbers.
    [
        *_NUMBER_WORDS,
        *_MAGNITUDES,
        *"thirty forty fifty sixty seventy eighty ninety half halves thirds fourths fifths sixths "
        "sevenths eighths ninths tenths hundredths thousandths tens infinity inf nan "
        # What is done with a number.
        "plus minus over divided multiplied factorial choose root sqrt mod modulo pi sin cos tan "
        "csc cot log exp abs gcd lcm det lim max arcsin arccos arctan imaginary abc xyz "
        # What makes it no answer, or two.
        "and or not nor but either neither except unless maybe perhaps than if else versus wrong "
        "incorrect false no none never unknown".split(),
    ]
)
_NO_FIRST_WORD = frozenset(["squared", "cubed", "a", "to", "of"])
_NO_LAST_WORD = frozenset(  # 5 third graders are five, 1 third is not
    "third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth".split()
)
_ORDINALS = frozenset(["st", "nd", "rd", "th"])
# Spellings of one unit, so that 5 m is not 5 km; other words are units of which nothing is known.
_UNITS = {
    spelling: spellings.split()[0]
    for spellings in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "dm decimeter decimetre",
        "m meter metre",
        "km kilometer kilometre",
        "in inch inche",
        "ft foot feet",
        "yd yard",
        "mi mile",
        "mg milligram",
        "g gram",
        "kg kilogram",
        "oz ounce",
        "lb pound",
        "ml milliliter millilitre",
        "L l liter litre",
        "gal gallon",
        "ms millisecond",
        "s sec second",
        "min minute",
        "h hr hour",
        "day",
        "week",
        "month",
        "year yr",
        "cent",
        "dollar USD",
        "degree deg",
        "radian rad",
    )
    for spelling in spellings.split()
}
_ABBREVIATIONS = frozenset(
    [
        *(one for one in _UNITS if len(one) > 1),
        *"lbs hrs mins secs yds qt pt nm um mL dL cL kL ns Hz kHz MHz GHz mph kph kmh fps rpm kW MW "
        "Wh kWh kJ MJ eV keV MeV GeV kV Pa kPa MPa atm mol mM kN Nm cal kcal EUR GBP INR cts ct AU "
        "ly pc kpc Mpc mT in of at to on per sq cu pm am dB ppm mmHg KB MB GB TB".split(),
    ]
)
_LETTER_UNITS = frozenset("mgshLlNJWVAKCFTa")


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number, and how it was written."""

    value: Fraction
    step: Fraction
    """What its last digit counts, where it has a decimal point or a mantissa with a power of ten
    and so may be rounded; otherwise 0."""
    form: Form = "plain"
    is_percent: bool = False
    unit: str | None = None
    """Its unit, where it is one that is known."""
    is_division: bool = False
    """Whether it is a fraction that comes out even, such as 10/2."""

    @property
    def is_whole(self) -> bool:
        """Whether it is written as a whole number."""
        return not self.step and self.value.denominator == 1


@dataclass(frozen=True, slots=True)
class _Unit:
    """What stands behind a number."""

    scale: int = 1
    is_percent: bool = False
    name: str | None = None


def numeral(tidy: str, *, is_gold: bool = False) -> Numeral | None:
    """The plain number that a tidied answer is, with or without a unit; `None` if it is none.

    In a gold a unit of one letter, or a short word that is no known unit, is a variable: `2 m`.
    """
    if len(tidy) > _GREATEST_LENGTH:
        return None
    text = without_text_commands(tidy).removeprefix(r"\approx").strip()
    if text.casefold() in _NUMBER_WORDS:
        return Numeral(Fraction(_NUMBER_WORDS[text.casefold()]), Fraction(0))
    text = _CURRENCY.sub("", text, count=1)
    is_negative = text.startswith("-")
    text = text[1:].lstrip() if text[:1] in ("-", "+") else text
    rest = None
    if text.startswith("("):
        text, closing, rest = text[1:].partition(")")
        text = text.strip()
        if not closing or (text.startswith("-") and is_negative):
            return None
        if text.startswith("-"):
            text, is_negative = text[1:].lstrip(), True
        if "," in text:
            return None  # a tuple
    text = _CURRENCY.sub("", text, count=1)
    for form, pattern in _FORMS:
        found = pattern.match(text)
        if found is None:
            continue
        behind = text[found.end() :]
        if rest is not None and behind.strip():
            return None
        number = _number(found.groupdict(), form)
        unit = _unit(behind if rest is None else rest, is_gold=is_gold)
        if number is None or unit is None:
            continue
        sign = -unit.scale if is_negative else unit.scale
        return Numeral(
            number.value * sign,
            number.step * unit.scale,
            form,
            unit.is_percent,
            unit.name,
            number.is_division,
        )
    return None


def without_unit(tidy: str) -> str:
    r"""The tidied formula without a unit in text at its end: `\text{ cm}^2`, a degree sign.

    >>> without_unit(r"12\sqrt{13}\text{ feet}")
    '12\\sqrt{13}'
    """
    text = tidy.removesuffix("'").removesuffix("'").rstrip()
    if text.endswith(r"^\circ"):
        return text.removesuffix(r"^\circ").rstrip() or tidy
    start = max(text.rfind(rf"\{command}{{") for command in ("text", "mathrm", "operatorname"))
    inner, closing, power = text[start:].partition("{")[2].partition("}")
    is_unit = start > 0 and closing and inner.strip() not in ("i", "e", "d")
    if is_unit and _unit(f"{inner}{power}", is_gold=False) is not None:
        return text[:start].rstrip() or tidy
    return text or tidy


def _number(groups: dict[str, str | None], form: Form) -> Numeral | None:
    """The number of one form; `None` where it is out of all proportion, or makes no sense."""
    if form == "fraction":
        over, under = _integer(groups["over"]), _integer(groups["under"])
        mixed = groups["mixed"]
        if under == 0 or (mixed is not None and not 0 < over < under):
            return None
        value = Fraction(over, under) + _integer(mixed)
        is_division = mixed is None and value.denominator == 1 and abs(under) != 1
        return Numeral(value, Fraction(0), is_division=is_division)
    power = next((groups[name] for name in ("exponent", "braced", "bare") if groups.get(name)), "0")
    if power is None or len(power) > 5 or abs(int(power)) > _GREATEST_POWER:
        return None
    scale = Fraction(10) ** int(power)
    if "whole" not in groups:
        return Numeral(scale, Fraction(0))
    whole = (groups["whole"] or "0").replace(",", "").replace(" ", "")
    decimals, repeated = groups["decimals"] or groups["only"] or "", groups["repeated"]
    if groups.get("more") and not decimals:
        return None
    if repeated is not None and not (decimals or groups["decimals"] == ""):
        return None
    last = Fraction(1, 10 ** len(decimals))
    value = Fraction(int(whole)) + int(decimals or 0) * last
    if repeated is not None:
        return Numeral(value + last * Fraction(int(repeated), 10 ** len(repeated) - 1), Fraction(0))
    is_rounded = bool(decimals) or form == "scientific"
    return Numeral(value * scale, last * scale if is_rounded else Fraction(0))


def _integer(digits: str | None) -> int:
    return int((digits or "0").strip("{} ").replace(",", ""))


def _unit(text: str, *, is_gold: bool) -> _Unit | None:
    """What stands behind a number, read to its end; `None` where that is more than a unit."""
    text = text.replace("per cent", "percent")
    scale, is_percent, names, num_words = 1, False, set[str](), 0
    place, last, ends_open = 0, "", False
    while place < len(text):
        token = _UNIT_TOKEN.match(text, place)
        if token is None:
            return None
        ends_open = token[0] in ("/", "-", r"\cdot", r"\frac")
        word = token["word"]
        if word is not None:
            singular = word.lower().removesuffix("s")
            if num_words == 0 and singular in _MAGNITUDES:
                scale *= _MAGNITUDES[singular]
            elif singular in ("percent", "percentage", "pct"):
                is_percent = True
            elif _is_unit_word(word, is_attached=place == 0, is_gold=is_gold, is_first=not num_words):
                num_words, last = num_words + 1, word.lower()
                names.update(_UNITS[one] for one in (word, singular) if one in _UNITS)
            else:
                return None
        elif token["percent"]:
            if is_percent or num_words:
                return None
            is_percent = True
        elif token["degree"]:
            if num_words:
                return None
            num_words, names = 1, {"degree"}
        elif token["power"]:
            if num_words == 0 or not text[place - 1].isalpha() and text[place - 1] not in " )}":
                return None
        elif token["quotes"]:
            if place > 0:
                return None
            num_words = 1
        place = token.end()
    is_bare = num_words == 0 and scale == 1 and not is_percent
    if ends_open or num_words > _MOST_UNIT_WORDS or (is_bare and text.strip(" .")):
        return None
    if last in _NO_LAST_WORD or text.count("(") != text.count(")"):
        return None
    return _Unit(scale, is_percent, names.pop() if len(names) == 1 else None)


def _is_unit_word(word: str, *, is_attached: bool, is_gold: bool, is_first: bool) -> bool:
    """Whether a word behind a number is a unit, or part of one, and no variable."""
    lower = word.lower()
    if not _NO_UNIT.isdisjoint(lower.split("-")) or (is_first and lower in _NO_FIRST_WORD):
        return False
    if word in _ABBREVIATIONS or word.startswith("\\") or (is_attached and lower in _ORDINALS):
        return True
    if len(word) == 1:
        return word in _LETTER_UNITS and not is_attached and not is_gold
    if len(word) <= 3:
        is_word = set(lower) & set("aeiou") or (word[:2].isupper() and word.endswith("s"))
        return len(word) == 3 and bool(is_word) and not is_attached and not is_gold
    return word != word.upper()
