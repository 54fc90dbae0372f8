"""The answers of one update as flat tensors, in mini-batches for steps and packs for passes.

Only answer tokens have an entry, answer after answer, so there is no padding and nothing to mask
for it. A pack is sequences laid end to end in a row of at most `budget` tokens. Every sequence is
in exactly one pack, and the same lengths always give the same packs; a sequence longer than the
budget has a pack of its own, so nothing is ever cut or left out.

Several ranks may make an update together. Each knows all answers and passes over a share of them,
and all make the same number of passes: a rank with fewer makes empty ones.

Axes: N answers, T answer tokens of all of them together.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from sortedrl.config.checks import require
from sortedrl.core.randomness import mix
from sortedrl.types import LARGEST_REWARD, TrainBatch, Trajectory, impossible_logprob


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and an answer to it, whose tokens are to be scored."""

    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def num_rows(self) -> int:
        """Tokens that the model reads: all but the last, which is only predicted."""
        return len(self.prompt) + len(self.answer) - 1


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences that go through the model together, longest first."""

    indices: tuple[int, ...]
    num_tokens: int


def packs(lengths: Sequence[int], *, budget: int) -> list[Pack]:
    """Few packs that hold every sequence once: the longest first, each where it fits best.

    >>> packs([3, 9, 4, 5], budget=8)
    [Pack(indices=(1,), num_tokens=9), Pack(indices=(3, 0), num_tokens=8), \
Pack(indices=(2,), num_tokens=4)]
    """
    require(budget >= 1, f"the token budget of a pack must be at least 1, got {budget}")
    require(
        all(length >= 1 for length in lengths),
        f"a sequence must have at least 1 token, got {min(lengths, default=1)}",
    )
    members: list[list[int]] = []
    # What room is left where, in order, so that the tightest pack is found by bisection.
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, pack = rooms.pop(place)
        else:
            room, pack = budget, len(members)
            members.append([])
        members[pack].append(index)
        if room > length:
            insort(rooms, (room - length, pack))
    return [Pack(tuple(pack), sum(lengths[index] for index in pack)) for pack in members]


def fill(packs: Sequence[Pack], *, budget: int) -> float:
    """The share of the rows that holds tokens; a pack over the budget counts as full."""
    room = sum(max(budget, pack.num_tokens) for pack in packs)
    return sum(pack.num_tokens for pack in packs) / room if room else 1.0


_NAMED = 3
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What advantages and losses need to know of the answers, beside their log-probabilities."""

    lengths_N: Tensor
    """Tokens of each answer; at least 1."""
    rewards_N: Tensor
    """Rewards, float64."""
    prompts_N: Tensor
    """The prompt that each answer belongs to."""
    behaviour_T: Tensor
    """Log-probabilities under the weights that sampled each token, float32."""
    staleness_T: Tensor
    """How many versions old each token is."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], *, version: int) -> Answers:
        """The answers of scored trajectories, in order, as seen from a version."""
        segments = [segment for t in trajectories for segment in t.segments]
        sizes = torch.tensor([len(segment.tokens) for segment in segments])
        ages = torch.tensor([version - segment.version for segment in segments])
        return cls(
            lengths_N=torch.tensor([t.num_tokens for t in trajectories]),
            rewards_N=torch.tensor([_reward(t) for t in trajectories], dtype=torch.float64),
            prompts_N=torch.tensor([t.prompt.id for t in trajectories]),
            behaviour_T=torch.tensor([value for s in segments for value in s.logprobs]),
            staleness_T=ages.repeat_interleave(sizes),
        )

    def __len__(self) -> int:
        """How many answers."""
        return len(self.lengths_N)

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return len(self.behaviour_T)

    @property
    def owners_T(self) -> Tensor:
        """The answer that each token belongs to, 0 to N - 1."""
        return torch.arange(len(self)).repeat_interleave(self.lengths_N)

    def places(self, answers: Sequence[int]) -> Tensor:
        """Where the tokens of these answers stand, in their order."""
        ends_N = self.lengths_N.cumsum(0).tolist()
        starts_N = [0, *ends_N[:-1]]
        spans = [torch.arange(starts_N[answer], ends_N[answer]) for answer in answers]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)

    @property
    def ends_N(self) -> Tensor:
        """The place of each answer's last token."""
        return self.lengths_N.cumsum(0) - 1


def trainable(batch: TrainBatch) -> tuple[Trajectory, ...]:
    """The trajectories that can be trained on: scored, and with at least one token."""
    return tuple(t for t in batch.trajectories if t.reward is not None and t.num_tokens)


def sound(trajectories: Sequence[Trajectory], *, is_telling: bool = True) -> tuple[Trajectory, ...]:
    """The trajectories without those whose numbers would spoil the whole update.

    Whoever made such numbers has a fault, so they are told of, with the answers' names.
    """
    faults = {t.key: fault for t in trajectories if (fault := _fault(t)) is not None}
    if faults and is_telling:
        named = [
            f"prompt {prompt}, sample {sample}: {fault}"
            for (prompt, sample), fault in list(faults.items())[:_NAMED]
        ]
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        _LOG.warning(
            "%d of %d answers are left out of the update (%s%s)",
            len(faults),
            len(trajectories),
            "; ".join(named),
            more,
        )
    return tuple(t for t in trajectories if t.key not in faults)


def _fault(trajectory: Trajectory) -> str | None:
    """What makes an answer unfit to be trained on, or `None`."""
    reward = _reward(trajectory)
    if not abs(reward) <= LARGEST_REWARD:
        return f"its reward must lie within +-{LARGEST_REWARD:g}, got {reward}"
    place = impossible_logprob(trajectory.logprobs)
    if place is not None:
        return (
            f"the log-probability of its token {place} must be finite and at most 0, got "
            f"{trajectory.logprobs[place]}"
        )
    return None


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, "only scored answers are trained on"
    return trajectory.reward


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


def mini_batches(count: int, *, parts: int, epochs: int, seed: int) -> Iterator[Sequence[int]]:
    """The answers of each optimiser step: all of them, or parts in an order by the seed.

    >>> list(mini_batches(5, parts=1, epochs=1, seed=0))
    [range(0, 5)]
    """
    for epoch in range(epochs):
        if parts == 1:
            yield range(count)
            continue
        order = sorted(range(count), key=lambda answer: mix(seed, epoch, answer))
        bounds = [count * part // parts for part in range(parts + 1)]
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
