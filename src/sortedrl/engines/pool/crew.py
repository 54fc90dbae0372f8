"""All members of a pool: what they report, how they die, and what comes back from them.

What comes back unfinished goes to the front of the queue, what is complete waits for the next
step. So a trajectory that was handed out is in one seat, in the queue, or complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic

from sortedrl.engines.pool.member import Member, Work
from sortedrl.engines.pool.seat import Seat
from sortedrl.engines.pool.thread import (
    Close,
    Closed,
    Command,
    Failed,
    Inbox,
    Lost,
    Obeyed,
    Report,
    Stepped,
)
from sortedrl.errors import EngineLost
from sortedrl.types import Key, Step, Trajectory


class Crew:
    """The seats, and what came from them. Used by one thread."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        names: Sequence[str],
        warn: Callable[[str], None],
        patience_seconds: float,
    ) -> None:
        """Start a thread for each member."""
        self._warn = warn
        self._patience = patience_seconds
        self._inbox: Inbox = SimpleQueue()
        self.seats: list[Seat] = []
        for member, name in zip(members, names, strict=True):
            self.add(member, name=name, num_members=len(members))
        self.queue: deque[Work] = deque()
        self._finished: list[Trajectory] = []
        self._decoded = self._prefilled = 0
        self._errors: deque[BaseException] = deque()

    def add(self, member: Member, *, name: str, num_members: int | None = None) -> None:
        """Start a thread for one more member; by default it is the last of them."""
        number = len(self.seats)
        count = number + 1 if num_members is None else num_members
        title = f"engine {number + 1} of {count} ({name})"
        self.seats.append(Seat(member, number=number, title=title, inbox=self._inbox))

    @property
    def living(self) -> list[Seat]:
        """The seats of the members that live."""
        return [seat for seat in self.seats if seat.is_alive]

    @property
    def slots(self) -> int:
        """Slots of all members that live."""
        return sum(seat.slots for seat in self.living)

    @property
    def has_news(self) -> bool:
        """Whether tokens were written or answers completed since the last step."""
        return bool(self._finished or self._decoded)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be written."""
        return not self.queue and not any(seat.handed for seat in self.living)

    @property
    def keys(self) -> set[Key]:
        """The trajectories that were submitted and not handed out since."""
        keys = {work.key for work in self.queue} | {answer.key for answer in self._finished}
        return keys.union(*(seat.handed for seat in self.living))

    def require_living(self) -> None:
        """Refuse to go on without a member."""
        if not self.living:
            raise EngineLost(
                f"no engine is left, all {len(self.seats)} are lost; interrupt() gives back what "
                "they were writing"
            )

    def ask_all(self, command: Command) -> None:
        """Have every living member do something, and wait until all have answered."""
        for seat in self.living:
            seat.ask(command)
        while not all(seat.is_settled for seat in self.living):
            self.hear(is_waiting=True)

    def raise_error(self) -> None:
        """Raise what a member raised, if any did."""
        if self._errors:
            raise self._errors.popleft()

    def take_step(self) -> Step:
        """What was done since the last step."""
        step = Step(
            finished=tuple(self._finished),
            decoded_tokens=self._decoded,
            prefilled_tokens=self._prefilled,
        )
        self._finished.clear()
        self._decoded = self._prefilled = 0
        return step

    def take_all(self) -> list[Trajectory]:
        """Everything that was not handed out, as unfinished; the members were interrupted."""
        for seat in self.living:
            self._empty(seat, ())
        complete = [replace(answer, finish_reason=None) for answer in self._finished]
        unfinished = [work.trajectory for work in self.queue]
        self._finished.clear()
        self.queue.clear()
        return [*complete, *unfinished]

    def hear(self, *, is_waiting: bool) -> None:
        """Take in all reports, after waiting for the first; who is silent too long is lost."""
        with suppress(Empty):
            if is_waiting:
                since = min(seat.heard for seat in self.living if seat.heard is not None)
                patience = since + self._patience - monotonic()
                self._take_in(self._inbox.get(timeout=max(0.0, patience)))
            while True:
                self._take_in(self._inbox.get_nowait())
        for seat in self.living:
            if seat.heard is not None and monotonic() - seat.heard >= self._patience:
                seat.is_hung = True
                reason = f"it has not answered for {self._patience:g} s"
                if seat.thread.error is not None:
                    reason = f"{seat.thread.error}, and then {reason}"
                self._bury(seat, None, reason=reason)

    def close(self) -> None:
        """Close all members; raises what the first of them raised instead."""
        for seat in self.living:
            seat.thread.send(Close())
        until = monotonic() + self._patience
        for seat in self.seats:
            seconds = 0.0 if seat.is_hung else until - monotonic()
            if not seat.thread.has_ended(seconds=seconds):
                self._warn(f"{seat.title} hangs, and is left behind without being closed")
        with suppress(Empty):
            while True:
                report = self._inbox.get_nowait()
                if isinstance(report.words, Closed):
                    self._take_in(report)
        self.raise_error()

    def _take_in(self, report: Report) -> None:
        seat, words = self.seats[report.seat], report.words
        if isinstance(words, Closed):
            self._take_in_close(seat, words.error)
            return
        # One that hung and came back speaks of work that others do now.
        if not seat.is_alive:
            return
        is_step = isinstance(words, Stepped) or (isinstance(words, Failed) and not words.is_command)
        seat.hears(report.seconds, is_answer=not is_step)
        match words:
            case Stepped(step):
                self._decoded += seat.stepped(step)
                self._prefilled += step.prefilled_tokens
                self._finished += step.finished
            case Obeyed(given_back):
                self._put_in_front(seat.give_back(given_back))
            case Failed():
                seat.is_stalled = True
                seat.put_down(words.not_taken)
                self._put_in_front(words.not_taken)
                self._errors.append(words.error)
            case Lost(error, rescued):
                self._bury(seat, rescued, reason=str(error))

    def _take_in_close(self, seat: Seat, error: BaseException | None) -> None:
        if error is not None and seat.is_alive:
            self._errors.append(error)
        elif error is not None:
            self._warn(f"{seat.title} is lost, and could not be closed either: {error}")

    def _bury(self, seat: Seat, rescued: Sequence[Trajectory] | None, *, reason: str) -> None:
        """Give the work of a dead member to the others."""
        num_answers = len(seat.handed)
        self._empty(seat, rescued or ())
        seat.is_alive = False
        seat.thread.give_up()
        answers = "1 answer goes on" if num_answers == 1 else f"{num_answers} answers go on"
        tokens = "they had" if rescued is not None else "they had when it got them"
        self._warn(
            f"{seat.title} is lost: {reason}; its {answers} elsewhere with the tokens {tokens}, "
            f"{self.slots} slots are left"
        )

    def _empty(self, seat: Seat, rescued: Iterable[Trajectory]) -> None:
        works, tokens = seat.take_away(rescued)
        self._put_in_front(works)
        self._decoded += tokens

    def _put_in_front(self, works: Iterable[Work]) -> None:
        """Queue what came back before all other work."""
        self.queue.extendleft(reversed(list(works)))
