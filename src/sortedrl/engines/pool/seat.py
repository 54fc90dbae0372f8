"""What one member was handed, and the count of its tokens.

A trajectory that was handed to the member leaves the seat once: finished, given back, not taken,
or taken away because the member is gone.

    counted    tokens that the pool has told of
    reported   tokens that the steps of the member told of
    returned   tokens that were written into the trajectories that came back

When the seat is emptied, `counted` and `returned` are made equal: so what was written after the
last step is told of, and what a dead member lost stays part of what was decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import monotonic

from sortedrl.engines.pool.member import Member, Work
from sortedrl.engines.pool.thread import Command, Inbox, MemberThread, Submit
from sortedrl.types import Key, Step, Trajectory


class Seat:
    """The pool's side of one member."""

    def __init__(self, member: Member, *, number: int, title: str, inbox: Inbox) -> None:
        """A living member with nothing to do; messages call it by its title."""
        self.member = member
        self.title = title
        self.number = number
        self.slots = member.slots
        self.handed: dict[Key, Work] = {}
        self._taken: list[Work] = []
        self.thread = MemberThread(member, seat=number, inbox=inbox)
        self.is_alive = True
        self.is_hung = False
        self.is_stalled = False
        self._unanswered = 0
        self._heard = monotonic()
        self._counted = self._reported = self._returned = 0

    @property
    def load(self) -> float:
        """The share of its slots that is taken."""
        return len(self.handed) / self.slots

    @property
    def is_settled(self) -> bool:
        """Whether it has answered everything it was asked."""
        return not self._unanswered

    @property
    def heard(self) -> float | None:
        """When it last said something; `None` while it has nothing to say."""
        is_expected = self._unanswered or (self.handed and not self.is_stalled)
        return self._heard if self.is_alive and is_expected else None

    def ask(self, command: Command) -> None:
        """Have the member do something; it will answer."""
        self._expect()
        self._unanswered += 1
        self.is_stalled = False
        self.thread.send(command)

    def take(self, work: Work) -> None:
        """Keep a slot for this work; `hand_over` sends it on its way."""
        self._expect()
        self.handed[work.key] = work
        self._taken.append(work)

    def hand_over(self) -> None:
        """Have the member write what was taken."""
        if self._taken:
            self.ask(Submit(tuple(self._taken)))
            self._taken.clear()

    def hears(self, seconds: float, *, is_answer: bool) -> None:
        """The member said something at that time."""
        self._heard = max(self._heard, seconds)
        self._unanswered -= is_answer

    def stepped(self, step: Step) -> int:
        """Take in a step; gives the tokens to be counted for it."""
        for trajectory in step.finished:
            self._come_back(trajectory)
        self._reported += step.decoded_tokens
        return self._count(self._reported)

    def put_down(self, works: Iterable[Work]) -> None:
        """The member did not take these."""
        for work in works:
            del self.handed[work.key]

    def give_back(self, trajectories: Iterable[Trajectory]) -> list[Work]:
        """Take in what the member gave back; gives it as work."""
        return [self._unfinished(trajectory) for trajectory in trajectories]

    def take_away(self, rescued: Iterable[Trajectory]) -> tuple[list[Work], int]:
        """Empty the seat, whatever the member says; gives its work, and the tokens to be counted.

        What is not among the rescued is taken as it was submitted.
        """
        order = {key: place for place, key in enumerate(self.handed)}
        # A dead member may speak of more than it has.
        works = [self._unfinished(t) for t in rescued if t.key in self.handed]
        works += self.handed.values()
        works.sort(key=lambda work: order[work.key])
        self.handed.clear()
        lost = max(0, self._counted - self._returned)
        self._returned += lost
        return _spread(works, lost), self._count(self._returned)

    def _unfinished(self, trajectory: Trajectory) -> Work:
        work = self._come_back(trajectory)
        return replace(work, trajectory=replace(trajectory, finish_reason=None))

    def _expect(self) -> None:
        """From now on it has something to say, if it had not before."""
        if self.heard is None:
            self._heard = monotonic()

    def _come_back(self, trajectory: Trajectory) -> Work:
        assert trajectory.key in self.handed, f"{trajectory.key} came back but was not handed out"
        work = self.handed.pop(trajectory.key)
        self._returned += trajectory.decoded_tokens - work.trajectory.decoded_tokens
        return work

    def _count(self, tokens: int) -> int:
        """Count so many tokens in all; gives how many of them are new."""
        new = max(0, tokens - self._counted)
        self._counted += new
        return new


def _spread(works: Sequence[Work], tokens: int) -> list[Work]:
    """Work whose answers lost so many decoded tokens together; which of them did is not known."""
    if not works:
        return []
    each, more = divmod(tokens, len(works))
    return [
        replace(work, trajectory=_decoded_in_vain(work.trajectory, each + (place < more)))
        for place, work in enumerate(works)
    ]


def _decoded_in_vain(trajectory: Trajectory, tokens: int) -> Trajectory:
    return replace(trajectory, decoded_tokens=trajectory.decoded_tokens + tokens)
