"""The worker processes of a reward pool: start, dispatch, limits, kill and replace; and their side.

    waiting -> under way -> delivered          a score, or a failure
                 |  the worker died, or answers that shared a call failed together
                 v
               alone -> under way -> delivered  retried once, alone on a worker

Every accepted call is delivered exactly once, unless it is cancelled or the function raises. A
worker that dies, or is killed because a call timed out, is replaced.
`WorkerGroup` is used by one thread, without locks. A worker process runs `main`: it loads the
function, scores answers, and reports each result.

    parent -> worker    Setup, then Work after Work
    worker -> parent    Ready or Refused, then one Report for each answer, as it is done
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from sortedrl.config.data import RewardSettings
from sortedrl.errors import RewardError
from sortedrl.rewards.functions import CallStyle, RewardSource, load
from sortedrl.rewards.pool.process import (
    Lost,
    PoolConnection,
    Wait,
    WorkerLostError,
    WorkerProcess,
    Workers,
    WorkerSettings,
    served,
)
from sortedrl.rewards.pool.score import (
    Call,
    Failure,
    NoScoreError,
    Score,
    checked_score,
    values_of_batch,
)
from sortedrl.types import Prompt

_GRACE_SECONDS = 1.0  # async workers time out their own calls; also for cancelled calls


@dataclass(slots=True, eq=False)
class RewardWorker:
    """A worker process and the answers it has."""

    process: WorkerProcess
    began: float = 0.0
    """When it got the oldest of its current work."""
    under_way: list[int] = field(default_factory=list)
    """Tickets of the answers being scored."""
    style: CallStyle | None = None
    """How its function is called; `None` until it is loaded."""
    is_ending: bool = False
    """It ran out of memory and is exiting: it gets no more work."""


class Results(Protocol):
    """Receives the results of the group."""

    def scored(self, call: Call, score: Score, *, seconds: float) -> None:
        """The function returned a score."""

    def failed(self, call: Call, failure: Failure, *, seconds: float, detail: str) -> None:
        """The call failed."""

    def function_failed(self, calls: Sequence[Call], *, message: str, is_exception: bool) -> None:
        """The function raised for one of these, or returned an invalid score."""


@dataclass(slots=True)
class WorkerStats:
    """Counters of the workers."""

    started: int = 0
    killed: int = 0
    died: int = 0


class WorkerGroup:
    """Workers, and the calls that wait for them."""

    def __init__(self, source: RewardSource, settings: RewardSettings, results: Results) -> None:
        """A group without workers yet."""
        self.stats = WorkerStats()
        self._settings = settings
        self._results = results
        self._calls: dict[int, Call] = {}
        self._waiting: deque[Call] = deque()
        self._retries: deque[Call] = deque()
        self._workers = Workers(
            WorkerSettings(
                what="reward",
                source=source,
                failure=RewardError,
                module=__name__,
                num_workers=settings.num_workers,
                memory_gib=settings.memory_gib,
                time_limit_seconds=settings.time_limit_seconds,
            ),
            RewardWorker,
        )
        self._num_works = 0
        self.lowest: float | None = None
        """The lowest reward that the function gives, if known, once it is loaded."""

    @property
    def is_ready(self) -> bool:
        """Whether some worker has loaded the function."""
        return any(worker.style is not None for worker in self._workers)

    def add(self, call: Call) -> None:
        """Score an answer."""
        self._calls[call.ticket] = call
        self._waiting.append(call)

    def cancel(self, ticket: int) -> None:
        """Drop an answer; if it is being scored, its result is ignored."""
        call = self._calls.get(ticket)
        if call is not None:
            call.is_cancelled = True

    def prioritise(self, tickets: Sequence[int]) -> None:
        """Give these priority: a caller is waiting for them."""
        wanted = set(tickets)
        first = [call for call in self._waiting if call.ticket in wanted]
        rest = [call for call in self._waiting if call.ticket not in wanted]
        self._waiting = deque([*first, *rest])

    def step(self, wait: Wait) -> None:
        """Dispatch work, then wait until a message arrives or a limit is reached."""
        self.stats.started += self._workers.start_missing()
        self._dispatch()
        for worker, message in self._workers.receive(wait, limits=list(self._limits())):
            if isinstance(message, Ready):
                worker.style, self.lowest = message.style, message.lowest
            elif isinstance(message, Report):
                self._reported(worker, message)
            elif isinstance(message, Lost):
                self._lost(worker, message.status)
        self._enforce_limits()

    def close(self) -> None:
        """Kill all workers."""
        self._workers.close()

    def _dispatch(self) -> None:
        """Dispatch to the least loaded workers until all are busy or nothing waits."""
        while self._waiting or self._retries:
            for worker in sorted(self._workers, key=lambda worker: len(worker.under_way)):
                if calls := self._work_for(worker):
                    self._send(worker, calls)
                    break
            else:
                return

    def _work_for(self, worker: RewardWorker) -> list[Call]:
        """The calls this worker should be given now."""
        if worker.style is None or worker.is_ending:
            return []
        is_idle = not worker.under_way
        if is_idle and (call := self._next(self._retries)):
            return [call]
        is_shared = worker.style.is_async and not self._holds_alone(worker)
        num_works = len({self._calls[ticket].work for ticket in worker.under_way})
        if is_idle or (is_shared and num_works < self._settings.concurrency):
            most = self._settings.batch if worker.style.is_batched else 1
            calls: list[Call] = []
            while len(calls) < most and (call := self._next(self._waiting)):
                calls.append(call)
            return calls
        return []

    def _next(self, line: deque[Call]) -> Call | None:
        while line:
            call = line.popleft()
            if not call.is_cancelled:
                return call
            del self._calls[call.ticket]
        return None

    def _holds_alone(self, worker: RewardWorker) -> bool:
        return any(self._calls[ticket].is_alone for ticket in worker.under_way)

    def _send(self, worker: RewardWorker, calls: Sequence[Call]) -> None:
        now = time.monotonic()
        if not worker.under_way:
            worker.began = now
        self._num_works += 1
        for call in calls:
            call.began, call.worker, call.work = now, worker.process.number, self._num_works
            worker.under_way.append(call.ticket)
        try:
            worker.process.send(
                Work(
                    [call.ticket for call in calls],
                    [replace(call.prompt, fields=dict(call.prompt.fields)) for call in calls],
                    [call.response for call in calls],
                )
            )
        except WorkerLostError:
            self._lost(worker, self._workers.end(worker))

    def _reported(self, worker: RewardWorker, report: Report) -> None:
        call = self._calls[report.ticket]
        together = [c for t in worker.under_way if (c := self._calls[t]).work == call.work]
        is_shared = report.num_answers > 1
        worker.under_way.remove(report.ticket)
        if call.is_cancelled:
            del self._calls[report.ticket]
        elif report.score is not None:
            del self._calls[report.ticket]
            self._results.scored(call, report.score, seconds=report.seconds)
        elif report.error in ("raised", "no_score"):
            self._results.function_failed(
                together if is_shared else [call],
                message=report.message,
                is_exception=report.error == "raised",
            )
        elif report.error == "memory":
            self._crashed(call, "memory", self._too_much())
        elif is_shared:  # the answer at fault is unknown
            self._retry_alone(call)
        else:
            self._fail(call, "timeout", self._too_long())
        worker.is_ending |= report.error == "memory"
        if worker.is_ending and not worker.under_way:
            self._kill(worker)

    def _crashed(self, call: Call, failure: Failure, detail: str) -> None:
        """A worker was lost while scoring this answer: it is retried once, alone."""
        call.crashes += 1
        if call.crashes > 1:
            self._fail(call, failure, detail)
        else:
            self._retry_alone(call)

    def _fail(self, call: Call, failure: Failure, detail: str) -> None:
        del self._calls[call.ticket]
        self._results.failed(call, failure, seconds=time.monotonic() - call.began, detail=detail)

    def _too_long(self) -> str:
        return f"it took more than {self._settings.time_limit_seconds:g} seconds"

    def _too_much(self) -> str:
        limit = self._settings.memory_gib
        return "it ran out of memory twice" + ("" if limit is None else f" (limit {limit:g} GiB)")

    def _retry_alone(self, call: Call) -> None:
        call.is_alone = True
        self._retries.append(call)

    def _lost(self, worker: RewardWorker, status: int) -> None:
        """A worker has ended: each of its answers is retried once, alone."""
        self.stats.died += 1
        for call in self._take_calls(worker):
            self._crashed(call, "died", f"the worker ended with status {status}, twice")

    def _kill(self, worker: RewardWorker) -> list[Call]:
        """Kill a worker; returns the calls that it had."""
        self._workers.end(worker)
        self.stats.killed += 1
        return self._take_calls(worker)

    def _take_calls(self, worker: RewardWorker) -> list[Call]:
        """The calls of a worker that has ended, without the cancelled ones."""
        calls = [self._calls[ticket] for ticket in worker.under_way]
        for call in calls:
            if call.is_cancelled:
                del self._calls[call.ticket]
        return [call for call in calls if not call.is_cancelled]

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.style is None:
                continue
            limit = self._limit(worker.style)
            if any(now >= self._calls[ticket].began + limit for ticket in worker.under_way):
                self._end_overdue(worker)
            elif self._is_blocking(worker) and now >= worker.began + _GRACE_SECONDS:
                self._kill(worker)
        busy = [worker for worker in self._workers if worker.under_way]
        for worker in self._workers.over_memory_limit(busy):
            for call in self._kill(worker):
                self._crashed(call, "memory", self._too_much())

    def _end_overdue(self, worker: RewardWorker) -> None:
        """A call timed out.

        If others are running too, any of them may be at fault: one in the same batch, or an async
        one that blocks the others. Then each is retried alone.
        """
        is_shared = len(worker.under_way) > 1
        for call in self._kill(worker):
            if is_shared:
                self._retry_alone(call)
            else:
                self._fail(call, "timeout", self._too_long())

    def _is_blocking(self, worker: RewardWorker) -> bool:
        """Whether a worker is only busy with cancelled answers while others wait."""
        return (
            bool(worker.under_way)
            and bool(self._waiting or self._retries)
            and all(self._calls[ticket].is_cancelled for ticket in worker.under_way)
        )

    def _limit(self, style: CallStyle) -> float:
        grace = _GRACE_SECONDS if style.is_async else 0.0
        return self._settings.time_limit_seconds + grace

    def _limits(self) -> Iterator[float]:
        """When calls that are under way reach their time limit."""
        for worker in self._workers:
            if worker.style is None:
                continue
            if self._is_blocking(worker):
                yield worker.began + _GRACE_SECONDS
            limit = self._limit(worker.style)
            yield from (self._calls[ticket].began + limit for ticket in worker.under_way)


CallError = Literal["raised", "no_score", "memory", "timeout"]
"""How a call ends without a score."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded."""

    style: CallStyle
    lowest: float | None
    """The lowest reward that it gives, if known."""


@dataclass(frozen=True, slots=True)
class Work:
    """Answers for one call of the function: several only if it is batched."""

    tickets: Sequence[int]
    prompts: Sequence[Prompt]
    responses: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The result for one answer: a score, or how the call ended without one."""

    ticket: int
    seconds: float
    score: Score | None = None
    error: CallError | None = None
    message: str = ""
    num_answers: int = 1
    """How many answers shared the call."""


def main(descriptor: int) -> None:
    """Serve the parent at the other end of the socket until it closes."""
    worker = served(descriptor, load)
    if worker is None:
        return
    reward, connection, works = worker.loaded, worker.connection, worker.works
    call = partial(reward.function, **worker.setup.source.options)
    connection.send(Ready(reward.style, reward.lowest))
    is_batched = reward.style.is_batched
    if reward.style.is_async:
        limit = worker.setup.time_limit_seconds
        asyncio.run(_serve_async(call, works, connection, is_batched=is_batched, limit=limit))
    else:
        _serve(call, works, connection, is_batched=is_batched)


def _serve(
    call: Callable[..., Any],
    works: queue.SimpleQueue[Work],
    connection: PoolConnection,
    *,
    is_batched: bool,
) -> None:
    while True:
        work = works.get()
        began = time.perf_counter()
        try:
            returned = call(*_arguments(work, is_batched=is_batched))
            if inspect.iscoroutine(returned):
                returned.close()
                raise NoScoreError(
                    "a reward must not return a coroutine; declare the function with `async def`"
                )
        except MemoryError as error:
            _report_error(connection, work, began, "memory", error)
            sys.exit(1)
        except NoScoreError as error:
            _report_error(connection, work, began, "no_score", error)
        except Exception as error:  # noqa: BLE001  the user's own; the parent shows it
            _report_error(connection, work, began, "raised", error)
        else:
            _report_scores(connection, work, began, returned, is_batched=is_batched)


async def _serve_async(
    call: Callable[..., Any],
    works: queue.SimpleQueue[Work],
    connection: PoolConnection,
    *,
    is_batched: bool,
    limit: float | None,
) -> None:
    async def serve(work: Work) -> None:
        began = time.perf_counter()
        try:
            arguments = _arguments(work, is_batched=is_batched)
            returned = await asyncio.wait_for(call(*arguments), limit)
        except MemoryError as error:
            _report_error(connection, work, began, "memory", error)
            os._exit(1)
        except NoScoreError as error:
            _report_error(connection, work, began, "no_score", error)
        except TimeoutError as error:
            # A TimeoutError of the user's code comes before the limit.
            is_ours = limit is not None and time.perf_counter() - began >= limit
            _report_error(connection, work, began, "timeout" if is_ours else "raised", error)
        except Exception as error:  # noqa: BLE001  the user's own; the parent shows it
            _report_error(connection, work, began, "raised", error)
        except SystemExit:
            os._exit(1)  # the receiving thread would keep the process alive
        else:
            _report_scores(connection, work, began, returned, is_batched=is_batched)

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(serve(await asyncio.to_thread(works.get)))


def _arguments(work: Work, *, is_batched: bool) -> tuple[object, object]:
    if is_batched:
        return list(work.prompts), list(work.responses)
    return work.prompts[0], work.responses[0]


def _report_scores(
    connection: PoolConnection, work: Work, began: float, returned: object, *, is_batched: bool
) -> None:
    """Report each answer; an invalid score is reported for its own answer."""
    num_answers = len(work.tickets)
    seconds = (time.perf_counter() - began) / num_answers
    try:
        values = values_of_batch(returned, num_answers) if is_batched else [returned]
    except NoScoreError as error:
        _report_error(connection, work, began, "no_score", error)
        return
    for ticket, value in zip(work.tickets, values, strict=True):
        try:
            score = checked_score(value)
        except NoScoreError as error:
            connection.send(Report(ticket, seconds, error="no_score", message=str(error)))
        else:
            connection.send(Report(ticket, seconds, Score(score.reward, dict(score.parts))))


def _report_error(
    connection: PoolConnection, work: Work, began: float, kind: CallError, error: Exception
) -> None:
    seconds, message = time.perf_counter() - began, str(error)
    if kind == "raised":
        # The first frame is in this module: leave it out.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        message = "".join(traceback.format_exception(type(error), error, trace))
    for ticket in work.tickets:
        connection.send(
            Report(ticket, seconds, error=kind, message=message, num_answers=len(work.tickets))
        )
