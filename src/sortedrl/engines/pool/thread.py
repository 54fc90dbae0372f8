"""The thread of one member: the only one that works with it.

It obeys commands in order, and steps the member whenever it has work and no command waits.
Every step and every command is followed by exactly one report in the inbox of the pool. After
`Lost` it does nothing more but close the member.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from queue import Empty, SimpleQueue
from time import monotonic

from sortedrl.engines.pool.member import Member, Work, submit_to
from sortedrl.errors import EngineLost
from sortedrl.types import Step, Trajectory, Weights


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
