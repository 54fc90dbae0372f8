"""A pool of engines that is an engine itself: it continues while one of its members lives.

    submit -> queue -> members -> their threads -> reports -> step, interrupt

Every trajectory that was submitted comes back once: it is with one member, in the queue, or
complete. What a member gives back unfinished goes to the front of the queue. Only the caller's
thread moves trajectories; the threads of the members only report.

A trajectory is placed with the member that holds its prefix, else with the least loaded one. A
prefix is held until the weights change, which makes all cached keys and values worthless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Self

from sortedrl.config.checks import require
from sortedrl.engines.pool.members import (
    Close,
    Closed,
    Command,
    Failed,
    GoOn,
    Inbox,
    Interrupt,
    LoadWeights,
    Lost,
    Member,
    Obeyed,
    Report,
    Seat,
    Stepped,
    Terms,
    Work,
)
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, EngineLost, RequestError
from sortedrl.types import Key, Step, Trajectory, Weights


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


class EnginePool:
    """Several engines as one, each driven by a thread of its own.

    The pool owns its members: from now on nobody else calls them, and `close` closes them.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        warn: Callable[[str], None],
        names: Sequence[str] | None = None,
        patience_seconds: float = 300.0,
        spare: int = 0,
    ) -> None:
        """A member that has work and says nothing for `patience_seconds` counts as lost.

        `names` are for messages, by default what the members call themselves. `spare`
        trajectories more than it has slots are handed to a member, so that a free slot is filled
        before the pool hears of it.
        """
        names = [member.name for member in members] if names is None else names
        _refuse_impossible(members, names, patience_seconds=patience_seconds, spare=spare)
        self.name = f"pool of {', '.join(names)}"
        self.version = members[0].version
        self._crew = Crew(members, names=names, warn=warn, patience_seconds=patience_seconds)
        self._placement = Placement(spare=spare)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """Answers that the living members write at the same time."""
        return self._crew.slots

    def check(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
        max_tokens: int | None,
    ) -> None:
        """Raise the `RequestError` of any living member: each may have to write them."""
        for seat in self._crew.living:
            # One that knows it is lost says so to its thread as well.
            with suppress(EngineLost):
                seat.member.check(
                    trajectories, tolerance=tolerance, sampling=sampling, max_tokens=max_tokens
                )

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work in order of priority; all of it or, if one is impossible, none."""
        self._take_on(trajectories, Terms(tolerance=tolerance))

    def submit_with(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        """The same with other sampling and another limit."""
        terms = Terms(tolerance=tolerance, sampling=sampling, max_tokens=max_tokens)
        self._take_on(trajectories, terms)

    def step(self) -> Step:
        """Wait until some member has written a token or completed an answer."""
        self._require_open()
        crew = self._crew
        for seat in crew.living:
            if seat.is_stalled:
                seat.ask(GoOn())
        crew.hear(is_waiting=False)
        while True:
            self._hand_out()
            crew.raise_error()
            if crew.has_news or crew.is_idle:
                return crew.take_step()
            crew.require_living()
            crew.hear(is_waiting=True)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop all members, and give back every unfinished trajectory, in the order of the keys.

        It does so even if no member is left. An answer that was completed since the last step
        comes back as unfinished too: submitted again, it is complete at once.
        """
        self._require_open()
        self._crew.ask_all(Interrupt())
        self._crew.raise_error()
        return sorted(self._crew.take_all(), key=lambda trajectory: trajectory.key)

    def load_weights(self, weights: Weights) -> None:
        """Have all members write with these weights from now on; they load them side by side."""
        self._require_open()
        crew = self._crew
        crew.require_living()
        # No member keeps a beginning that other weights have read.
        self._placement.forget()
        crew.ask_all(LoadWeights(weights))
        crew.raise_error()
        crew.require_living()
        for seat in crew.living:
            if seat.member.version != weights.version:
                raise EngineError(
                    f"{seat.title} must have the weights of version {weights.version} that it was "
                    f"given, but says it has version {seat.member.version}"
                )
        self.version = weights.version

    def add(self, member: Member, *, name: str | None = None) -> None:
        """Have one more member from now on; its weights must be of the present version."""
        self._require_open()
        name = member.name if name is None else name
        require(
            all(seat.member is not member for seat in self._crew.seats),
            f"each engine must be in a pool once, got {name} again; make a new one",
        )
        require(member.slots >= 1, f"{name} must have at least 1 slot, got {member.slots}")
        require(
            member.version == self.version,
            f"{name} must have the weights of version {self.version}, as the pool, got version "
            f"{member.version}; load them first",
        )
        self._crew.add(member, name=name)
        self.name = f"{self.name}, {name}"

    def close(self) -> None:
        """Close all members and end their threads; what they were writing is given up."""
        if not self._is_closed:
            self._is_closed = True
            self._crew.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the pool is closed; make a new one")

    def _take_on(self, trajectories: Sequence[Trajectory], terms: Terms) -> None:
        self._require_open()
        self._crew.require_living()
        self._refuse_doubled(trajectories)
        self.check(
            trajectories,
            tolerance=terms.tolerance,
            sampling=terms.sampling,
            max_tokens=terms.max_tokens,
        )
        self._crew.queue.extend(Work(trajectory, terms) for trajectory in trajectories)
        self._crew.hear(is_waiting=False)
        self._hand_out()

    def _refuse_doubled(self, trajectories: Sequence[Trajectory]) -> None:
        keys = self._crew.keys
        for trajectory in trajectories:
            if trajectory.key in keys:
                raise RequestError(
                    f"trajectory {trajectory.key} must be submitted once until it comes back, "
                    "but it is in the pool already"
                )
            keys.add(trajectory.key)

    def _hand_out(self) -> None:
        """Give queued work to free slots, first come, first served."""
        queue, living = self._crew.queue, self._crew.living
        while queue and (seat := self._placement.place(queue[0], living)):
            seat.take(queue.popleft())
        for seat in living:
            seat.hand_over()


def _refuse_impossible(
    members: Sequence[Member], names: Sequence[str], *, patience_seconds: float, spare: int
) -> None:
    require(len(members) >= 1, "a pool must have at least 1 engine, got none")
    require(
        len({id(member) for member in members}) == len(members),
        "each engine must be in a pool once; give each member an engine of its own",
    )
    require(
        len(names) == len(members),
        f"a pool of {len(members)} engines must have as many names, got {len(names)}",
    )
    slots = [member.slots for member in members]
    require(min(slots) >= 1, f"each engine of a pool must have at least 1 slot, got {slots}")
    versions = sorted({member.version for member in members})
    require(
        len(versions) == 1,
        f"the engines of a pool must have weights of one version, got {versions}; load the same "
        "weights into all of them first",
    )
    require(patience_seconds > 0, f"patience_seconds must be above 0, got {patience_seconds}")
    require(spare >= 0, f"spare must be 0 or more, got {spare}")
