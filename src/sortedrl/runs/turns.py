"""Turns of agent programs, written by an engine: who gets a slot, and what new weights interrupt.

    submit -> waiting -> running -> done        in any order of arrival
                ^           |
                +-----------+                   new weights: the tokens are kept

The oldest session goes first, so what comes back from an agent goes before what begins; of turns of
one session first the most interrupted, then those that come back, then in the order of arrival.
New weights stop what runs and go on with it, as in partial mode: a caller notices only a longer
wait.

Invariant: a turn that was submitted is done exactly once, with an answer or with a failure; at most
`slots` turns run, and an answer is a function of tokens, sampling, seed and weights alone.

HTTP threads submit, cancel and wait; one thread runs the engine. Everything that both touch is held
under one lock.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sortedrl.config.schedule import Schedule
from sortedrl.core.clock import Clock
from sortedrl.core.controller import Partial
from sortedrl.core.events import (
    Begin,
    Finish,
    Harvest,
    Interrupt,
    Load,
    Pause,
    Record,
    Reply,
    Start,
    SyncWeights,
)
from sortedrl.core.randomness import mix
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import ModelError, RequestError, SortedRLError
from sortedrl.types import FinishReason, Key, Prompt, Trajectory, Weights

_SCHEDULE = Schedule(strategy="ungrouped", mode="partial")
"""What a log of ours calls itself: no groups, and tokens of older weights are kept."""
_MOST_SESSIONS = 65_536
_SWEEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a turn has no answer: an HTTP status and a sentence."""

    status: int
    reason: str


class Refused(SortedRLError):
    """A turn or new weights that are not taken on."""

    def __init__(self, status: int, reason: str) -> None:
        """Keep the HTTP status; the message is the reason."""
        super().__init__(reason)
        self.status = status


@dataclass(slots=True, eq=False)
class Turn:
    """One request from its arrival to its answer."""

    tokens: Sequence[int]
    sampling: Sampling
    seed: int | None = None
    session_id: str | None = None
    done: threading.Event = field(default_factory=threading.Event)
    answer: Trajectory | None = None
    failure: Failure | None = None

    def fail(self, status: int, reason: str) -> None:
        """End it without an answer."""
        self.failure = Failure(status, reason)
        self.done.set()


@dataclass(slots=True, eq=False)
class _Lane:
    """One conversation of a session in the log; turns that overlap have one each."""

    sample: int
    length: int = 0
    """Tokens of everything so far."""
    written: int = 0
    state: Literal["active", "outside", "idle"] = "idle"


@dataclass(slots=True, eq=False)
class _Session:
    """The turns that came under one name, or a single turn without any."""

    number: int
    name: str | None
    last_seen: float
    num_active: int = 0
    lanes: list[_Lane] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Active:
    """A turn that waits or runs."""

    turn: Turn
    trajectory: Trajectory
    session: _Session
    lane: _Lane
    is_returning: bool
    cached: int = 0
    """Tokens that it had when it got its slot."""
    is_cancelled: bool = False

    def __lt__(self, other: _Active) -> bool:
        """Whether it gets a slot before the other."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, bool, int]:
        interruptions = -self.trajectory.interruptions
        return (self.session.number, interruptions, not self.is_returning, self.key[0])

    @property
    def key(self) -> Key:
        """Its name in the engine."""
        return self.trajectory.key


@dataclass(slots=True, eq=False)
class _Loading:
    """New weights on their way to the engine."""

    tensors: Mapping[str, object]
    label: str | None
    done: threading.Event = field(default_factory=threading.Event)
    loaded: Loaded | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load of weights did."""

    version: str
    num_interrupted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How things stand."""

    slots: int
    running: int
    waiting: int
    sessions: int
    answered: int
    cancelled: int
    weight_version: str


class TurnLog:
    """Writes what turns do as events that `report`, `watch` and `trace` read.

    A session is a conversation: it is *outside* between two of its turns. Nobody says that a
    session is over, so it counts as outside until it was silent for a while.
    """

    def __init__(self, record: Record, *, clock: Clock, slots: int, seed: int) -> None:
        """Begin the log."""
        self._record = record
        self._seconds = clock.seconds
        self._round = 0
        self._outside = 0
        self._decoded = self._prefilled = 0
        self._since = 0.0
        record(Begin(seconds=self._seconds(), schedule=_SCHEDULE.name, slots=slots, seed=seed))

    def arrived(self, session: _Session, *, num_tokens: int) -> _Lane:
        """A turn came; gives the conversation that it goes on with."""
        if not session.lanes:
            self._record(
                Load(
                    seconds=self._seconds(),
                    round=self._round,
                    group=session.number,
                    prompts=1,
                    trajectories=1,
                )
            )
        lane = next((lane for lane in session.lanes if lane.state != "active"), None)
        if lane is None:
            lane = _Lane(len(session.lanes))
            session.lanes.append(lane)
        if lane.state == "outside":
            self._outside -= 1
            self._record(
                Reply(
                    seconds=self._seconds(),
                    prompt=session.number,
                    sample=lane.sample,
                    given=max(0, num_tokens - lane.length),
                    outside=self._outside,
                )
            )
        lane.state = "active"
        return lane

    def started(self, active: _Active, *, running: int) -> None:
        """A turn got a slot."""
        lane = active.lane
        self._record(
            Start(
                seconds=self._seconds(),
                round=self._round,
                prompt=active.session.number,
                sample=lane.sample,
                group=active.session.number,
                attempt=0,
                prompt_tokens=max(0, len(active.turn.tokens) - lane.written),
                cached=lane.written + active.cached,
                dropped=0,
                running=running,
            )
        )

    def stepped(self, *, decoded: int, prefilled: int) -> None:
        """Count the tokens of an engine step; they are written with the next event."""
        self._decoded += decoded
        self._prefilled += prefilled

    def ended(self, active: _Active, answer: Trajectory, *, running: int) -> None:
        """A turn is written: its conversation is outside, or over if it has no name."""
        lane, session = active.lane, active.session
        decoded = answer.num_tokens - active.cached
        lane.written += answer.num_tokens
        lane.length = len(active.turn.tokens) + answer.num_tokens
        if session.name is None:
            assert answer.finish_reason is not None
            self._finish(session, lane, decoded=decoded, reason=answer.finish_reason, at=running)
            return
        self._outside += 1
        lane.state = "outside"
        self._record(
            Pause(
                seconds=self._seconds(),
                prompt=session.number,
                sample=lane.sample,
                tokens=lane.written,
                decoded=decoded,
                running=running,
                outside=self._outside,
                engine_decoded=self._decoded,
                engine_prefilled=self._prefilled,
            )
        )

    def interrupted(self, active: _Active, *, running: int, is_dropped: bool = False) -> None:
        """A turn lost its slot; it keeps its tokens, unless nobody waits for it any more."""
        lane, now = active.lane, active.trajectory.num_tokens
        self._record(
            Interrupt(
                seconds=self._seconds(),
                prompt=active.session.number,
                sample=lane.sample,
                tokens=lane.written + now,
                decoded=now - active.cached,
                kept=lane.written + (0 if is_dropped else now),
                running=running,
            )
        )

    def withdrawn(self, active: _Active) -> None:
        """A turn that holds no slot will not be written."""
        active.lane.state = "idle"

    def forgotten(self, session: _Session, *, running: int) -> None:
        """A session is over."""
        for lane in session.lanes:
            if lane.state == "outside":
                self._outside -= 1
                self._finish(session, lane, decoded=0, reason="stop", at=running)

    def harvested(self, *, waiting: int, running: int) -> None:
        """The engine is stopped for new weights."""
        self._since = self._seconds()
        self._record(
            Harvest(
                seconds=self._since,
                round=self._round,
                ready=0,
                waiting=waiting,
                running=running,
                engine_decoded=self._decoded,
                engine_prefilled=self._prefilled,
            )
        )

    def synced(self, version: int) -> None:
        """The engine has new weights, or goes on with those it had."""
        self._round += 1
        now = self._seconds()
        took = now - self._since
        self._record(
            SyncWeights(seconds=now, round=self._round, version=version, took_seconds=took)
        )

    def _finish(
        self, session: _Session, lane: _Lane, *, decoded: int, reason: FinishReason, at: int
    ) -> None:
        lane.state = "idle"
        self._record(
            Finish(
                seconds=self._seconds(),
                prompt=session.number,
                sample=lane.sample,
                tokens=lane.written,
                decoded=decoded,
                reason=reason,
                running=at,
                engine_decoded=self._decoded,
                engine_prefilled=self._prefilled,
            )
        )


class TurnScheduler:
    """Gives the slots of an engine to turns."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        queue: int,
        seed: int,
        log: TurnLog,
        session_seconds: float = 300.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the engine over, which must be idle; `run` works until `close`."""
        self._engine = engine
        self._queue = queue
        self._seed = seed
        self._log = log
        self._session_seconds = session_seconds
        self._now = now
        self._changed = threading.Condition()
        self._mode = Partial()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._waiting: list[_Active] = []
        self._running: dict[Key, _Active] = {}
        self._active: dict[Turn, _Active] = {}
        self._loading: list[_Loading] = []
        self._labels = {engine.version: str(engine.version)}
        self._num_turns = self._num_sessions = 0
        self._num_answered = self._num_cancelled = 0
        self._next_sweep = now()
        self._is_closing = False

    @property
    def counts(self) -> Counts:
        """How things stand."""
        with self._changed:
            return Counts(
                slots=self._engine.slots,
                running=len(self._running),
                waiting=len(self._waiting),
                sessions=len(self._sessions),
                answered=self._num_answered,
                cancelled=self._num_cancelled,
                weight_version=self._labels[self._engine.version],
            )

    def label(self, version: int) -> str:
        """What the weights of a version are called."""
        return self._labels[version]

    def submit(self, turn: Turn) -> None:
        """Queue a turn; its `done` is set when it has an answer or a failure."""
        self._require_acceptable(turn)
        with self._changed:
            if self._is_closing:
                raise Refused(503, "the server is stopping")
            written = sum(not active.is_cancelled for active in self._running.values())
            free = self._engine.slots - written
            if len(self._waiting) >= self._queue + free:
                raise Refused(
                    503, f"{self._queue} turns wait for a slot already; try again in a while"
                )
            number = self._num_turns
            seed = mix(self._seed, number) if turn.seed is None else turn.seed
            prompt = Prompt(id=number, tokens=turn.tokens)
            trajectory = Trajectory(prompt=prompt, sample_index=0, group=0, seed=seed)
            self._num_turns += 1
            session = self._session(turn.session_id)
            lane = self._log.arrived(session, num_tokens=len(turn.tokens))
            session.num_active += 1
            active = _Active(turn, trajectory, session, lane, is_returning=lane.length > 0)
            self._active[turn] = active
            heapq.heappush(self._waiting, active)
            self._changed.notify_all()

    def cancel(self, turn: Turn, *, status: int, reason: str) -> None:
        """Nobody waits for this turn any more: it fails, and its slot is freed soon."""
        with self._changed:
            active = self._active.get(turn)
            if active is None:
                return
            self._num_cancelled += 1
            if active.key in self._running:
                active.is_cancelled = True
                del self._active[turn]
            else:
                self._waiting.remove(active)
                heapq.heapify(self._waiting)
                self._log.withdrawn(active)
                self._leave(active)
            turn.fail(status, reason)
            self._changed.notify_all()

    def load(self, tensors: Mapping[str, object], *, label: str | None) -> Loaded:
        """Go on with these weights, which were checked already; waits until the engine has them."""
        loading = _Loading(tensors, label)
        with self._changed:
            if self._is_closing:
                raise Refused(503, "the server is stopping")
            self._loading.append(loading)
            self._changed.notify_all()
        loading.done.wait()
        if loading.loaded is None:
            assert loading.failure is not None
            raise Refused(loading.failure.status, loading.failure.reason)
        return loading.loaded

    def close(self) -> None:
        """End `run` after the present step; a signal handler may call it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def run(self) -> None:
        """Write turns until `close`; then every turn that is left fails."""
        reason = "the server is stopping"
        try:
            while self._wait():
                self._load_weights()
                self._drop_cancelled()
                self._start()
                self._step()
        except BaseException as error:
            reason = f"the engine failed ({type(error).__name__})"
            raise
        finally:
            self._fail_all(503, reason)

    def _wait(self) -> bool:
        """Wait for something to do; false when it is over."""
        with self._changed:
            while not self._is_closing:
                self._forget_sessions()
                if self._loading or self._waiting or self._running:
                    return True
                self._changed.wait(_SWEEP_SECONDS)
        return False

    def _load_weights(self) -> None:
        with self._changed:
            if not self._loading:
                return
            loading = self._loading.pop(0)
            self._log.harvested(waiting=len(self._waiting), running=len(self._running))
        stopped = self._interrupt()
        with self._changed:
            for active in stopped:
                if active.is_cancelled:
                    self._drop(active)
                    continue
                del self._running[active.key]
                self._log.interrupted(active, running=len(self._running))
                active.trajectory = self._mode.interrupted(active.trajectory)
                heapq.heappush(self._waiting, active)
        version = self._engine.version + 1
        label = str(version) if loading.label is None else loading.label
        with self._changed:
            self._labels[version] = label
        try:
            self._engine.load_weights(Weights(version, loading.tensors))
        except ModelError as error:
            loading.failure = Failure(400, str(error))
        except BaseException as error:
            loading.failure = Failure(500, f"the engine failed ({type(error).__name__})")
            loading.done.set()
            raise
        with self._changed:
            self._log.synced(self._engine.version)
        if loading.failure is None:
            loading.loaded = Loaded(label, len(stopped))
        loading.done.set()

    def _drop_cancelled(self) -> None:
        """Free the slots of turns that nobody waits for; the others go on where they were."""
        with self._changed:
            if not any(active.is_cancelled for active in self._running.values()):
                return
        stopped = self._interrupt()
        with self._changed:
            for active in stopped:
                if active.is_cancelled:
                    self._drop(active)
        for active in stopped:
            if active.key in self._running:
                self._engine.submit(
                    [active.trajectory], tolerance=None, sampling=active.turn.sampling
                )

    def _start(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or len(self._running) >= self._engine.slots:
                    return
                active = heapq.heappop(self._waiting)
                self._running[active.key] = active
                active.cached = active.trajectory.num_tokens
                self._log.started(active, running=len(self._running))
            self._engine.submit([active.trajectory], tolerance=None, sampling=active.turn.sampling)

    def _step(self) -> None:
        if not self._running:
            return
        try:
            step = self._engine.step()
        except ModelError as error:
            # Logits that are not finite: new weights may mend it, so the server goes on.
            self._interrupt()
            self._fail_running(500, str(error))
            return
        with self._changed:
            self._log.stepped(decoded=step.decoded_tokens, prefilled=step.prefilled_tokens)
            for answer in step.finished:
                self._deliver(answer)

    def _deliver(self, answer: Trajectory) -> None:
        active = self._running[answer.key]
        if active.is_cancelled:
            active.trajectory = answer
            self._drop(active)
        else:
            del self._running[answer.key]
            self._log.ended(active, answer, running=len(self._running))
            self._num_answered += 1
            active.turn.answer = answer
            self._leave(active)
        active.turn.done.set()

    def _drop(self, active: _Active) -> None:
        """Free the slot of a turn that gets no answer."""
        del self._running[active.key]
        self._log.interrupted(active, running=len(self._running), is_dropped=True)
        self._log.withdrawn(active)
        self._leave(active)

    def _interrupt(self) -> list[_Active]:
        """Stop the engine; gives what ran, with its tokens so far."""
        stopped = []
        for trajectory in self._engine.interrupt() if self._running else ():
            active = self._running[trajectory.key]
            active.trajectory = trajectory
            stopped.append(active)
        return stopped

    def _fail_running(self, status: int, reason: str) -> None:
        with self._changed:
            for active in list(self._running.values()):
                self._drop(active)
                active.turn.fail(status, reason)

    def _fail_all(self, status: int, reason: str) -> None:
        with self._changed:
            self._is_closing = True
        self._fail_running(status, reason)
        with self._changed:
            for active in self._waiting:
                self._leave(active)
                active.turn.fail(status, reason)
            self._waiting.clear()
            for loading in self._loading:
                loading.failure = Failure(status, reason)
                loading.done.set()
            self._loading.clear()

    def _require_acceptable(self, turn: Turn) -> None:
        """Refuse a turn that the engine would refuse."""
        prompt = Prompt(id=0, tokens=turn.tokens)
        fresh = Trajectory(prompt=prompt, sample_index=0, group=0, seed=0)
        try:
            for limits in self._engine.request_limits:
                limits.check(
                    [fresh], tolerance=None, sampling=turn.sampling, version=self._engine.version
                )
        except RequestError as error:
            raise Refused(400, str(error)) from error

    def _session(self, name: str | None) -> _Session:
        """The session of this name, or a new one; the last one seen stands at the end."""
        session = None if name is None else self._sessions.get(name)
        if session is None:
            session = _Session(self._num_sessions, name, self._now())
            self._num_sessions += 1
        if name is not None:
            self._sessions[name] = session
            self._sessions.move_to_end(name)
        session.last_seen = self._now()
        return session

    def _leave(self, active: _Active) -> None:
        self._active.pop(active.turn, None)
        session = active.session
        session.num_active -= 1
        if session.name is not None:
            session.last_seen = self._now()
            self._sessions.move_to_end(session.name)

    def _forget_sessions(self) -> None:
        now = self._now()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_SECONDS
        oldest = now - self._session_seconds
        for name, session in list(self._sessions.items()):
            is_over = session.last_seen < oldest or len(self._sessions) > _MOST_SESSIONS
            if not is_over:
                return
            if session.num_active:
                continue
            del self._sessions[name]
            self._log.forgotten(session, running=len(self._running))
