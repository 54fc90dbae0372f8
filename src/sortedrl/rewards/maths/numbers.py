r"""Plain numbers as people write them, parsed exactly: `1,080`, `1\frac{3}{4}`, `7 \times 10^{37}`.

    number      sign, then 1080 | 1,080 | 1 080 | 0.5 | 0.1\overline{6} | 3/4 | \frac34 | 1 3/4
                           | 1\frac34 | 5e3 | 5 \times 10^3 | 10^{-3}
    with it     a currency before it; behind it a percent or degree sign, `million`, a unit

Nothing is evaluated here: `2 + 3`, `5!` and `\sqrt{25}` are not plain numbers. A unit consists of
words; words that change the value (`5 squared`, `5 and a half`), that look like variables (`5 x`,
`5 i`) or that name another number are not units. No number has more than 1,000 digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from sortedrl.rewards.maths.reading import tidied, without_text_commands

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
            rf"(?:(?P<mixed>[0-9]++) )?(?P<over>{_INTEGER})\.? ?/ ?(?P<under>-?(?:{_INTEGER}))"
            r"(?![.,]?[0-9])"
        ),
    ),
    ("plain", re.compile(rf"{_PLAIN}(?P<more> ?\\ldots)?(?![0-9])")),
)
# Where a number may start in a text: not inside a word, a name with an index, a power, an argument
# of a command, a time, a date or a decimal comma.
_START = re.compile(
    r"(?<![0-9A-Za-z_^.{\\])(?<![0-9][:,/-])(?<![A-Za-z_^{]-)"
    r"(?:(?<![0-9)\]}] )(?<![)\]}])[-+])?(?=\\frac|\.?[0-9])"
)
_ENDS_INSIDE = re.compile(r"[_^]|[:,/-][0-9]|\.[0-9]|\\[A-Za-z]")
_ATTACHED = re.compile(r" ?%|[A-Za-z]++")
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
_COUNTS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: value for value, word in enumerate(_COUNTS.split())}
_OTHER_NUMBERS = (
    "thirty forty fifty sixty seventy eighty ninety half halves thirds fourths fifths sixths "
    "sevenths eighths ninths tenths hundredths thousandths tens infinity inf nan"
)
_OPERATIONS = (
    "plus minus over divided multiplied factorial choose root sqrt mod modulo pi sin cos tan csc "
    "cot log exp abs gcd lcm det lim max arcsin arccos arctan imaginary abc xyz"
)
_HEDGES = (
    "and or not nor but either neither except unless maybe perhaps than if else versus wrong "
    "incorrect false no none never unknown"
)
_NO_UNIT = frozenset(
    [*_NUMBER_WORDS, *_MAGNITUDES, *f"{_OTHER_NUMBERS} {_OPERATIONS} {_HEDGES}".split()]
)
_NO_FIRST_WORD = frozenset(["squared", "cubed", "a", "to", "of"])
_PARTS = "third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth"
_NO_LAST_WORD = frozenset(_PARTS.split())  # 5 third graders are five, 1 third is not one
_ORDINALS = frozenset(["st", "nd", "rd", "th"])
# Spellings of one unit, so that 5 m is not 5 km; other words are units of which nothing is known.
_SPELLINGS = """
    mm millimeter millimetre; cm centimeter centimetre; dm decimeter decimetre; m meter metre;
    km kilometer kilometre; in inch inche; ft foot feet; yd yard; mi mile; mg milligram; g gram;
    kg kilogram; oz ounce; lb pound; ml milliliter millilitre; L l liter litre; gal gallon;
    ms millisecond; s sec second; min minute; h hr hour; day; week; month; year yr; cent;
    dollar USD; degree deg; radian rad
"""
_UNITS = {
    spelling: spellings.split()[0]
    for spellings in _SPELLINGS.split(";")
    for spelling in spellings.split()
}
_SHORT_UNITS = (
    "lbs hrs mins secs yds qt pt nm um mL dL cL kL ns Hz kHz MHz GHz mph kph kmh fps rpm kW MW Wh "
    "kWh kJ MJ eV keV MeV GeV kV Pa kPa MPa atm mol mM kN Nm cal kcal EUR GBP INR cts ct AU ly pc "
    "kpc Mpc mT as in of at to on per sq cu pm am dB ppm mmHg KB MB GB TB"
)
_ABBREVIATIONS = frozenset([*(unit for unit in _UNITS if len(unit) > 1), *_SHORT_UNITS.split()])
_LETTER_UNITS = frozenset("mgshLlNJWVAKCFTa")


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number, and how it was written."""

    value: Fraction
    step: Fraction
    """The value of one unit in its last digit, if it has a decimal point or a mantissa with a power
    of ten and so may be rounded; otherwise 0."""
    form: Form = "plain"
    is_percent: bool = False
    unit: str | None = None
    """Its unit, if it is a known one."""
    is_division: bool = False
    """Whether it is a fraction with an integer value, such as 10/2."""

    @property
    def is_whole(self) -> bool:
        """Whether it is written as a whole number."""
        return not self.step and self.value.denominator == 1


@dataclass(slots=True)
class _Unit:
    """The text after a number, as far as it was parsed."""

    scale: int = 1
    is_percent: bool = False
    names: set[str] = field(default_factory=set)
    num_words: int = 0
    last_word: str = ""

    @property
    def name(self) -> str | None:
        """The unit, if it is a known one."""
        return next(iter(self.names)) if len(self.names) == 1 else None


def numeral(tidy: str, *, is_gold: bool = False) -> Numeral | None:
    """A tidied answer as a plain number, with or without a unit; `None` if it is not one.

    In a gold a unit of one letter, or a short word that is not a known unit, is a variable: `2 m`.
    """
    if len(tidy) > _GREATEST_LENGTH:
        return None
    text = without_text_commands(tidy).removeprefix(r"\approx").strip()
    if text.casefold() in _NUMBER_WORDS:
        return Numeral(Fraction(_NUMBER_WORDS[text.casefold()]), Fraction(0))
    signed = _signed(text)
    if signed is None:
        return None
    sign, digits, behind = signed
    for form, pattern in _FORMS:
        found = pattern.match(digits)
        if found is None:
            continue
        rest = digits[found.end() :]
        if behind is not None and rest.strip():
            return None
        number = _number(found.groupdict(), form)
        unit = _unit(rest if behind is None else behind, is_gold=is_gold)
        if number is not None and unit is not None:
            return replace(
                number,
                value=number.value * sign * unit.scale,
                step=number.step * unit.scale,
                form=form,
                is_percent=unit.is_percent,
                unit=unit.name,
            )
    return None


def last_number(text: str) -> str | None:
    r"""The last plain number in a text, as it is written there; `None` where there is none.

    A line `#### 42`, as GSM8K ends its solutions, goes before other numbers. Digits that are part
    of something else are no numbers: `x_2`, `3^4`, `\sqrt{25}`, `B12`, `3:30`, `2024-05-06`, `1,5`.

    >>> last_number("She pays $2 for 9 eggs, so she makes $18. (Not bad!)")
    '18'
    >>> last_number("#### 18\nThat took me 3 steps.")
    '18'
    """
    lines = text.splitlines()
    marked = [line.partition("####")[2] for line in lines if line.lstrip().startswith("####")]
    plain = [line for line in marked if not re.search("[A-Za-z]", line)]
    for line in reversed([*lines, *plain]):
        numbers = list(_numbers(without_text_commands(tidied(line))))
        if numbers:
            return numbers[-1]
    return None


def _numbers(text: str) -> Iterator[str]:
    """The plain numbers of a line, with their signs, and with a unit or percent sign attached."""
    place = 0
    while (start := _START.search(text, place)) is not None:
        matches = (pattern.match(text, start.end()) for _, pattern in _FORMS)
        found = next((match for match in matches if match is not None), None)
        if found is None:
            place = start.end() + 1
            continue
        place = found.end() - found[0].endswith(".")
        number = text[start.start() : place]
        attached = _ATTACHED.match(text, place)
        if attached is not None:
            number, place = number + attached[0], attached.end()
        if _ENDS_INSIDE.match(text, place) is None and numeral(number) is not None:
            yield number


def _signed(text: str) -> tuple[int, str, str | None] | None:
    """The sign of a number, its digits, and what follows the parentheses around it, if any.

    `None` where there are two signs, or the parentheses are those of a tuple.
    """
    text = _CURRENCY.sub("", text, count=1)
    sign = -1 if text.startswith("-") else 1
    text = text[1:].lstrip() if text[:1] in ("-", "+") else text
    if not text.startswith("("):
        return sign, _CURRENCY.sub("", text, count=1), None
    inside, closing, behind = text[1:].partition(")")
    inside = inside.strip()
    if not closing or "," in inside or (inside.startswith("-") and sign < 0):
        return None
    if inside.startswith("-"):
        sign, inside = -1, inside[1:].lstrip()
    return sign, inside, behind


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
    """The number of one form; `None` if it is too large or malformed."""
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
    """The text after a number, parsed to its end; `None` if it is more than a unit."""
    text = text.replace("per cent", "percent").replace("a.m", "am").replace("p.m", "pm")
    found = _Unit()
    place, ends_open = 0, False
    while place < len(text):
        token = _UNIT_TOKEN.match(text, place)
        if token is None:
            return None
        word = token["word"]
        is_unit = _take_sign(found, token) if word is None else _take_word(found, token, is_gold)
        if not is_unit:
            return None
        ends_open = token[0] in ("/", "-", r"\cdot", r"\frac")
        place = token.end()
    is_bare = found.num_words == 0 and found.scale == 1 and not found.is_percent
    if (
        ends_open
        or (is_bare and text.strip(" ."))
        or found.num_words > _MOST_UNIT_WORDS
        or found.last_word.lower() in _NO_LAST_WORD
        or _is_initials(found.last_word)
        or text.count("(") != text.count(")")
    ):
        return None
    return found


def _take_word(found: _Unit, token: re.Match[str], is_gold: bool) -> bool:
    """Add a word to a unit; whether it can be part of one."""
    word = token["word"]
    singular = word.lower().removesuffix("s")
    if found.num_words == 0 and singular in _MAGNITUDES:
        found.scale *= _MAGNITUDES[singular]
        return True
    if singular in ("percent", "percentage", "pct"):
        found.is_percent = True
        return True
    is_first = found.num_words == 0
    found.num_words += 1
    found.last_word = word
    found.names.update(_UNITS[one] for one in (word, singular) if one in _UNITS)
    return _is_unit_word(word, is_attached=token.start() == 0, is_gold=is_gold, is_first=is_first)


def _take_sign(found: _Unit, token: re.Match[str]) -> bool:
    """Add a sign to a unit; whether it can stand there."""
    if token["percent"]:
        is_first = not found.is_percent and found.num_words == 0
        found.is_percent = True
        return is_first
    if token["degree"] or token["quotes"]:
        is_first = found.num_words == 0 and (bool(token["degree"]) or token.start() == 0)
        found.num_words += 1
        found.names.update(["degree"] if token["degree"] else [])
        return is_first
    return not token["power"] or found.num_words > 0


def _is_unit_word(word: str, *, is_attached: bool, is_gold: bool, is_first: bool) -> bool:
    """Whether a word after a number is a unit, or part of one, and not a variable."""
    lower = word.lower()
    if not _NO_UNIT.isdisjoint(lower.split("-")) or (is_first and lower in _NO_FIRST_WORD):
        return False
    if word in _ABBREVIATIONS or word.startswith("\\") or (is_attached and lower in _ORDINALS):
        return True
    if len(word) > 1 and lower.removesuffix("s") in _UNITS:
        return True
    if is_attached:
        return False
    if len(word) == 1:
        return word in _LETTER_UNITS and not is_gold
    has_vowel = not set("aeiouy").isdisjoint(lower)
    is_plural = word[:-1].isupper() and word.endswith("s")  # CDs
    if len(word) <= 3:
        return not is_gold and (_is_initials(word) or (len(word) == 3 and (has_vowel or is_plural)))
    return is_plural or (has_vowel and not word.isupper())


def _is_initials(word: str) -> bool:
    """Whether the word is two capital letters that qualify another word: 3 DS games."""
    return len(word) == 2 and word.isupper() and word not in _ABBREVIATIONS
