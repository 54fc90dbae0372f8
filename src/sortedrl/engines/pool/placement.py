"""Which member takes a trajectory: the one that holds its beginning, else the emptiest.

A beginning is held from the placing of a trajectory until the weights change: then every cached
key and value is worth nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.engines.pool.member import Work
from sortedrl.engines.pool.seat import Seat
from sortedrl.types import Key


class Placement:
    """Remembers who was given what."""

    def __init__(self, *, spare: int) -> None:
        """Members may be given `spare` trajectories more than they have slots."""
        self._spare = spare
        self._seat_of_answer: dict[Key, Seat] = {}
        self._seat_of_prompt: dict[int, Seat] = {}

    def place(self, work: Work, seats: Sequence[Seat]) -> Seat | None:
        """The seat that takes the work, or `None` if all are full."""
        seat = self._holder(work, seats) or self._emptiest(seats)
        if seat is not None:
            self._seat_of_answer[work.key] = self._seat_of_prompt[work.key[0]] = seat
        return seat

    def forget(self) -> None:
        """The weights have changed: nobody holds anything."""
        self._seat_of_answer.clear()
        self._seat_of_prompt.clear()

    def _holder(self, work: Work, seats: Sequence[Seat]) -> Seat | None:
        """The member that holds most of the beginning, if it lives and has a free slot."""
        own = self._seat_of_answer.get(work.key) if work.trajectory.segments else None
        for seat in (own, self._seat_of_prompt.get(work.key[0])):
            if seat is not None and seat in seats and len(seat.handed) < seat.slots:
                return seat
        return None

    def _emptiest(self, seats: Sequence[Seat]) -> Seat | None:
        open_seats = [seat for seat in seats if len(seat.handed) < seat.slots + self._spare]
        return min(open_seats, key=lambda seat: (seat.load, seat.number), default=None)
