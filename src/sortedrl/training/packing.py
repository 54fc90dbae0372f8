"""Packs: sequences of any length laid end to end in rows of at most `budget` tokens.

Every sequence is in exactly one pack, and the same lengths always give the same packs. A sequence
longer than the budget has a pack of its own, so nothing is ever cut or left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.config import require


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
