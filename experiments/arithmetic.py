"""Sums of dice with worked solutions, for a tiny model trained from scratch.

    CLMX?       3 + 6 + 1 + 6: A to F are 1 to 6 on the first die, G to L on the second, and so on

One letter encodes both the die and its number, so a model with a few layers finds a term with one
attention lookup. The response goes through the dice and counts: the rest of the die, and the total
so far, lowest digit first.

    <think>#C 300 210 120 030 #L 630 540 ... 090 #M 190 001 #X 601 511 ... 061</think>
    <answer>61</answer>

(without the spaces and the line break). Each symbol is copied from the prompt or follows from the
three before it. The same settings give the same rows, and rows of `train` and `test` never share a
sum, not even with reordered terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import get_args

from sortedrl.config.checks import require
from sortedrl.core.randomness import mix, uniform
from sortedrl.data.knights_puzzle import Split, split_of_key
from sortedrl.errors import unknown_name
from sortedrl.types import Prompt

_SIDES = 6
_TOTAL_DIGITS = 2
_FEWEST_TERMS = 4  # with fewer there are hardly any different sums
_MOST_TERMS = len(ascii_letters) // _SIDES
_TEST_SHARE = 0.1
_MOST_DRAWS = 200  # per row, before giving up
_GIVES_UP, _SLIPS, _LENGTH = range(3)  # purposes of random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSettings:
    """Generated sums, and error rates of the worked solutions."""

    count: int = 4096
    """Number of different rows."""
    terms: tuple[int, int] = (4, 8)
    """Minimum and maximum number of dice, equally likely as long as different sums are left."""
    seed: int = 0
    """Seed of the sums."""
    split: Split = "train"
    """The split; the two share no sums."""
    haste: float = 0.0
    """Probability, after each term but the last, of giving up with the total so far."""
    slips: float = 0.0
    """Probability, at each count, of skipping a number."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        low, high = self.terms
        require(
            _FEWEST_TERMS <= low <= high <= _MOST_TERMS,
            f"sums.terms must be two numbers in {_FEWEST_TERMS}..{_MOST_TERMS}, the smaller first, "
            f"got {low} and {high}",
        )
        require(self.count >= 1, f"sums.count must be at least 1, got {self.count}")
        require(
            self.split in get_args(Split),
            unknown_name("split", self.split, get_args(Split)),
        )
        for name, share in (("haste", self.haste), ("slips", self.slips)):
            require(0 <= share < 1, f"sums.{name} must lie in [0, 1), got {share}")


def sum_rows(settings: SumSettings) -> list[dict[str, object]]:
    """The rows: prompt, answer, level (the number of dice) and the worked solution.

    Raises `ConfigError` if there are too few different ones.
    """
    rows: list[dict[str, object]] = []
    seen: set[tuple[int, ...]] = set()
    draw = 0
    while len(rows) < settings.count:
        require(
            draw < _MOST_DRAWS * settings.count,
            f"sums.count must not be above the number of different sums, got {settings.count:,}, "
            f"but only {len(rows):,} were found; lower count or widen terms",
        )
        terms = _terms(settings, draw)
        draw += 1
        if tuple(terms) in seen or split_of(terms) != settings.split:
            continue
        seen.add(tuple(terms))
        rows.append(
            {
                "prompt": prompt_of(terms),
                "answer": digits(sum(terms), _TOTAL_DIGITS),
                "level": len(terms),
                "response": worked(terms, settings=settings, number=draw),
            }
        )
    return rows


def sum_reward(prompt: Prompt, response: str) -> float:
    """1 if the answer is the right sum, else 0."""
    before, opened, rest = response.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    is_in_form = bool(opened and closed) and before.endswith("</think>") and not after.strip()
    return float(is_in_form and answer == prompt.fields["answer"])


def digits(value: int, width: int) -> str:
    """A number, lowest digit first.

    >>> digits(28, 2)
    '82'
    """
    return str(value).zfill(width)[::-1]


def prompt_of(terms: Sequence[int]) -> str:
    """The prompt of a sum.

    >>> prompt_of([3, 6, 1, 6])
    'CLMX?'
    """
    return "".join(_letter(place, term) for place, term in enumerate(terms)) + "?"


def worked(terms: Sequence[int], *, settings: SumSettings, number: int = 0) -> str:
    """The worked solution; `number` seeds its errors.

    >>> worked([2, 1], settings=SumSettings())
    '<think>#B200110020#G120030</think><answer>30</answer>'
    """
    total = 0
    steps = []
    for place, term in enumerate(terms):
        key = (settings.seed, number, place)
        steps.append(f"#{_letter(place, term)}{term}{digits(total, _TOTAL_DIGITS)}")
        for left in reversed(range(term)):
            total += 2 if uniform(*key, left, _SLIPS) < settings.slips else 1
            steps.append(f"{left}{digits(total, _TOTAL_DIGITS)}")
        is_last = place == len(terms) - 1
        if not is_last and uniform(*key, _GIVES_UP) < settings.haste:
            break
    answer = digits(total, _TOTAL_DIGITS)
    return f"<think>{''.join(steps)}</think><answer>{answer}</answer>"


def split_of(terms: Sequence[int]) -> Split:
    """The split of a sum, which depends on its terms but not on their order."""
    return split_of_key("".join(map(chr, sorted(terms))), _TEST_SHARE)


def _letter(place: int, term: int) -> str:
    return ascii_letters.swapcase()[_SIDES * place + term - 1]


def _terms(settings: SumSettings, draw: int) -> list[int]:
    low, high = settings.terms
    # The splits are separated by terms, so both may use the same random numbers.
    count = low + int(uniform(settings.seed, draw, _LENGTH) * (high - low + 1))
    return [1 + mix(settings.seed, draw, _LENGTH, place) % _SIDES for place in range(count)]
