"""A pool of simulated engines on one virtual clock, with different speeds, failures and a network.

It places work like the real pool: on the engine that has had the prompt since the last weight sync,
otherwise on the least loaded one. Work of a failed engine goes to the others, and the engine comes
back with the current weights. Nothing is resampled: the weights are the same, so every mode keeps
the tokens. Every submitted trajectory is returned exactly once.

All costs are per engine: a step depends on the engine's own sequences and cached tokens, and a
hardware preset of eight cards makes every engine a machine of eight cards. An engine is updated
only at its own events: in between, its time is `start` plus the seconds of its prefill and of the
steps since, so it costs nothing while others work.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum

from sortedrl.config.checks import require
from sortedrl.core.clock import VirtualClock
from sortedrl.simulate.costs import Costs
from sortedrl.simulate.engine import SimulatedBatch, Work
from sortedrl.simulate.lengths import Lengths
from sortedrl.simulate.settings import PoolSettings
from sortedrl.types import Key, Step, Trajectory, Weights

_MOST_IN_A_ROW = 100
"""Failures per engine without any finished answer, after which the run is stopped."""


class SimulatedReplica:
    """One engine of the pool: a batch with its own speed."""

    def __init__(
        self, batch: SimulatedBatch, *, number: int, slowdown: float, prefill_token_seconds: float
    ) -> None:
        """Alive and empty; everything takes `slowdown` times as long."""
        self.batch = batch
        self.number = number
        self.is_alive = True
        self.failures = 0
        self.decoded = self.prefilled = 0
        """Tokens since `take_tokens` was last called."""
        self.turn = 0
        """Number of its current plan; scheduled events of earlier plans are ignored."""
        self._slowdown = slowdown
        self._prefill_token_seconds = prefill_token_seconds
        self._start = 0.0
        self._prefill_seconds = 0.0

    @property
    def has_room(self) -> bool:
        """Whether it is alive and has a free slot."""
        return self.is_alive and self.batch.num_held < self.batch.slots

    @property
    def load(self) -> float:
        """The share of its slots in use."""
        return self.batch.num_held / self.batch.slots

    def plan(self, now: float) -> float | None:
        """Admit queued work; returns when its next answer will be complete.

        New work is admitted after the current step. `None` if the plan does not change: there is
        nothing to do, or the current step completes an answer.
        """
        batch = self.batch
        if batch.num_running:
            steps = self._steps_under_way(now)
            if steps == batch.steps_to_finish:
                return None
            self._decode(steps)
        else:
            self._start = now
        prefilled = batch.admit()
        self.prefilled += prefilled
        self._prefill_seconds = prefilled * self._prefill_token_seconds
        if not batch.num_running:
            return None
        self.turn += 1
        return self._time_after(batch.steps_to_finish)

    def finish(self) -> list[Trajectory]:
        """Advance to the next finish."""
        return self._decode(self.batch.steps_to_finish)

    def interrupt(self, now: float) -> tuple[float, Sequence[Trajectory]]:
        """Stop after the current step; returns the time of that, and all work as unfinished."""
        self.turn += 1
        complete = self._decode(self._steps_under_way(now)) if self.batch.num_running else ()
        stopped = [replace(answer, finish_reason=None) for answer in complete]
        until = max(now, self._start)
        return until, [*stopped, *(trajectory for trajectory, _ in self.batch.stop())]

    def fail(self, now: float, *, loses_tokens: bool) -> list[Work]:
        """Fail; returns its work, with the tokens of complete steps."""
        self.turn += 1
        self.is_alive = False
        self.failures += 1
        # With no step left, an answer lacks only its prefill: it is returned too.
        if count := self.batch.steps_to_finish:
            self._decode(max(0, bisect_right(range(count), now, key=self._time_after) - 1))
        return self.batch.lose() if loses_tokens else self.batch.stop()

    def take_tokens(self) -> tuple[int, int]:
        """Decoded and prefilled tokens since the last call."""
        tokens = self.decoded, self.prefilled
        self.decoded = self.prefilled = 0
        return tokens

    def _steps_under_way(self, now: float) -> int:
        """Steps made or started by now, at most to the next finish."""
        if now <= self._start:
            return 0
        return bisect_left(range(self.batch.steps_to_finish), now, key=self._time_after)

    def _time_after(self, steps: int) -> float:
        seconds = self._prefill_seconds + self.batch.decode_seconds(steps)
        return self._start + seconds * self._slowdown

    def _decode(self, steps: int) -> list[Trajectory]:
        self._start = self._time_after(steps)
        self._prefill_seconds = 0.0
        self.decoded += self.batch.num_running * steps
        return self.batch.decode(steps)


class _Kind(IntEnum):
    """Events of an engine; simultaneous events are handled in this order."""

    FINISH = 0
    RESTART = 1
    FAILURE = 2


class _Placement:
    """Which engine takes a trajectory: the rules of the real pool, without scanning all engines.

    The heap holds each engine with a free slot at its current load; outdated entries are skipped.
    """

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._replicas = replicas
        self._of_answer: dict[Key, SimulatedReplica] = {}
        self._of_prompt: dict[int, SimulatedReplica] = {}
        self._by_load: list[tuple[float, int]] = []
        self.tidy()

    def tidy(self) -> None:
        """Rebuild the heap from the current loads."""
        self._by_load = [(m.load, m.number) for m in self._replicas if m.has_room]
        heapq.heapify(self._by_load)

    def changed(self, replica: SimulatedReplica) -> None:
        """The load of this engine has changed."""
        if replica.has_room:
            heapq.heappush(self._by_load, (replica.load, replica.number))

    def forget(self) -> None:
        """Forget which engine has which prefix: the weights have changed."""
        self._of_answer.clear()
        self._of_prompt.clear()

    def place(self, trajectory: Trajectory) -> SimulatedReplica | None:
        """The engine that takes it, or `None` if all are full."""
        key = trajectory.key
        own = self._of_answer.get(key) if trajectory.segments else None
        replica = next(
            (m for m in (own, self._of_prompt.get(key[0])) if m is not None and m.has_room), None
        )
        replica = self._emptiest() if replica is None else replica
        if replica is not None:
            self._of_answer[key] = self._of_prompt[key[0]] = replica
        return replica

    def _emptiest(self) -> SimulatedReplica | None:
        while self._by_load:
            load, number = self._by_load[0]
            replica = self._replicas[number]
            if replica.has_room and replica.load == load:
                return replica
            heapq.heappop(self._by_load)
        return None


class SimulatedPool:
    """Several simulated engines behind one `Engine`."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        slots: int,
        lengths: Lengths,
        costs: Costs,
        clock: VirtualClock,
        seed: int,
    ) -> None:
        """Empty engines with the weights of version 0; the seed determines speeds and failures."""
        self.version = 0
        self._settings = settings
        self._costs = costs
        self._clock = clock
        self._seed = seed
        pairs = zip(settings.shares(slots), settings.slowdowns(seed), strict=True)
        self._replicas = [
            SimulatedReplica(
                SimulatedBatch(slots=share, lengths=lengths, costs=costs),
                number=number,
                slowdown=slowdown,
                prefill_token_seconds=costs.prefill_token_seconds,
            )
            for number, (share, slowdown) in enumerate(pairs)
        ]
        self._placement = _Placement(self._replicas)
        self._queue: deque[Work] = deque()
        self._touched: set[int] = set()
        self._events: list[tuple[float, _Kind, int, int]] = []
        self._decoded = self._prefilled = 0
        self._slots = slots
        self._unfinished = 0
        self._failures_in_a_row = 0
        for replica in self._replicas:
            self._await_failure(replica, since=0.0)

    @property
    def slots(self) -> int:
        """Slots of the engines that are alive."""
        return self._slots

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Submit work; what exceeds the slots is queued."""
        self._queue.extend((trajectory, tolerance) for trajectory in trajectories)
        self._unfinished += len(trajectories)

    def step(self) -> Step:
        """Advance until an answer is complete or a failed engine is back.

        The tokens of an engine are reported at its events, at the latest in the first step after
        an interruption.
        """
        finished = self._take_events()
        while not finished:
            slots = self._slots
            self._hand_out()
            if not self._unfinished:
                break
            self._pass_until(self._events[0][0])
            finished = self._take_events()
            if self._slots > slots:
                break
        self._unfinished -= len(finished)
        decoded, prefilled = self._decoded, self._prefilled
        self._decoded = self._prefilled = 0
        return Step(finished=tuple(finished), decoded_tokens=decoded, prefilled_tokens=prefilled)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop all engines after their current step, and return all work, sorted by key."""
        now = until = self._clock.seconds()
        stopped = [trajectory for trajectory, _ in self._queue]
        self._queue.clear()
        for replica in self._replicas:
            if replica.batch.num_held:
                end, given_back = replica.interrupt(now)
                stopped += given_back
                until = max(until, end)
                self._count(replica)
        self._touched.clear()
        self._unfinished = 0
        self._pass_until(until)
        self._clock.advance(self._costs.interrupt_seconds)
        self._placement.tidy()
        self._await_living()
        return sorted(stopped, key=lambda trajectory: trajectory.key)

    def load_weights(self, weights: Weights) -> None:
        """Set the version and advance the clock by the weight sync and the network."""
        assert not self._unfinished, "weights change only while nothing runs"
        self._placement.forget()
        self._clock.advance(self._costs.weight_sync_seconds + self._settings.network_seconds)
        self.version = weights.version
        for replica in self._replicas:
            replica.batch.version = weights.version
        self._await_living()

    def _hand_out(self) -> None:
        """Assign queued work to free slots in order, then plan the engines that got some."""
        while self._queue:
            replica = self._placement.place(self._queue[0][0])
            if replica is None:
                break
            replica.batch.queue([self._queue.popleft()])
            self._touched.add(replica.number)
            self._placement.changed(replica)
        now = self._clock.seconds()
        for number in self._touched:
            replica = self._replicas[number]
            finish = replica.plan(now)
            if finish is not None:
                self._expect(finish, _Kind.FINISH, replica)
            self._count(replica)
        self._touched.clear()

    def _take_events(self) -> list[Trajectory]:
        """Handle all events up to now; returns the answers that are complete."""
        finished: list[Trajectory] = []
        now = self._clock.seconds()
        while self._events and self._events[0][0] <= now:
            seconds, kind, number, turn = heapq.heappop(self._events)
            replica = self._replicas[number]
            if kind is _Kind.FINISH and turn == replica.turn:
                finished += replica.finish()
                self._failures_in_a_row = 0
                self._count(replica)
                self._touched.add(number)
                self._placement.changed(replica)
            elif kind is _Kind.FAILURE:
                self._fail(replica, seconds)
            elif kind is _Kind.RESTART:
                replica.is_alive = True
                self._slots += replica.batch.slots
                self._placement.changed(replica)
                self._await_failure(replica, since=seconds)
        return finished

    def _fail(self, replica: SimulatedReplica, seconds: float) -> None:
        self._failures_in_a_row += 1
        require(
            self._failures_in_a_row <= _MOST_IN_A_ROW * len(self._replicas),
            f"engines must stay up long enough to finish answers, but all {len(self._replicas)} "
            f"together failed {self._failures_in_a_row - 1:,} times in a row without finishing "
            "one; lower pool.failures_per_hour, engine.max_tokens or the seconds of an update",
        )
        works = replica.fail(seconds, loses_tokens=self._settings.failures_lose_tokens)
        self._count(replica)
        self._touched.discard(replica.number)
        self._put_in_front(works)
        self._slots -= replica.batch.slots
        self._expect(seconds + self._settings.restart_seconds, _Kind.RESTART, replica)

    def _put_in_front(self, works: Iterable[Work]) -> None:
        self._queue.extendleft(reversed(list(works)))

    def _await_failure(self, replica: SimulatedReplica, *, since: float) -> None:
        if self._settings.failures_per_hour:
            seconds = self._settings.seconds_to_failure(
                self._seed, engine=replica.number, failures=replica.failures
            )
            self._expect(since + seconds, _Kind.FAILURE, replica)

    def _await_living(self) -> None:
        """Wait until some engine is alive: the loop needs slots next."""
        self._take_events()
        while not self._slots:
            self._pass_until(self._events[0][0])
            self._take_events()

    def _expect(self, seconds: float, kind: _Kind, replica: SimulatedReplica) -> None:
        heapq.heappush(self._events, (seconds, kind, replica.number, replica.turn))

    def _count(self, replica: SimulatedReplica) -> None:
        decoded, prefilled = replica.take_tokens()
        self._decoded += decoded
        self._prefilled += prefilled

    def _pass_until(self, seconds: float) -> None:
        """Advance the clock to exactly this time: no step is longer than the time passed so far."""
        while (now := self._clock.seconds()) < seconds:
            self._clock.advance(min(seconds - now, now) if now else seconds)
