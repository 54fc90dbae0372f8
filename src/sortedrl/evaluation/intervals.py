"""95 % intervals for means over prompts, and for differences between two evaluations.

The answers to one prompt resemble each other, so the prompt is what is resampled, never the
answer: a set of 30 prompts says the same about the next prompt whether each was answered 4 or 400
times. The intervals are about prompts like these, not about these prompts answered once more.

The resampling is the Bayesian bootstrap: instead of drawing prompts with replacement, every prompt
is given a random weight, all together Dirichlet. Prompts of equal values share one weight (a sum of
exponentials is a gamma number), so thousands of prompts with a handful of values cost a handful of
draws.

The plain bootstrap is wrong where it matters: 30 prompts all answered right resample to 30 prompts
all answered right, an interval without width; and with 5 % wrong answers in truth its interval
holds the truth in 77 % of the cases. So imagined prompts join the real ones:

- for rates, half a prompt that is all right and half a prompt that is all wrong; with one answer
  for each prompt this is the Jeffreys interval of a proportion;
- for differences, one prompt for each side, as different as those that differ are on average; with
  one answer for each prompt this is the custom of adding one pair to each of the two ways in which
  a pair can differ.

An interval always holds the value it belongs to. Everything is a function of the values and of a
key in words, so the same answers give the same interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import mul
from random import Random

CONFIDENCE = 0.95
RESAMPLES = 10_000

Values = tuple[float | None, ...]
"""One prompt's number for each measure; `None` where the prompt has none."""

Draws = Sequence[float]
"""The resampled means of one measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts and its interval."""

    value: float
    low: float
    high: float
    num_prompts: int
    """Prompts it is the mean of."""


def rate_draws(prompts: Sequence[Values], *, key: str) -> list[Draws]:
    """Resampled means of measures that lie in 0..1, one list for each measure."""
    width = len(prompts[0])
    imagined = [(0.5, (0.0,) * width), (0.5, (1.0,) * width)]
    return list(zip(*_resample(prompts, imagined, random=Random(key)), strict=True))


def difference_draws(prompts: Sequence[Values], *, key: str) -> list[Draws]:
    """Resampled means of differences, one list for each measure."""
    typical = tuple(_typical(column) for column in zip(*prompts, strict=True))
    imagined = [(1.0, tuple(-size for size in typical)), (1.0, typical)]
    return list(zip(*_resample(prompts, imagined, random=Random(key)), strict=True))


def mean_draws(tasks: Sequence[Draws]) -> Draws:
    """Resampled macro averages: every task counts the same."""
    return [math.fsum(drawn) / len(tasks) for drawn in zip(*tasks, strict=True)]


def estimate(value: float, draws: Draws, *, num_prompts: int) -> Estimate:
    """The value with the interval that its resampled means give."""
    ordered = sorted(draws)
    # the first place at which a draw beyond 0 would make the p-value less than 1 - CONFIDENCE
    outside = int((1 - CONFIDENCE) / 2 * (len(ordered) + 1)) - 1
    low, high = ordered[outside], ordered[-1 - outside]
    return Estimate(
        value=value, low=min(low, value), high=max(high, value), num_prompts=num_prompts
    )


def p_value(draws: Draws) -> float:
    """How well "no difference" fits, two-sided: below 0.05 where the interval leaves 0 out."""
    below = sum(drawn <= 0 for drawn in draws)
    above = sum(drawn >= 0 for drawn in draws)
    return min(1.0, 2 * (min(below, above) + 1) / (len(draws) + 1))


def _typical(differences: Sequence[float | None]) -> float:
    """The size of a difference where there is one; 1 where nothing differs."""
    squares = [value * value for value in differences if value]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 1.0


def _cell_order(cell: tuple[Values, int]) -> tuple[int, list[tuple[bool, float]]]:
    """Rare values first, and never by the order in which the prompts come."""
    values, count = cell
    return count, [(value is None, value or 0.0) for value in values]


def _resample(
    prompts: Sequence[Values], imagined: Sequence[tuple[float, Values]], *, random: Random
) -> Iterator[list[float]]:
    """The means of all measures, `RESAMPLES` times."""
    cells = sorted(Counter(prompts).items(), key=_cell_order)
    num_single = sum(count == 1 for _, count in cells)
    counts = [count for _, count in cells[num_single:]] + [weight for weight, _ in imagined]
    columns = list(zip(*[values for values, _ in cells], *[v for _, v in imagined], strict=True))
    measures = [
        (
            [0.0 if value is None else value for value in column],
            tuple(value is not None for value in column),
        )
        for column in columns
    ]
    masks = {mask for _, mask in measures}
    log, uniform, gamma = math.log, random.random, random.gammavariate
    for _ in range(RESAMPLES):
        # a gamma number of shape 1 is an exponential one, which is several times cheaper
        weights = [-log(1.0 - uniform()) for _ in range(num_single)]
        weights += [gamma(count, 1.0) for count in counts]
        whole = {mask: sum(compress(weights, mask)) for mask in masks}
        yield [sum(map(mul, column, weights)) / whole[mask] for column, mask in measures]
