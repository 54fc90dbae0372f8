"""Shares: sequences split over processes so that all have about the same number of tokens.

Every sequence is in exactly one share, and the same sizes always give the same shares. Two shares
differ by at most the longest sequence. Each process finds the shares of all by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from sortedrl.config import require


def balanced(sizes: Sequence[int], *, parts: int) -> tuple[tuple[int, ...], ...]:
    """The sequences of each part, in order: the longest first, each where there is least so far.

    >>> balanced([5, 9, 4, 5], parts=2)
    ((1, 2), (0, 3))
    """
    require(parts >= 1, f"sequences must be split into at least 1 part, got {parts}")
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    heapify(loads)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, part = loads[0]
        heapreplace(loads, (load + sizes[index], part))
        members[part].append(index)
    return tuple(tuple(sorted(part)) for part in members)
