"""Sums of dice with a worked way to the result, for a tiny model trained from scratch.

    CLMX?       3 + 6 + 1 + 6: A to F are 1 to 6 on the first die, G to L on the second, and so on

One letter tells both the die and its number, so that a model of a few layers finds a term with one
look. The response takes one die after the other and counts: what is left of it, and the total so
far, whose lowest digit stands first.

    <think>#C 300 210 120 030 #L 630 540 ... 090 #M 190 001 #X 601 511 ... 061</think>
    <answer>61</answer>

(without the spaces and the new line). So each symbol is looked up in the prompt or follows from
the three before it. The same settings give the same rows, and rows of `train` and `test` never
share a sum, not even with its terms in another order.
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
_FEWEST_TERMS = 4  # with fewer there are hardly different sums
_MOST_TERMS = len(ascii_letters) // _SIDES
_TEST_SHARE = 0.1
_MOST_DRAWS = 200  # for each row, before it is believed that there are no more
_GIVES_UP, _SLIPS, _LENGTH = range(3)  # what a random number decides


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSettings:
    """Generated sums, and the care of the teacher who works them out."""

    count: int = 4096
    """Different rows."""
    terms: tuple[int, int] = (4, 8)
    """Fewest and most dice of a sum; every number of dice is as likely, as long as there are
    different sums of so many."""
    seed: int = 0
    """Another seed gives other sums."""
    split: Split = "train"
    """Which part of all sums to draw from; the two have none in common."""
    haste: float = 0.0
    """The chance, after each term but the last, that the teacher gives up and answers with the
    total so far."""
    slips: float = 0.0
    """The chance, at each count, that the teacher leaves a number out."""

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
    """The rows: prompt, answer, level (the number of dice) and the teacher's response.

    A `ConfigError` if there are not so many different ones.
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
    """1 for the right sum in the place of the answer, else 0."""
    before, opened, rest = response.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    is_in_form = bool(opened and closed) and before.endswith("</think>") and not after.strip()
    return float(is_in_form and answer == prompt.fields["answer"])


def digits(value: int, width: int) -> str:
    """A number with its lowest digit first.

    >>> digits(28, 2)
    '82'
    """
    return str(value).zfill(width)[::-1]


def prompt_of(terms: Sequence[int]) -> str:
    """The sum as a question.

    >>> prompt_of([3, 6, 1, 6])
    'CLMX?'
    """
    return "".join(_letter(place, term) for place, term in enumerate(terms)) + "?"


def worked(terms: Sequence[int], *, settings: SumSettings, number: int = 0) -> str:
    """The response of a teacher; `number` decides where he slips and when he gives up.

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
    """Where a sum belongs, decided by its terms alone, whatever their order."""
    return split_of_key("".join(map(chr, sorted(terms))), _TEST_SHARE)


def _letter(place: int, term: int) -> str:
    return ascii_letters.swapcase()[_SIDES * place + term - 1]


def _terms(settings: SumSettings, draw: int) -> list[int]:
    low, high = settings.terms
    # Train and test are separated by the terms, so they may be drawn from the same numbers.
    count = low + int(uniform(settings.seed, draw, _LENGTH) * (high - low + 1))
    return [1 + mix(settings.seed, draw, _LENGTH, place) % _SIDES for place in range(count)]
