"""How an update goes through its answers: mini-batches for steps, packs for passes.

Axes: T answer tokens of an update's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sortedrl.randomness import mix
from sortedrl.training.answers import Answers
from sortedrl.training.packing import TokenSequence, fill, packs


@dataclass(frozen=True, slots=True)
class Pass:
    """Answers that go through the model together, and where their tokens stand."""

    answers: Sequence[int]
    places: Tensor


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes over some answers, each answer whole in one of them."""

    passes: Sequence[Pass]
    fill: float
    """The share of the passes' tokens that they hold."""


def passes_over(
    chosen: Sequence[int],
    answers: Answers,
    sequences: Sequence[TokenSequence],
    *,
    budget: int,
) -> Passes:
    """Few passes of at most `budget` tokens over the chosen answers."""
    found = packs([sequences[answer].num_rows for answer in chosen], budget=budget)
    members = [[chosen[index] for index in pack.indices] for pack in found]
    return Passes(
        [Pass(answers_of, answers.places(answers_of)) for answers_of in members],
        fill(found, budget=budget),
    )


def mini_batches(count: int, *, steps: int, epochs: int, seed: int) -> Iterator[Sequence[int]]:
    """The answers of each optimiser step: all of them, or parts in an order by the seed.

    >>> list(mini_batches(5, steps=1, epochs=1, seed=0))
    [range(0, 5)]
    """
    for epoch in range(epochs):
        if steps == 1:
            yield range(count)
            continue
        order = sorted(range(count), key=lambda answer: mix(seed, epoch, answer))
        bounds = [count * step // steps for step in range(steps + 1)]
        for start, end in pairwise(bounds):
            if end > start:
                yield order[start:end]


def of_all(
    answers: Answers,
    sequences: Sequence[TokenSequence],
    compute: Callable[[Sequence[TokenSequence]], Tensor],
    *,
    budget: int,
) -> Tensor:
    """What `compute` gives for the tokens of every answer, without gradients."""
    parts, places = [], []
    with torch.no_grad():
        everything = range(len(answers))
        for one in passes_over(everything, answers, sequences, budget=budget).passes:
            parts.append(compute([sequences[answer] for answer in one.answers]))
            places.append(one.places)
    joined_T = torch.cat(parts)
    result_T = torch.empty_like(joined_T)
    result_T[torch.cat(places).to(joined_T.device)] = joined_T
    return result_T
