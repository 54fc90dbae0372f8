"""How an update goes through its answers: mini-batches for steps, packs for passes.

Several processes may make an update together. Each knows all answers and goes through a share of
them, and all make the same number of passes: who has fewer makes empty ones.

Axes: T answer tokens of an update's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from sortedrl.randomness import mix
from sortedrl.training.answers import Answers
from sortedrl.training.packing import Pack, TokenSequence, fill, packs

# Read in an empty pass; every vocabulary has this token.
_NOTHING = TokenSequence((0,), (0,))


class Team(Protocol):
    """The processes that make an update together."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    def shares(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each process, which of the sequences of these sizes it goes through."""

    def summed(self, values: Tensor) -> Tensor:
        """The sum over all processes, which must ask for it together."""

    def joined(self, values_T: Tensor) -> Tensor:
        """The values of all processes, one after the other; they may have different numbers."""


class Alone:
    """A team of one process."""

    rank = 0

    def shares(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Everything."""
        return [range(len(sizes))]

    def summed(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def joined(self, values_T: Tensor) -> Tensor:
        """The values themselves."""
        return values_T


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Pass:
    """Answers that go through the model together, and where their tokens stand."""

    answers: Sequence[int]
    """Empty in a pass that is only made because other processes make one."""
    places: Tensor

    def read(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """What the model reads; of what comes out, the first `len(places)` count.

        An empty pass reads a token nevertheless, so that it takes part in what processes do
        together, and nothing that comes out counts: its gradients are 0.
        """
        return [sequences[answer] for answer in self.answers] or [_NOTHING]


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of this process over some answers, each answer whole in one of them."""

    passes: Sequence[Pass]
    fill: float
    """The share of the passes' tokens that they hold, over all processes."""


def passes_over(
    chosen: Sequence[int],
    answers: Answers,
    sequences: Sequence[TokenSequence],
    *,
    budget: int,
    team: Team = ALONE,
) -> Passes:
    """Few passes of at most `budget` tokens over this process's share of the chosen answers.

    Every process finds the packs of all, and so how many passes to make, without asking.
    """
    sizes = [sequences[answer].num_rows for answer in chosen]
    shares = team.shares(sizes)
    found = [packs([sizes[index] for index in share], budget=budget) for share in shares]
    most = max(len(packed) for packed in found)
    filled = [[*packed, *[Pack((), 0)] * (most - len(packed))] for packed in found]
    own = shares[team.rank]
    members = [[chosen[own[index]] for index in pack.indices] for pack in filled[team.rank]]
    return Passes(
        [Pass(answers_of, answers.places(answers_of)) for answers_of in members],
        fill([pack for packed in filled for pack in packed], budget=budget),
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
    team: Team = ALONE,
) -> Tensor:
    """What `compute` gives for the tokens of every answer, without gradients."""
    parts, places = [], []
    with torch.no_grad():
        everything = range(len(answers))
        going = passes_over(everything, answers, sequences, budget=budget, team=team)
        for one in going.passes:
            parts.append(compute(one.read(sequences))[: len(one.places)])
            places.append(one.places)
    own_T = torch.cat(parts)
    result_T = own_T.new_zeros(answers.num_tokens)
    result_T[torch.cat(places).to(own_T.device)] = own_T
    return team.summed(result_T)
