"""Who sits in which slot, and how much of the answer is written.

A started answer takes the lowest free slot, as in the lanes of the report. When none is free it
queues, and takes the next one freed.
Between two events all seated answers grow alike, so one sum serves them all: an answer keeps the
difference between its tokens and that sum, and growth costs nothing per answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from sortedrl.types import Key


class Slots:
    """The slots of one engine."""

    def __init__(self, count: int, *, decoded: Callable[[], int]) -> None:
        """All free; `decoded` gives all tokens that the engine has written so far."""
        self._free = list(range(count))
        self._offsets: list[float | None] = [None] * count
        self._seats: dict[Key, int] = {}
        self._queue: dict[Key, int] = {}
        self._decoded = decoded
        self._counted = decoded()
        self._growth = 0.0

    @property
    def running(self) -> int:
        """Answers that were started and not stopped, the queue included."""
        return len(self._seats) + len(self._queue)

    @property
    def seated(self) -> int:
        """Answers that have a slot."""
        return len(self._seats)

    def start(self, key: Key, *, cached: int) -> None:
        """An answer comes with `cached` tokens."""
        self._grow()
        self._queue[key] = cached
        self._fill()

    def stop(self, key: Key) -> None:
        """An answer leaves, complete or not; one that never came is none of ours."""
        self._grow()
        if self._queue.pop(key, None) is not None:
            return
        slot = self._seats.pop(key, None)
        if slot is not None:
            self._offsets[slot] = None
            heapq.heappush(self._free, slot)
            self._fill()

    def tokens(self) -> list[float | None]:
        """For each slot the tokens of its answer by now; `None` where it is idle."""
        self._grow()
        growth = self._growth
        return [None if offset is None else offset + growth for offset in self._offsets]

    def _grow(self) -> None:
        decoded = self._decoded()
        if self._seats:
            self._growth += (decoded - self._counted) / len(self._seats)
        self._counted = decoded

    def _fill(self) -> None:
        while self._queue and self._free:
            key = next(iter(self._queue))
            slot = heapq.heappop(self._free)
            self._seats[key] = slot
            self._offsets[slot] = self._queue.pop(key) - self._growth
