"""A pool of engines that is an engine itself; it continues as long as one of them is alive.

    submit -> queue -> router -> replicas and their threads -> reports -> step, interrupt

Every submitted trajectory comes back once: it is assigned to one replica, queued, or complete.
Unfinished trajectories returned by an engine go to the front of the queue. Only the caller's thread
moves trajectories; the threads of the replicas only report.

A trajectory is routed to the replica that has its prefix in its KV cache, otherwise to the least
loaded one. New weights invalidate all cached prefixes.
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
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.replica import (
    Assignment,
    Close,
    Closed,
    Command,
    Executed,
    Failed,
    Inbox,
    Interrupt,
    LoadWeights,
    Lost,
    Replica,
    Report,
    Resume,
    Stepped,
)
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import EngineError, EngineLost, RequestError
from sortedrl.types import Key, Step, Trajectory, Weights

# Longer than a server takes to read its weights.
_LOAD_SECONDS = 1860.0


class Router:
    """Routes work by cached prefix, then by load."""

    def __init__(self, *, queue_depth: int) -> None:
        """Replicas may be assigned `queue_depth` trajectories more than they have slots."""
        self._queue_depth = queue_depth
        self._replica_of_answer: dict[Key, Replica] = {}
        self._replica_of_prompt: dict[int, Replica] = {}

    def route(self, assignment: Assignment, replicas: Sequence[Replica]) -> Replica | None:
        """The replica for this work, or `None` if all are full."""
        replica = self._with_prefix(assignment, replicas) or self._least_loaded(replicas)
        if replica is not None:
            self._replica_of_answer[assignment.key] = replica
            self._replica_of_prompt[assignment.trajectory.prompt.id] = replica
        return replica

    def reset(self) -> None:
        """Forget all prefixes: the weights have changed."""
        self._replica_of_answer.clear()
        self._replica_of_prompt.clear()

    def _with_prefix(self, assignment: Assignment, replicas: Sequence[Replica]) -> Replica | None:
        """The replica with the longest cached prefix, if it is alive and has a free slot."""
        own = None
        if assignment.trajectory.segments:
            own = self._replica_of_answer.get(assignment.key)
        for found in (own, self._replica_of_prompt.get(assignment.trajectory.prompt.id)):
            if found is not None and found in replicas and len(found.assigned) < found.slots:
                return found
        return None

    def _least_loaded(self, replicas: Sequence[Replica]) -> Replica | None:
        free = [r for r in replicas if len(r.assigned) < r.slots + self._queue_depth]
        return min(free, key=lambda replica: (replica.load, replica.number), default=None)


class ReplicaSet:
    """The replicas of a pool, and their results. Used only by the caller's thread."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        names: Sequence[str],
        warn: Callable[[str], None],
        timeout_seconds: float,
        load_seconds: float,
    ) -> None:
        """Start a thread for each engine."""
        self._warn = warn
        self._timeout = timeout_seconds
        self._load_timeout = max(timeout_seconds, load_seconds)
        self._inbox: Inbox = SimpleQueue()
        self.replicas: list[Replica] = []
        for engine, name in zip(engines, names, strict=True):
            self.add(engine, name=name, num_engines=len(engines))
        self.queue: deque[Assignment] = deque()
        self._finished: list[Trajectory] = []
        self._decoded = self._prefilled = 0
        self._errors: deque[BaseException] = deque()

    def add(self, engine: RolloutEngine, *, name: str, num_engines: int | None = None) -> None:
        """Start a thread for one more engine."""
        number = len(self.replicas)
        count = number + 1 if num_engines is None else num_engines
        title = f"engine {number + 1} of {count} ({name})"
        self.replicas.append(Replica(engine, number=number, title=title, inbox=self._inbox))

    @property
    def alive(self) -> list[Replica]:
        """The replicas that are not lost."""
        return [replica for replica in self.replicas if replica.is_alive]

    @property
    def slots(self) -> int:
        """Slots of all live replicas."""
        return sum(replica.slots for replica in self.alive)

    @property
    def has_output(self) -> bool:
        """Whether tokens were decoded or answers completed since the last step."""
        return bool(self._finished or self._decoded)

    @property
    def is_idle(self) -> bool:
        """Whether there is no work."""
        return not self.queue and not any(replica.assigned for replica in self.alive)

    @property
    def keys(self) -> set[Key]:
        """The trajectories that were submitted and have not come back yet."""
        keys = {queued.key for queued in self.queue} | {answer.key for answer in self._finished}
        return keys.union(*(replica.assigned for replica in self.alive))

    def require_alive(self) -> None:
        """Raise `EngineLost` if no replica is left."""
        if not self.alive:
            raise EngineLost(
                f"no engine is left, all {len(self.replicas)} are lost; interrupt() returns "
                "their unfinished answers"
            )

    def broadcast(self, command: Command) -> None:
        """Send a command to every live replica, and wait for all replies."""
        for replica in self.alive:
            replica.send(command)
        while not all(replica.has_replied for replica in self.alive):
            self.receive(is_waiting=True)

    def raise_error(self) -> None:
        """Raise the first error of an engine, if there is one."""
        if self._errors:
            raise self._errors.popleft()

    def take_step(self) -> Step:
        """The results since the last step."""
        step = Step(
            finished=tuple(self._finished),
            decoded_tokens=self._decoded,
            prefilled_tokens=self._prefilled,
        )
        self._finished.clear()
        self._decoded = self._prefilled = 0
        return step

    def take_all(self) -> list[Trajectory]:
        """All trajectories of the interrupted pool, as unfinished."""
        for replica in self.alive:
            self._reclaim(replica, ())
        complete = [replace(answer, finish_reason=None) for answer in self._finished]
        unfinished = [queued.trajectory for queued in self.queue]
        self._finished.clear()
        self.queue.clear()
        return [*complete, *unfinished]

    def receive(self, *, is_waiting: bool) -> None:
        """Handle all reports, after waiting for the first; replicas that time out are lost."""
        with suppress(Empty):
            if is_waiting:
                due = [self._due(r) for r in self.alive if r.waiting_since is not None]
                self._handle(self._inbox.get(timeout=max(0.0, min(due) - monotonic())))
            while True:
                self._handle(self._inbox.get_nowait())
        for replica in self.alive:
            if replica.waiting_since is not None and monotonic() >= self._due(replica):
                replica.is_hung = True
                reason = f"no response for {self._limit(replica):g} s"
                if replica.thread.error is not None:
                    reason = f"{replica.thread.error}, and then {reason}"
                self._mark_lost(replica, None, reason=reason)

    def close(self) -> None:
        """Close all engines; raises the first error of a live one."""
        for replica in self.alive:
            replica.thread.send(Close())
        until = monotonic() + self._timeout
        for replica in self.replicas:
            seconds = 0.0 if replica.is_hung else until - monotonic()
            if not replica.thread.has_ended(seconds=seconds):
                self._warn(f"{replica.title} hangs and is abandoned without closing it")
        with suppress(Empty):
            while True:
                report = self._inbox.get_nowait()
                if isinstance(report.event, Closed):
                    self._handle(report)
        self.raise_error()

    def _limit(self, replica: Replica) -> float:
        """Timeout of a replica: loading weights takes longer than a step."""
        return self._load_timeout if replica.is_loading else self._timeout

    def _due(self, replica: Replica) -> float:
        """When a replica that owes a report counts as lost."""
        assert replica.waiting_since is not None, "a report is due"
        return replica.waiting_since + self._limit(replica)

    def _handle(self, report: Report) -> None:
        replica, event = self.replicas[report.replica], report.event
        if isinstance(event, Closed):
            self._handle_closed(replica, event.error)
            return
        # A replica that responds after its timeout reports work that others have taken over.
        if not replica.is_alive:
            return
        is_step = isinstance(event, Stepped) or (isinstance(event, Failed) and not event.is_command)
        replica.on_report(report.seconds, is_reply=not is_step)
        match event:
            case Stepped(step):
                self._decoded += replica.on_step(step)
                self._prefilled += step.prefilled_tokens
                self._finished += step.finished
            case Executed(returned):
                self._requeue(replica.take_back(returned))
            case Failed():
                replica.is_stalled = True
                replica.unassign(event.not_submitted)
                self._requeue(event.not_submitted)
                self._errors.append(event.error)
            case Lost(error, rescued):
                self._mark_lost(replica, rescued, reason=str(error))

    def _handle_closed(self, replica: Replica, error: BaseException | None) -> None:
        if error is not None and replica.is_alive:
            self._errors.append(error)
        elif error is not None:
            self._warn(f"{replica.title} is lost, and could not be closed either: {error}")

    def _mark_lost(
        self, replica: Replica, rescued: Sequence[Trajectory] | None, *, reason: str
    ) -> None:
        count = len(replica.assigned)
        self._reclaim(replica, rescued or ())
        replica.is_alive = False
        replica.thread.abandon()
        answers = "1 answer continues" if count == 1 else f"{count} answers continue"
        tokens = "their tokens so far" if rescued is not None else "the tokens they came with"
        self._warn(
            f"{replica.title} is lost: {reason}; {answers} elsewhere with {tokens}, "
            f"{self.slots} slots are left"
        )

    def _reclaim(self, replica: Replica, rescued: Iterable[Trajectory]) -> None:
        assignments, tokens = replica.reclaim(rescued)
        self._requeue(assignments)
        self._decoded += tokens

    def _requeue(self, assignments: Iterable[Assignment]) -> None:
        """Put work at the front of the queue, in order."""
        self.queue.extendleft(reversed(list(assignments)))


class EnginePool:
    """Several engines as one, each driven by a thread of its own.

    The pool owns its engines: nobody else may call them, and `close` closes them.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        warn: Callable[[str], None],
        names: Sequence[str] | None = None,
        timeout_seconds: float = 300.0,
        load_seconds: float = _LOAD_SECONDS,
        queue_depth: int = 0,
    ) -> None:
        """An engine that has work and does not respond for `timeout_seconds` is lost.

        While it loads weights, the timeout is `load_seconds`, if that is longer.

        `names` are used in messages, by default those of the engines. An engine is assigned up to
        `queue_depth` trajectories more than it has slots, so that it refills a free slot without
        waiting for the pool.
        """
        names = [engine.name for engine in engines] if names is None else names
        _check_pool(engines, names, timeout_seconds=timeout_seconds, queue_depth=queue_depth)
        self.name = f"pool of {', '.join(names)}"
        self.version = engines[0].version
        self._replicas = ReplicaSet(
            engines,
            names=names,
            warn=warn,
            timeout_seconds=timeout_seconds,
            load_seconds=load_seconds,
        )
        self._router = Router(queue_depth=queue_depth)
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
        """Slots of the live engines."""
        return self._replicas.slots

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """Those of all live engines: each of them may get the request."""
        return [limits for r in self._replicas.alive for limits in r.engine.request_limits]

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work in order of priority: all of it, or none if one is refused."""
        self._require_open()
        self._replicas.require_alive()
        self._refuse_duplicates(trajectories)
        for limits in dict.fromkeys(self.request_limits):
            limits.check(trajectories, tolerance=tolerance, sampling=sampling, version=self.version)
        self._replicas.queue.extend(
            Assignment(trajectory=trajectory, tolerance=tolerance, sampling=sampling)
            for trajectory in trajectories
        )
        self._replicas.receive(is_waiting=False)
        self._dispatch()

    def step(self) -> Step:
        """Wait until an engine has decoded a token or completed an answer."""
        self._require_open()
        replicas = self._replicas
        for replica in replicas.alive:
            if replica.is_stalled:
                replica.send(Resume())
        replicas.receive(is_waiting=False)
        while True:
            self._dispatch()
            replicas.raise_error()
            if replicas.has_output or replicas.is_idle:
                return replicas.take_step()
            replicas.require_alive()
            replicas.receive(is_waiting=True)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop all engines, and return every unfinished trajectory, sorted by key.

        This works even if no engine is left. An answer completed since the last step is returned as
        unfinished too: submitted again, it is complete at once.
        """
        self._require_open()
        self._replicas.broadcast(Interrupt())
        self._replicas.raise_error()
        return sorted(self._replicas.take_all(), key=lambda trajectory: trajectory.key)

    def load_weights(self, weights: Weights) -> None:
        """Load these weights into all engines, in parallel."""
        self._require_open()
        replicas = self._replicas
        replicas.require_alive()
        self._router.reset()
        replicas.broadcast(LoadWeights(weights))
        replicas.raise_error()
        replicas.require_alive()
        for replica in replicas.alive:
            if replica.engine.version != weights.version:
                raise EngineError(
                    f"{replica.title} must have the weights of version {weights.version} after "
                    f"loading them, but reports version {replica.engine.version}"
                )
        self.version = weights.version

    def add(self, engine: RolloutEngine, *, name: str | None = None) -> None:
        """Add an engine, which must have weights of the current version."""
        self._require_open()
        name = engine.name if name is None else name
        require(
            all(replica.engine is not engine for replica in self._replicas.replicas),
            f"each engine may be in a pool only once, got {name} again; create a new one",
        )
        require(engine.slots >= 1, f"{name} must have at least 1 slot, got {engine.slots}")
        require(
            engine.version == self.version,
            f"{name} must have the weights of the pool, version {self.version}, got version "
            f"{engine.version}; load them first",
        )
        self._replicas.add(engine, name=name)
        self.name = f"{self.name}, {name}"

    def close(self) -> None:
        """Close all engines and end their threads; unfinished answers are dropped."""
        if not self._is_closed:
            self._is_closed = True
            self._replicas.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the pool is closed; create a new one")

    def _refuse_duplicates(self, trajectories: Sequence[Trajectory]) -> None:
        keys = self._replicas.keys
        for trajectory in trajectories:
            if trajectory.key in keys:
                raise RequestError(
                    f"trajectory {trajectory.key} is already in the pool; submit it again only "
                    "after it has come back"
                )
            keys.add(trajectory.key)

    def _dispatch(self) -> None:
        """Assign queued work to free slots, first come, first served."""
        queue, alive = self._replicas.queue, self._replicas.alive
        while queue and (replica := self._router.route(queue[0], alive)):
            replica.assign(queue.popleft())
        for replica in alive:
            replica.flush()


def _check_pool(
    engines: Sequence[RolloutEngine],
    names: Sequence[str],
    *,
    timeout_seconds: float,
    queue_depth: int,
) -> None:
    require(len(engines) >= 1, "a pool must have at least 1 engine, got none")
    require(
        len({id(engine) for engine in engines}) == len(engines),
        "each engine may be in a pool only once; create one engine per entry",
    )
    require(
        len(names) == len(engines),
        f"a pool of {len(engines)} engines must have as many names, got {len(names)}",
    )
    slots = [engine.slots for engine in engines]
    require(min(slots) >= 1, f"each engine of a pool must have at least 1 slot, got {slots}")
    versions = sorted({engine.version for engine in engines})
    require(
        len(versions) == 1,
        f"the engines of a pool must have weights of one version, got {versions}; load the same "
        "weights into all of them first",
    )
    require(timeout_seconds > 0, f"timeout_seconds must be above 0, got {timeout_seconds}")
    require(queue_depth >= 0, f"queue_depth must be 0 or more, got {queue_depth}")
