"""The answers of one update as flat tensors, in mini-batches and micro-batches.

A mini-batch is the answers of one optimiser step. A micro-batch is the answers of one forward and
backward pass, packed: sequences laid end to end in a row of at most `micro_batch_tokens` tokens.
Only answer tokens have an entry, answer after answer, so there is no padding and nothing to mask.
Every sequence is in exactly one pack, and the same lengths always give the same packs; a sequence
longer than the budget has a pack of its own, so nothing is cut or left out.

Several ranks may make an update together. Each knows all answers and processes a share of them,
and all have the same number of micro-batches: a rank with fewer adds empty ones.

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
    """A prompt and an answer to it, whose tokens are to be scored.

    In a conversation, `answer` also has the replies of the environment, which are not scored.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    loss_mask: Sequence[int] | None = None
    """For each token of `answer`, 1 if it is scored; `None`: all of them are."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> TokenSequence:
        """The sequence of a trajectory, in which the tokens of the policy are scored."""
        mask = trajectory.loss_mask if trajectory.num_given else None
        return cls(trajectory.prompt.tokens, trajectory.response, mask)

    @property
    def scored_places(self) -> Sequence[int]:
        """The places of scored tokens in `answer`."""
        if self.loss_mask is None:
            return range(len(self.answer))
        return [place for place, is_scored in enumerate(self.loss_mask) if is_scored]

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
    """The inputs of advantages and losses, besides log-probabilities."""

    lengths_N: Tensor
    """Tokens of each answer; at least 1."""
    rewards_N: Tensor
    """Rewards, float64."""
    prompts_N: Tensor
    """The prompt that each answer belongs to."""
    is_truncated_N: Tensor
    """Whether each answer was cut off at the token limit."""
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
            is_truncated_N=torch.tensor([t.finish_reason == "length" for t in trajectories]),
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

    def token_indices(self, answers: Sequence[int]) -> Tensor:
        """The positions of these answers' tokens on the axis T, in the order of the answers."""
        ends_N = self.lengths_N.cumsum(0).tolist()
        starts_N = [0, *ends_N[:-1]]
        spans = [torch.arange(starts_N[answer], ends_N[answer]) for answer in answers]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)

    @property
    def ends_N(self) -> Tensor:
        """The position of each answer's last token."""
        return self.lengths_N.cumsum(0) - 1


def trainable(batch: TrainBatch) -> tuple[Trajectory, ...]:
    """The trajectories that can be trained on: scored, and with at least one token."""
    return tuple(t for t in batch.trajectories if t.reward is not None and t.num_tokens)


def usable(trajectories: Sequence[Trajectory], *, is_logged: bool = True) -> tuple[Trajectory, ...]:
    """The trajectories without those whose reward or log-probabilities are not valid numbers.

    One of them would make the whole update NaN; they are logged, with the answers' names.
    """
    faults = {t.key: fault for t in trajectories if (fault := _fault(t)) is not None}
    if faults and is_logged:
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
    """The reason why an answer cannot be trained on, or `None`."""
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


# Read in an empty micro-batch; every vocabulary has this token.
_EMPTY = TokenSequence((0,), (0,))


class RankGroup(Protocol):
    """The processes that make an update together; collective calls are made by all of them."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    def shares(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each rank, which of the sequences of these sizes it processes."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""

    def all_gather(self, values_T: Tensor) -> Tensor:
        """The values of all ranks, one after the other; ranks may have different numbers."""


class SingleRank:
    """A group of one process."""

    rank = 0

    def shares(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Everything."""
        return [range(len(sizes))]

    def all_reduce(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def all_gather(self, values_T: Tensor) -> Tensor:
        """The values themselves."""
        return values_T


SINGLE_RANK = SingleRank()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Answers that go through the model together, and the positions of their tokens."""

    answers: Sequence[int]
    """Empty where this rank has none left and others have."""
    token_indices: Tensor

    def read(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """What the model reads; of its output, the first `len(token_indices)` entries count.

        An empty micro-batch still reads a token, so that this rank takes part in the collective
        operations; none of the output counts, and its gradients are 0.
        """
        return [sequences[answer] for answer in self.answers] or [_EMPTY]


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The micro-batches of this rank over some answers, each answer whole in one of them."""

    parts: Sequence[MicroBatch]
    fill: float
    """The share of the token budget that they use, over all ranks."""


def micro_batches(
    chosen: Sequence[int],
    answers: Answers,
    sequences: Sequence[TokenSequence],
    *,
    micro_batch_tokens: int,
    ranks: RankGroup = SINGLE_RANK,
) -> MicroBatches:
    """Few micro-batches over this rank's share of the chosen answers.

    Every rank computes the packs of all ranks, and so the number of micro-batches, on its own.
    """
    sizes = [sequences[answer].num_rows for answer in chosen]
    shares = ranks.shares(sizes)
    found = [
        packs([sizes[index] for index in share], budget=micro_batch_tokens) for share in shares
    ]
    most = max(len(packed) for packed in found)
    filled = [[*packed, *[Pack((), 0)] * (most - len(packed))] for packed in found]
    own = shares[ranks.rank]
    members = [[chosen[own[index]] for index in pack.indices] for pack in filled[ranks.rank]]
    return MicroBatches(
        [MicroBatch(own_answers, answers.token_indices(own_answers)) for own_answers in members],
        fill([pack for packed in filled for pack in packed], budget=micro_batch_tokens),
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


def in_micro_batches(
    answers: Answers,
    sequences: Sequence[TokenSequence],
    compute: Callable[[Sequence[TokenSequence]], Tensor],
    *,
    micro_batch_tokens: int,
    ranks: RankGroup = SINGLE_RANK,
) -> Tensor:
    """The results of `compute` for the tokens of every answer, without gradients."""
    outputs, indices = [], []
    everything = micro_batches(
        range(len(answers)),
        answers,
        sequences,
        micro_batch_tokens=micro_batch_tokens,
        ranks=ranks,
    )
    with torch.no_grad():
        for part in everything.parts:
            outputs.append(compute(part.read(sequences))[: len(part.token_indices)])
            indices.append(part.token_indices)
    own_T = torch.cat(outputs)
    result_T = own_T.new_zeros(answers.num_tokens)
    result_T[torch.cat(indices).to(own_T.device)] = own_T
    return ranks.all_reduce(result_T)
