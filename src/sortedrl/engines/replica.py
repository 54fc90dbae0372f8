"""One engine of a pool: the work assigned to it, and the thread that drives it.

An assignment leaves its replica once: finished, returned, refused, or reclaimed because the engine
is lost. Tokens are counted three times:

    counted    tokens that the pool has reported
    reported   tokens that the steps of the engine reported
    returned   tokens in the trajectories that came back

When no assignment is left, `counted` is made equal to `returned`, so tokens decoded after the last
step are reported, and tokens lost with an engine still count as decoded.

Only the thread uses the engine. It executes commands in order, and steps the engine whenever it has
work and no command waits. Every step and every command puts exactly one report into the inbox of
the pool. After `Lost` it only closes the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from queue import Empty, SimpleQueue
from time import monotonic

from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineLost
from sortedrl.types import Key, Step, Trajectory, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A trajectory to generate, as submitted."""

    trajectory: Trajectory
    tolerance: float | None
    sampling: Sampling | None = None

    @property
    def key(self) -> Key:
        """The key of its trajectory."""
        return self.trajectory.key


class Replica:
    """The pool's handle of one engine. Used by one thread, the caller's."""

    def __init__(self, engine: RolloutEngine, *, number: int, title: str, inbox: Inbox) -> None:
        """A live engine without work; messages use its title."""
        self.engine = engine
        self.title = title
        self.number = number
        self.slots = engine.slots
        self.assigned: dict[Key, Assignment] = {}
        self._unsent: list[Assignment] = []
        self.thread = ReplicaThread(engine, number=number, inbox=inbox)
        self.is_alive = True
        self.is_hung = False
        self.is_stalled = False
        self.is_loading = False
        """Whether it was sent weights and has not replied yet."""
        self._num_pending_replies = 0
        self._last_report = monotonic()
        self._counted = self._reported = self._returned = 0

    @property
    def load(self) -> float:
        """The share of its slots that is in use."""
        return len(self.assigned) / self.slots

    @property
    def has_replied(self) -> bool:
        """Whether it has replied to every command."""
        return not self._num_pending_replies

    @property
    def waiting_since(self) -> float | None:
        """When it last reported; `None` while no report is due."""
        is_due = self._num_pending_replies or (self.assigned and not self.is_stalled)
        return self._last_report if self.is_alive and is_due else None

    def send(self, command: Command) -> None:
        """Send a command; a reply will follow."""
        self._expect_report()
        self._num_pending_replies += 1
        self.is_stalled = False
        self.is_loading |= isinstance(command, LoadWeights)
        self.thread.send(command)

    def assign(self, assignment: Assignment) -> None:
        """Reserve a slot for this work; `flush` sends it."""
        self._expect_report()
        self.assigned[assignment.key] = assignment
        self._unsent.append(assignment)

    def flush(self) -> None:
        """Submit to the engine what was assigned since the last flush."""
        if self._unsent:
            self.send(Submit(tuple(self._unsent)))
            self._unsent.clear()

    def on_report(self, seconds: float, *, is_reply: bool) -> None:
        """Record the time of a report."""
        self._last_report = max(self._last_report, seconds)
        self._num_pending_replies -= is_reply
        self.is_loading &= not self.has_replied

    def on_step(self, step: Step) -> int:
        """Apply a step; returns the tokens to count for it."""
        for trajectory in step.finished:
            self._take(trajectory)
        self._reported += step.decoded_tokens
        return self._count(self._reported)

    def unassign(self, assignments: Iterable[Assignment]) -> None:
        """Remove work that the engine did not accept."""
        for assignment in assignments:
            del self.assigned[assignment.key]

    def take_back(self, trajectories: Iterable[Trajectory]) -> list[Assignment]:
        """Turn unfinished trajectories returned by the engine into work for any replica."""
        return [self._unfinished(trajectory) for trajectory in trajectories]

    def reclaim(self, rescued: Iterable[Trajectory]) -> tuple[list[Assignment], int]:
        """Take all work away, regardless of the engine; also returns the tokens to count.

        Work that was not rescued is returned as it was submitted.
        """
        order = {key: place for place, key in enumerate(self.assigned)}
        # A lost engine may return more than it has.
        reclaimed = [self._unfinished(t) for t in rescued if t.key in self.assigned]
        reclaimed += self.assigned.values()
        reclaimed.sort(key=lambda assignment: order[assignment.key])
        self.assigned.clear()
        lost = max(0, self._counted - self._returned)
        self._returned += lost
        return _with_lost_tokens(reclaimed, lost), self._count(self._returned)

    def _unfinished(self, trajectory: Trajectory) -> Assignment:
        return replace(self._take(trajectory), trajectory=replace(trajectory, finish_reason=None))

    def _expect_report(self) -> None:
        """Start the timeout, unless a report is due already."""
        if self.waiting_since is None:
            self._last_report = monotonic()

    def _take(self, trajectory: Trajectory) -> Assignment:
        assert trajectory.key in self.assigned, f"{trajectory.key} came back but was not assigned"
        assignment = self.assigned.pop(trajectory.key)
        self._returned += trajectory.decoded_tokens - assignment.trajectory.decoded_tokens
        return assignment

    def _count(self, tokens: int) -> int:
        """Raise the counted tokens to this total; returns how many are new."""
        new = max(0, tokens - self._counted)
        self._counted += new
        return new


def _with_lost_tokens(assignments: Sequence[Assignment], tokens: int) -> list[Assignment]:
    """Attribute lost tokens to the answers as decoded; their owners are unknown."""
    if not assignments:
        return []
    each, more = divmod(tokens, len(assignments))
    spread = []
    for place, assignment in enumerate(assignments):
        trajectory = assignment.trajectory
        decoded = trajectory.decoded_tokens + each + (place < more)
        spread.append(replace(assignment, trajectory=replace(trajectory, decoded_tokens=decoded)))
    return spread


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit this work, in order."""

    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop, and return what is unfinished."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load these weights."""

    weights: Weights


@dataclass(frozen=True, slots=True)
class Resume:
    """Step again after a failed call."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the engine and end the thread."""


Command = Submit | Interrupt | LoadWeights | Resume


@dataclass(frozen=True, slots=True)
class Stepped:
    """The engine made a step."""

    step: Step


@dataclass(frozen=True, slots=True)
class Executed:
    """A command was executed; an interrupt returned these trajectories."""

    returned: Sequence[Trajectory] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A call raised something other than `EngineLost`: the thread waits for the next command."""

    error: BaseException
    is_command: bool
    not_submitted: Sequence[Assignment]
    """Assignments left by a failed submission."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine is lost; what it returned, or `None` if it could not."""

    error: EngineLost
    rescued: Sequence[Trajectory] | None


@dataclass(frozen=True, slots=True)
class Closed:
    """The engine is closed, or raised this instead."""

    error: BaseException | None


ReplicaEvent = Stepped | Executed | Failed | Lost | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An event of one replica, with its time."""

    replica: int
    seconds: float
    event: ReplicaEvent


Inbox = SimpleQueue[Report]


class ReplicaThread:
    """Drives one engine until it is closed."""

    def __init__(self, engine: RolloutEngine, *, number: int, inbox: Inbox) -> None:
        """Start the thread."""
        self.error: EngineLost | None = None
        """Set as soon as the engine is lost; its trajectories may be rescued later."""
        self._engine = engine
        self._number = number
        self._inbox = inbox
        self._commands: SimpleQueue[Command | Close] = SimpleQueue()
        self._num_unfinished = 0
        self._not_submitted: Sequence[Assignment] = ()
        self._is_stalled = False
        self._is_over = False
        # An engine that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=f"engine {number + 1}", daemon=True)
        self._thread.start()

    def send(self, command: Command | Close) -> None:
        """Queue a command after the current call."""
        self._commands.put(command)

    def abandon(self) -> None:
        """Only close the engine, as soon as its current call returns."""
        self._is_over = True
        self.send(Close())

    def has_ended(self, *, seconds: float) -> bool:
        """Whether the thread has ended, after waiting at most this long."""
        self._thread.join(timeout=max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._has_run_next():
            pass
        try:
            self._engine.close()
        except BaseException as error:  # noqa: BLE001  raised by the pool's close
            self._report(Closed(error))
        else:
            self._report(Closed(None))

    def _has_run_next(self) -> bool:
        """Execute the next command or step; false at `Close`.

        A separate function, so that no reference to weights is kept while waiting.
        """
        command = self._next()
        if isinstance(command, Close):
            return False
        if not self._is_over:
            self._report(self._event_of(command))
        return True

    def _next(self) -> Command | Close | None:
        """The next command, or `None` to step."""
        is_busy = self._num_unfinished > 0 and not (self._is_stalled or self._is_over)
        try:
            return self._commands.get(block=not is_busy)
        except Empty:
            return None

    def _event_of(self, command: Command | None) -> ReplicaEvent:
        self._not_submitted = ()
        self._is_stalled = False
        try:
            return self._step() if command is None else self._execute(command)
        except EngineLost as error:
            self._is_over = True
            self.error = error
            return Lost(error, self._rescued())
        except BaseException as error:  # noqa: BLE001  the pool raises it in the caller's thread
            self._is_stalled = True
            return Failed(
                error=error,
                is_command=command is not None,
                not_submitted=tuple(self._not_submitted),
            )

    def _step(self) -> Stepped:
        step = self._engine.step()
        self._num_unfinished -= len(step.finished)
        return Stepped(step)

    def _execute(self, command: Command) -> Executed:
        match command:
            case Submit(assignments):
                self._submit(assignments)
            case Interrupt():
                returned = self._engine.interrupt()
                self._num_unfinished = 0
                return Executed(returned)
            case LoadWeights(weights):
                self._engine.load_weights(weights)
        return Executed()

    def _submit(self, assignments: Sequence[Assignment]) -> None:
        self._not_submitted = assignments
        for (tolerance, sampling), batch in groupby(assignments, key=_options):
            trajectories = [assignment.trajectory for assignment in batch]
            self._engine.submit(trajectories, tolerance=tolerance, sampling=sampling)
            self._num_unfinished += len(trajectories)
            self._not_submitted = self._not_submitted[len(trajectories) :]

    def _rescued(self) -> Sequence[Trajectory] | None:
        try:
            return self._engine.interrupt()
        except Exception:  # noqa: BLE001  it is lost in any case, and its work is known
            return None

    def _report(self, event: ReplicaEvent) -> None:
        self._inbox.put(Report(replica=self._number, seconds=monotonic(), event=event))


def _options(assignment: Assignment) -> tuple[float | None, Sampling | None]:
    return assignment.tolerance, assignment.sampling
