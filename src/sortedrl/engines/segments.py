"""The segments of an answer that grows."""

from __future__ import annotations

from sortedrl.types import Segment


def joined(segments: tuple[Segment, ...], last: Segment) -> tuple[Segment, ...]:
    """One segment per run of tokens of the same version.

    >>> one = Segment((7,), (-0.5,), 3)
    >>> joined((one,), Segment((8,), (-0.25,), 3))
    (Segment(tokens=(7, 8), logprobs=(-0.5, -0.25), version=3),)
    """
    if not segments or segments[-1].version != last.version:
        return (*segments, last)
    tokens = (*segments[-1].tokens, *last.tokens)
    logprobs = (*segments[-1].logprobs, *last.logprobs)
    return (*segments[:-1], Segment(tokens, logprobs, last.version))
