"""Answers laid side by side. All answers have the same length, so shares need no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from sortedrl.types import Segment, Trajectory

ANSWER_TOKENS = 64


def same_answers(ones: Sequence[Trajectory], others: Sequence[Trajectory]) -> int:
    """How many answers are equal, token for token."""
    return sum(one.tokens == other.tokens for one, other in zip(ones, others, strict=True))


def common_beginning(ones: Sequence[Trajectory], others: Sequence[Trajectory]) -> float:
    """The share of the tokens before the first that differs."""
    both = [zip(a.tokens, b.tokens, strict=True) for a, b in zip(ones, others, strict=True)]
    return token_share([sum(1 for _ in takewhile(lambda p: p[0] == p[1], one)) for one in both])


def token_share(counts: Sequence[int]) -> float:
    """The share of all tokens, from a count of tokens per answer."""
    return sum(counts) / (ANSWER_TOKENS * len(counts))


def logprob_difference(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The largest difference, in nats."""
    return max(
        abs(a - b)
        for one, other in zip(ones, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def cut(trajectory: Trajectory, count: int) -> Trajectory:
    """The trajectory with the first `count` tokens of its answer."""
    segment = Segment(tuple(trajectory.tokens[:count]), tuple(trajectory.logprobs[:count]), 0)
    return replace(trajectory, segments=(segment,) if count else ())
