"""The pool of environments: replies are computed in worker processes during the rollout.

    submit --> queue of its worker --> under way --> answered --> collect
                     ^                    |  the worker died: tried once more
                     +--------------------+

A conversation stays with one worker, where its live environment is; a worker that hangs beyond the
time limit or grows beyond the memory limit is killed and replaced, and the other conversations it
held are replayed when they are answered next. Every conversation submitted comes back exactly once,
unless it is cancelled; `environment.on_timeout` decides what follows a failure.
An exception in the code of an environment stops the run, with its traceback.

A supervisor thread runs the workers; the other methods are called from one thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from sortedrl.config.data import EnvironmentSettings
from sortedrl.core.protocols import Scorer
from sortedrl.data.rows import Row
from sortedrl.environments import Message, Opening, Reply
from sortedrl.environments.rendering import Renderer
from sortedrl.environments.worker import Answered, Call, Close, Failed, Idle, Turn
from sortedrl.errors import EnvironmentFailed
from sortedrl.rewards.functions import RewardSource
from sortedrl.rewards.pool.process import (
    Lost,
    Supervisor,
    WorkerLostError,
    WorkerProcess,
    Workers,
    WorkerSettings,
)
from sortedrl.types import Key, Trajectory

_LOG = logging.getLogger(__name__)
Failure = Literal["timeout", "memory", "died", "lost", "differs"]
"""Why an environment did not answer; `differs`: its reply was another one when replayed."""


@dataclass(slots=True)
class EnvironmentStats:
    """Counters of the pool."""

    answered: int = 0
    seconds: float = 0.0
    """Time spent inside environments, over all workers."""
    replayed_turns: int = 0
    failures: Counter[Failure] = field(default_factory=Counter)
    workers_killed: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    call: Call
    trajectory: Trajectory | None = None
    crashes: int = 0
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    process: WorkerProcess
    busy_since: float | None = None
    """When it was given a call or an environment to close; `None` if it has nothing to do."""
    under_way: _Job | None = None


class EnvironmentPool:
    """Environments of a run; use it in a `with` block."""

    def __init__(
        self, source: RewardSource, settings: EnvironmentSettings, *, renderer: Renderer
    ) -> None:
        """Start the workers; they are not ready yet."""
        self.settings = settings
        self.stats = EnvironmentStats()
        self.is_replayable = True
        """Whether every environment opened so far can be replayed."""
        self._source = source
        self._renderer = renderer
        self._role = "user"
        self._supervisor = Supervisor(
            self._supervise, name="environments", failure=EnvironmentFailed
        )
        self._changed = self._supervisor.changed
        self._queues: list[deque[_Job | Close]] = [deque() for _ in range(settings.num_workers)]
        self._workers = Workers(
            WorkerSettings(
                what="environment",
                source=source,
                failure=EnvironmentFailed,
                module="sortedrl.environments.worker",
                num_workers=settings.num_workers,
                memory_gib=settings.process_gib,
            ),
            _Worker,
        )
        self._homes: dict[Key, int] = {}
        self._jobs: dict[int, _Job] = {}
        self._by_key: dict[Key, _Job] = {}
        self._results: dict[int, Answered | Failure] = {}
        self._skipped: set[Key] = set()
        self._next_ticket = 0
        self._supervisor.start()

    @property
    def limit(self) -> int | None:
        """Conversations that may be begun at a time."""
        return self.settings.max_open

    def open_rows(self, rows: Sequence[Mapping[str, object]]) -> list[Opening]:
        """The opening of the conversation of each row."""
        tickets = []
        for place, row in enumerate(rows):
            call = self._call((-1 - place, 0), row, (), is_last=True)
            tickets.append(self._start(_Job(call)))
        openings = []
        for ticket, row in zip(tickets, rows, strict=True):
            found = self._wait(ticket)
            if not isinstance(found, Answered):
                raise EnvironmentFailed(
                    f"the environment {self._source.function!r} must open every row, but it failed "
                    f"({self._reason(found)}) at {row.get('place', row)!r:.200}"
                )
            self.is_replayable &= found.is_replayable
            self._role = "tool" if found.opening.tools else self._role
            openings.append(found.opening)
        self._renderer.check(self._role)
        return openings

    def submit(self, trajectory: Trajectory) -> None:
        """Answer the last turn of a conversation; never waits."""
        call = self._call(
            trajectory.key,
            trajectory.prompt.fields,
            self._turns(trajectory),
            is_last=self._is_last(trajectory),
        )
        job = _Job(call, trajectory)
        self._by_key[trajectory.key] = job
        self._start(job)

    def cancel(self, trajectory: Trajectory) -> None:
        """Close the environment of a conversation whose tokens are thrown away, or that ended."""
        key = trajectory.key
        job = self._by_key.pop(key, None)
        with self._changed:
            if job is not None:
                job.is_cancelled = True
                self._jobs.pop(job.call.ticket, None)
                self._results.pop(job.call.ticket, None)
            home = self._homes.pop(key, None)
            if home is not None:
                self._queues[home].append(Close(key))
        self._supervisor.wake()

    def collect(self, *, wait: bool) -> Sequence[Trajectory]:
        """Conversations that were answered: with a reply in `given`, or with a finish reason."""
        with self._changed:
            if wait and self._by_key:
                self._changed.wait_for(
                    lambda: self._supervisor.error is not None or bool(self._done_tickets())
                )
            self._supervisor.raise_error()
            done = [(self._jobs.pop(t), self._results.pop(t)) for t in self._done_tickets()]
        return [self._replied(job, result) for job, result in done]

    def reward(self, trajectory: Trajectory) -> float | None:
        """The reward of a conversation that ended in the middle of a turn.

        It is that of the last reply, 0 without any; `None` if the conversation is skipped.
        """
        if trajectory.key in self._skipped:
            self._skipped.discard(trajectory.key)
            return None
        turns = self._turns(trajectory)[:-1]
        if not turns:
            self.cancel(trajectory)
            return 0.0
        call = self._call(trajectory.key, trajectory.prompt.fields, turns, is_last=True)
        call = replace(call, is_answered=True)
        found = self._wait(self._start(_Job(call)))
        self._homes.pop(trajectory.key, None)
        if isinstance(found, Answered):
            return found.reward or 0.0
        return None if self.settings.on_timeout == "skip" else 0.0

    def close(self) -> None:
        """Kill the workers; unanswered conversations are dropped."""
        self._supervisor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, key: Key, row: Mapping[str, object], turns: tuple[Turn, ...], *, is_last: bool
    ) -> Call:
        self._next_ticket += 1
        return Call(ticket=self._next_ticket, key=key, row=dict(row), turns=turns, is_last=is_last)

    def _turns(self, trajectory: Trajectory) -> tuple[Turn, ...]:
        """The turns of the policy; `None` for those that were answered by an error."""
        turns = trajectory.turns
        found: list[Turn] = [self._renderer.text(turn) for turn in turns]
        for place, reply in enumerate(trajectory.replies):
            if reply in self._error_replies(turns[place][-1]):
                found[place] = None
        return tuple(found)

    def _error_replies(self, last_token: int) -> list[list[int]]:
        return [
            self._renderer.reply([self._error_message(failure)], last_token=last_token)
            for failure in ("timeout", "died")
        ]

    def _error_message(self, failure: Failure) -> Message:
        return {"role": self._role, "content": f"Error: {self._reason(failure)}\n"}

    def _reason(self, failure: Failure) -> str:
        if failure == "timeout":
            return f"no reply within {self.settings.reply_seconds:g} seconds"
        return "the environment failed"

    def _is_last(self, trajectory: Trajectory) -> bool:
        return trajectory.num_turns >= self.settings.max_turns

    def _replied(self, job: _Job, result: Answered | Failure) -> Trajectory:
        trajectory = job.trajectory
        assert trajectory is not None, "only conversations are collected"
        self._by_key.pop(trajectory.key, None)
        if not isinstance(result, Answered):
            return self._failed(trajectory, result)
        if not self._is_unchanged(trajectory, result):
            self.cancel(trajectory)
            return self._failed(trajectory, "differs")
        reply = result.replies[-1]
        is_last = self._is_last(trajectory)
        if reply.is_done or is_last:
            self._homes.pop(trajectory.key, None)
            has_reward = self.settings.reward == "environment"
            if has_reward and reply.is_done and result.reward is None:
                raise EnvironmentFailed(
                    f"the environment {self._source.function!r} ended a conversation without a "
                    "reward; give one with the reply, or set environment.reward to 'function'"
                )
            return replace(
                trajectory,
                finish_reason="stop" if reply.is_done else "length",
                reward=(result.reward or 0.0) if has_reward else None,
                reward_parts=dict(reply.metrics) if has_reward else trajectory.reward_parts,
            )
        return replace(trajectory, given=tuple(self._given(reply, trajectory)))

    def _given(self, reply: Reply, trajectory: Trajectory) -> list[int]:
        tokens = self._renderer.reply(reply.messages, last_token=trajectory.segments[-1].tokens[-1])
        if not tokens:
            raise EnvironmentFailed(
                f"the environment {self._source.function!r} gave prompt {trajectory.prompt.id} a "
                "reply without text; reply with at least one character, or end the conversation"
            )
        return tokens

    def _is_unchanged(self, trajectory: Trajectory, result: Answered) -> bool:
        """Whether a replayed conversation has the same replies as before."""
        replayed = result.replies[:-1]
        self.stats.replayed_turns += len(replayed)
        kept, turns = trajectory.replies, trajectory.turns
        for place in range(len(kept) - len(replayed), len(kept)):
            reply = replayed[place - len(kept) + len(replayed)]
            if not reply.messages and not reply.is_done:
                continue  # a turn that was answered by an error
            again = self._renderer.reply(reply.messages, last_token=turns[place][-1])
            if again != kept[place] or reply.is_done:
                if not self.stats.failures["differs"]:
                    _LOG.warning(
                        "the environment %r has is_replayable, but gave prompt %d another "
                        "reply to turn %d the second time; such conversations are cut off. Make it "
                        "deterministic, or set its is_replayable to False",
                        self._source.function,
                        trajectory.prompt.id,
                        place + 1,
                    )
                return False
        return True

    def _failed(self, trajectory: Trajectory, failure: Failure) -> Trajectory:
        self.stats.failures[failure] += 1
        policy = self.settings.on_timeout
        if (
            policy == "tell"
            and failure not in ("lost", "differs")
            and not self._is_last(trajectory)
        ):
            kind: Failure = "timeout" if failure == "timeout" else "died"
            given = self._renderer.reply(
                [self._error_message(kind)], last_token=trajectory.segments[-1].tokens[-1]
            )
            return replace(trajectory, given=tuple(given))
        if policy == "skip":
            self._skipped.add(trajectory.key)
        return replace(trajectory, finish_reason="length")

    def _start(self, job: _Job) -> int:
        with self._changed:
            self._supervisor.raise_error()
            self._jobs[job.call.ticket] = job
            home = self._homes.get(job.call.key)
            if home is None:
                load = Counter(self._homes.values())
                home = min(
                    range(len(self._queues)), key=lambda n: (len(self._queues[n]), load[n], n)
                )
                if job.call.turns:
                    self._homes[job.call.key] = home
            self._queues[home].append(job)
        self._supervisor.wake()
        return job.call.ticket

    def _wait(self, ticket: int) -> Answered | Failure:
        with self._changed:
            self._changed.wait_for(
                lambda: self._supervisor.error is not None or ticket in self._results
            )
            self._supervisor.raise_error()
            self._jobs.pop(ticket)
            return self._results.pop(ticket)

    def _done_tickets(self) -> list[int]:
        return [ticket for ticket in self._results if self._jobs[ticket].trajectory is not None]

    # From here on: the supervisor thread.

    def _supervise(self) -> None:
        try:
            while self._supervisor.is_running:
                self._workers.start_missing()
                self._dispatch()
                limits = [limit for worker in self._workers if (limit := self._limit(worker))]
                for worker, message in self._workers.receive(self._supervisor.wait, limits=limits):
                    self._received(worker, message)
                self._enforce_limits()
        finally:
            self._workers.close()

    def _dispatch(self) -> None:
        for worker in self._workers:
            queue = self._queues[worker.process.number]
            while worker.process.is_ready and worker.busy_since is None:
                with self._changed:
                    if not queue:
                        break
                    work = queue.popleft()
                if isinstance(work, _Job):
                    if work.is_cancelled:
                        continue
                    worker.under_way = work
                worker.busy_since = time.monotonic()
                try:
                    worker.process.send(work.call if isinstance(work, _Job) else work)
                except WorkerLostError:
                    self._workers.end(worker)
                    self._lost(worker)
                    break

    def _received(self, worker: _Worker, message: object) -> None:
        if isinstance(message, Idle):
            worker.busy_since = None
        elif isinstance(message, Failed) and message.fault != "lost":
            self._broke(worker, message)
        elif isinstance(message, Answered | Failed):
            self._answered(worker, message)
        elif isinstance(message, Lost):
            self._lost(worker)

    def _answered(self, worker: _Worker, answer: Answered | Failed) -> None:
        job, worker.under_way = worker.under_way, None
        worker.busy_since = time.monotonic()  # it may have an environment to close now
        assert job is not None, "a worker answers what it was given"
        if isinstance(answer, Answered):
            self.stats.answered += 1
            self.stats.seconds += answer.seconds
        self._deliver(job, answer if isinstance(answer, Answered) else "lost")

    def _deliver(self, job: _Job, result: Answered | Failure) -> None:
        with self._changed:
            if not job.is_cancelled:
                self._results[job.call.ticket] = result
            self._changed.notify_all()

    def _broke(self, worker: _Worker, failed: Failed) -> None:
        job = worker.under_way
        assert job is not None, "a worker answers what it was given"
        prompt, sample = job.call.key
        row = str(job.call.row.get("place", ""))
        what = "raised" if failed.fault == "raised" else "gave no valid reply"
        where = f"in conversation {sample} of prompt {prompt}" if prompt >= 0 else f"at {row}"
        raise EnvironmentFailed(
            f"the environment {self._source.function!r} {what} {where}:\n{failed.message.rstrip()}"
        )

    def _lost(self, worker: _Worker) -> None:
        """A worker has ended: what it was answering is tried once more."""
        job = worker.under_way
        if job is None or job.is_cancelled:
            return
        job.crashes += 1
        if job.crashes > 1:
            self._deliver(job, "died")
        else:
            with self._changed:
                self._queues[worker.process.number].appendleft(job)

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            limit = self._limit(worker)
            if limit is not None and now >= limit:
                self._kill(worker, "timeout")
        busy = [worker for worker in self._workers if worker.under_way is not None]
        for worker in self._workers.over_memory_limit(busy):
            self._kill(worker, "memory")

    def _kill(self, worker: _Worker, failure: Failure) -> None:
        self._workers.end(worker)
        self.stats.workers_killed += 1
        if worker.under_way is not None:
            self._deliver(worker.under_way, failure)
        else:
            _LOG.warning(
                "close() of the environment %r took more than %g seconds; its process was replaced",
                self._source.function,
                self.settings.reply_seconds,
            )

    def _limit(self, worker: _Worker) -> float | None:
        """When its call is overdue, if it has one; replayed turns have their own time each."""
        if worker.busy_since is None:
            return None
        turns = 1 if worker.under_way is None else max(1, len(worker.under_way.call.turns))
        return worker.busy_since + self.settings.reply_seconds * turns


def opened_rows(pool: EnvironmentPool, rows: Sequence[Row]) -> list[Row]:
    """The rows with the opening messages and the tools of their environments."""
    fields = [_fields(row) for row in rows]
    return [
        replace(
            row,
            prompt=_prompt(opening.messages),
            tools=opening.tools,
            fields={"prompt": own["prompt"], **row.fields},
        )
        for row, own, opening in zip(rows, fields, pool.open_rows(fields), strict=True)
    ]


def _fields(row: Row) -> dict[str, object]:
    """The columns of a row as its environment gets them."""
    prompt = row.prompt if isinstance(row.prompt, str) else [dict(m) for m in row.prompt]
    return {"prompt": prompt, "place": row.place, **row.fields}


def _prompt(messages: Sequence[Mapping[str, str]]) -> str | tuple[Mapping[str, str], ...]:
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return tuple(messages)


class EnvironmentScorer:
    """Rewards of conversations: the environment's own, or a reward function over all of it."""

    def __init__(self, pool: EnvironmentPool, scorer: Scorer | None) -> None:
        """Without a scorer the rewards are the environment's."""
        self._pool = pool
        self._scorer = scorer

    def submit(self, trajectory: Trajectory) -> None:
        """Start to score a complete conversation."""
        if self._scorer is not None:
            self._pool.cancel(trajectory)
            self._scorer.submit(trajectory)

    def cancel(self, trajectory: Trajectory) -> None:
        """Drop a conversation that will be renewed before it is trained on."""
        if self._scorer is not None:
            self._scorer.cancel(trajectory)

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """These conversations, in order, with their rewards."""
        if self._scorer is not None:
            return self._scorer.collect(trajectories)
        return [
            t if t.reward is not None else replace(t, reward=self._pool.reward(t))
            for t in trajectories
        ]
