"""One member of an engine pool: its protocol, its work, and the thread that drives it.

Work that was assigned to a member leaves it once: finished, given back, refused, or taken away
because the member is lost. Tokens are counted three times:

    counted    tokens that the pool has reported
    reported   tokens that the steps of the member reported
    returned   tokens in the trajectories that came back

When all work has left, `counted` and `returned` are made equal: so what was written after the last
step is reported, and what a dead member lost stays part of what was decoded.

The thread is the only one that uses the member. It obeys commands in order, and steps the member
whenever it has work and no command waits. Every step and every command is followed by exactly one
report in the inbox of the pool. After `Lost` it only closes the member.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol

from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineLost
from sortedrl.types import Key, Step, Trajectory, Weights


class Member(RolloutEngine, Protocol):
    """An engine that can be in a pool.

    All calls come from one thread, and that is not the one that made the engine. Only `name`,
    `slots`, `version` and `check` are asked from another thread too, while the engine may be at
    work.
    """

    def check(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
        max_tokens: int | None,
    ) -> None:
        """Raise the `RequestError` that submitting these would raise; nothing is taken on.

        With `sampling` and `max_tokens` it is `submit_with` that is meant, without them `submit`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How trajectories were submitted; `None` for the engine's own rules."""

    tolerance: float | None
    sampling: Sampling | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A trajectory to be written, on the terms it was submitted with."""

    trajectory: Trajectory
    terms: Terms

    @property
    def key(self) -> Key:
        """The name of its trajectory."""
        return self.trajectory.key


def submit_to(member: Member, trajectories: Sequence[Trajectory], terms: Terms) -> None:
    """Submit to a member on these terms."""
    if terms.sampling is None or terms.max_tokens is None:
        member.submit(trajectories, tolerance=terms.tolerance)
    else:
        member.submit_with(
            trajectories,
            tolerance=terms.tolerance,
            sampling=terms.sampling,
            max_tokens=terms.max_tokens,
        )


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


@dataclass(frozen=True, slots=True)
class Submit:
    """Take on this work, in order."""

    works: Sequence[Work]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop, and give back what is unfinished."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Write with these weights from now on."""

    weights: Weights


@dataclass(frozen=True, slots=True)
class GoOn:
    """Step again, although the last call failed."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the member; the thread ends."""


Command = Submit | Interrupt | LoadWeights | GoOn


@dataclass(frozen=True, slots=True)
class Stepped:
    """The member made a step."""

    step: Step


@dataclass(frozen=True, slots=True)
class Obeyed:
    """A command was carried out; an interrupt gave this back."""

    given_back: Sequence[Trajectory] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A call raised, but not `EngineLost`: the thread waits for the next command."""

    error: BaseException
    is_command: bool
    not_taken: Sequence[Work]
    """What a failed submission left."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The member is gone; what it still gave back, or `None` if it could not."""

    error: EngineLost
    rescued: Sequence[Trajectory] | None


@dataclass(frozen=True, slots=True)
class Closed:
    """The member is closed, or what it raised instead."""

    error: BaseException | None


Words = Stepped | Obeyed | Failed | Lost | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the thread of a member has to say, and when it said it."""

    seat: int
    seconds: float
    words: Words


Inbox = SimpleQueue[Report]


class MemberThread:
    """Drives one member from its start to its close."""

    def __init__(self, member: Member, *, seat: int, inbox: Inbox) -> None:
        """The thread runs from now on, with nothing to do."""
        self.error: EngineLost | None = None
        """Known from the moment the member is lost; what it was writing may be rescued later."""
        self._member = member
        self._seat = seat
        self._inbox = inbox
        self._commands: SimpleQueue[Command | Close] = SimpleQueue()
        self._num_unfinished = 0
        self._not_taken: Sequence[Work] = ()
        self._is_stalled = False
        self._is_over = False
        # A member that hangs for ever must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"engine {seat + 1}", daemon=True)
        self._thread.start()

    def send(self, command: Command | Close) -> None:
        """Have the member do something after what it is doing now."""
        self._commands.put(command)

    def give_up(self) -> None:
        """Have the member do nothing more but close, as soon as it comes back."""
        self._is_over = True
        self.send(Close())

    def has_ended(self, *, seconds: float) -> bool:
        """Whether the thread is over, after waiting for so long at most."""
        self._thread.join(timeout=max(0.0, seconds))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self._has_turned():
            pass
        try:
            self._member.close()
        except BaseException as error:  # noqa: BLE001  whoever closes the pool shall know
            self._say(Closed(error))
        else:
            self._say(Closed(None))

    def _has_turned(self) -> bool:
        """Do the next thing, and keep no weights while waiting for it; false at the end."""
        command = self._next()
        if isinstance(command, Close):
            return False
        if not self._is_over:
            self._say(self._attempt(command))
        return True

    def _next(self) -> Command | Close | None:
        """The next command, or `None` to step."""
        is_busy = self._num_unfinished > 0 and not (self._is_stalled or self._is_over)
        try:
            return self._commands.get(block=not is_busy)
        except Empty:
            return None

    def _attempt(self, command: Command | None) -> Words:
        self._not_taken = ()
        self._is_stalled = False
        try:
            return self._step() if command is None else self._obey(command)
        except EngineLost as error:
            self._is_over = True
            self.error = error
            return Lost(error, self._rescued())
        except BaseException as error:  # noqa: BLE001  the pool raises it in the caller's thread
            self._is_stalled = True
            return Failed(
                error=error, is_command=command is not None, not_taken=tuple(self._not_taken)
            )

    def _step(self) -> Stepped:
        step = self._member.step()
        self._num_unfinished -= len(step.finished)
        return Stepped(step)

    def _obey(self, command: Command) -> Obeyed:
        match command:
            case Submit(works):
                self._submit(works)
            case Interrupt():
                given_back = self._member.interrupt()
                self._num_unfinished = 0
                return Obeyed(given_back)
            case LoadWeights(weights):
                self._member.load_weights(weights)
        return Obeyed()

    def _submit(self, works: Sequence[Work]) -> None:
        self._not_taken = works
        for terms, batch in groupby(works, key=lambda work: work.terms):
            trajectories = [work.trajectory for work in batch]
            submit_to(self._member, trajectories, terms)
            self._num_unfinished += len(trajectories)
            self._not_taken = self._not_taken[len(trajectories) :]

    def _rescued(self) -> Sequence[Trajectory] | None:
        try:
            return self._member.interrupt()
        except Exception:  # noqa: BLE001  it is lost, whatever it says: its work is known
            return None

    def _say(self, words: Words) -> None:
        self._inbox.put(Report(seat=self._seat, seconds=monotonic(), words=words))
