"""The reward pool: scores answers in worker processes, in order of completion.

A supervisor thread runs the workers, so scoring continues while the engine generates. `submit` and
`cancel` never block. `PoolScorer` implements the `Scorer` protocol of the loop on top of the pool:
every complete answer is scored while others are generated.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from sortedrl.config.data import RewardSettings
from sortedrl.errors import RewardError
from sortedrl.rewards.functions import RewardSource
from sortedrl.rewards.pool.process import Supervisor
from sortedrl.rewards.pool.score import Call, CallResult, Failure, Score
from sortedrl.rewards.pool.workers import WorkerGroup, WorkerStats
from sortedrl.types import Key, Prompt, Scoring, Trajectory

_LOG = logging.getLogger(__name__)
_SHOWN_ANSWERS = 5
_SHOWN_CHARACTERS = 200


@dataclass(slots=True)
class PoolStats:
    """Counters of the pool."""

    scored: int = 0
    seconds: float = 0.0
    """Time spent inside the function, over all workers."""
    failures: Counter[Failure] = field(default_factory=Counter)
    workers: WorkerStats = field(default_factory=WorkerStats)


class RewardPool:
    """Runs a reward function in worker processes; use it in a `with` block."""

    def __init__(
        self,
        source: RewardSource,
        settings: RewardSettings | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        """Start the workers, and wait until one has loaded the function.

        Answers whose scoring failed are written to `folder`.
        """
        self.settings = settings if settings is not None else RewardSettings()
        self.stats = PoolStats()
        self._source = source
        self._folder = folder
        self._supervisor = Supervisor(self._supervise, name="rewards", failure=RewardError)
        self._changed = self._supervisor.changed
        self._requests: deque[Call | int | tuple[int, ...]] = deque()
        self._results: dict[int, CallResult] = {}
        self._open: dict[int, Call] = {}
        self._next_ticket = 0
        self._lowest: float | None = None
        self._lowest_scored: float | None = None
        self._is_ready = False
        self._supervisor.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_ready or not self._supervisor.is_running)
                self._supervisor.raise_error()
        except BaseException:
            self.close()
            raise

    def submit(self, prompt: Prompt, response: str, *, sample_index: int = 0) -> int:
        """Start scoring an answer; returns its ticket."""
        with self._changed:
            self._supervisor.raise_error()
            if self._supervisor.is_closing:
                raise RewardError("the reward pool is closed")
            ticket = self._next_ticket
            self._next_ticket += 1
            call = Call(ticket, prompt, sample_index, response)
            self._open[ticket] = call
            self._requests.append(call)
        self._supervisor.wake()
        return ticket

    def cancel(self, ticket: int) -> None:
        """Cancel an answer; it gets no result."""
        with self._changed:
            self._results.pop(ticket, None)
            if self._open.pop(ticket, None) is None:
                return
            self._requests.append(ticket)
        self._supervisor.wake()

    def completed(self) -> list[CallResult]:
        """The results that were not returned yet, in order of completion."""
        with self._changed:
            self._supervisor.raise_error()
            results = list(self._results.values())
            self._results.clear()
        return results

    def wait(self, tickets: Sequence[int]) -> list[CallResult]:
        """Wait for these answers; returns their results in this order. They get priority."""
        with self._changed:
            unknown = [t for t in tickets if t not in self._open and t not in self._results]
            if unknown:
                raise ValueError(f"tickets {unknown} were cancelled, returned, or never submitted")
            if self._open.keys() - set(tickets):
                self._requests.append(tuple(tickets))
                self._supervisor.wake()
            self._changed.wait_for(
                lambda: (
                    self._supervisor.error is not None or all(t in self._results for t in tickets)
                )
            )
            self._supervisor.raise_error()
            return [self._results.pop(ticket) for ticket in tickets]

    @property
    def failure_reward(self) -> float:
        """The reward of an answer whose scoring failed."""
        if self.settings.failure_reward is not None:
            return self.settings.failure_reward
        return min(0.0, self._lowest if self._lowest is not None else 0.0)

    def close(self) -> None:
        """Stop the workers; unfinished answers are dropped."""
        self._supervisor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def scored(self, call: Call, score: Score, *, seconds: float) -> None:
        """Record a score."""
        self.stats.scored += 1
        self.stats.seconds += seconds
        lowest = self._lowest_scored
        self._lowest_scored = score.reward if lowest is None else min(lowest, score.reward)
        self._done(call, score, seconds=seconds)

    def failed(self, call: Call, failure: Failure, *, seconds: float, detail: str) -> None:
        """Count and log a failure."""
        if call.ticket not in self._open:
            return
        self.stats.failures[failure] += 1
        what = f"reward {self._source.function!r} for {call.name}: {detail}"
        self._write_failure(call, failure)
        if self.settings.on_failure == "stop":
            self._supervisor.stop(
                RewardError(what, prompt_id=call.prompt.id, response=call.response)
            )
            return
        if self.stats.failures[failure] == 1:
            _LOG.warning("%s; %s", what, self._consequence())
        score = Score(self.failure_reward) if self.settings.on_failure == "score" else None
        self._done(call, score, seconds=seconds, failure=failure)

    def function_failed(self, calls: Sequence[Call], *, message: str, is_exception: bool) -> None:
        """Stop the run: the function raised an exception or returned an invalid score."""
        if self._supervisor.error is not None:
            return
        call = calls[0]
        names = ", ".join(call.name for call in calls[:_SHOWN_ANSWERS])
        hidden = len(calls) - _SHOWN_ANSWERS
        more = (f" and {hidden} more" if hidden > 0 else "") + (" in one batch" * (len(calls) > 1))
        saved = self._write_error(calls, message)
        what = "raised" if is_exception else "gave no reward"
        self._supervisor.stop(
            RewardError(
                f"the reward {self._source.function!r} {what} for {names}{more} ({saved}):\n"
                f"{message.rstrip()}\n"
                f"The response to prompt {call.prompt.id} begins "
                f"{call.response[:_SHOWN_CHARACTERS]!r}; its prompt.fields has: "
                f"{', '.join(sorted(call.prompt.fields)) or 'nothing'}",
                prompt_id=call.prompt.id,
                response=call.response,
            )
        )

    def _done(
        self, call: Call, score: Score | None, *, seconds: float, failure: Failure | None = None
    ) -> None:
        result = CallResult(
            ticket=call.ticket,
            score=score,
            began=call.began,
            seconds=seconds,
            worker=call.worker,
            failure=failure,
        )
        with self._changed:
            if self._open.pop(call.ticket, None) is not None:
                self._results[call.ticket] = result
                self._changed.notify_all()

    def _supervise(self) -> None:
        group = WorkerGroup(self._source, self.settings, self)
        self.stats.workers = group.stats
        try:
            while self._supervisor.is_running:
                group.step(self._supervisor.wait)
                self._apply_requests(group)
                if not self._is_ready and group.is_ready:
                    self._lowest = group.lowest
                    with self._changed:
                        self._is_ready = True
                        self._changed.notify_all()
        finally:
            group.close()

    def _apply_requests(self, group: WorkerGroup) -> None:
        while self._requests:
            request = self._requests.popleft()
            if isinstance(request, Call):
                group.add(request)
            elif isinstance(request, tuple):
                group.prioritise(request)
            else:
                group.cancel(request)

    def _consequence(self) -> str:
        if self.settings.on_failure == "skip":
            return "the answer gets no reward (reward.on_failure is 'skip')"
        text = f"the answer gets the reward {self.failure_reward:g} (failure_reward)"
        if self._lowest_scored is not None and self.failure_reward > self._lowest_scored:
            text += (
                f", which is more than the {self._lowest_scored:g} that the function gave another "
                "answer: set failure_reward to the reward of a wrong answer, so that failing does "
                "not pay"
            )
        return text

    def _write_failure(self, call: Call, failure: Failure) -> None:
        if self._folder is not None:
            with (self._folder / "reward-failures.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"failure": failure, **_described(call)}) + "\n")

    def _write_error(self, calls: Sequence[Call], message: str) -> str:
        if self._folder is None:
            return "the exception holds the response"
        path = self._folder / "reward-error.json"
        content = {"error": message, "answers": [_described(call) for call in calls]}
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
        return f"prompt and response are in {path}"


def _described(call: Call) -> dict[str, object]:
    return {
        "prompt_id": call.prompt.id,
        "sample_index": call.sample_index,
        "fields": dict(call.prompt.fields),
        "response": call.response,
    }


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A submitted answer, and its submission time on the pool's clock and on the run's."""

    number: int
    pool_seconds: float
    run_seconds: float


class PoolScorer:
    """Scores trajectories with a reward pool."""

    def __init__(
        self,
        pool: RewardPool,
        *,
        text: Callable[[Trajectory], str],
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text` decodes an answer, `seconds` is the clock of the run."""
        self._pool = pool
        self._text = text
        self._seconds = seconds
        self._tickets: dict[Key, _Ticket] = {}

    def submit(self, trajectory: Trajectory) -> None:
        """Start scoring a complete answer; never blocks."""
        number = self._pool.submit(
            trajectory.prompt, self._text(trajectory), sample_index=trajectory.sample_index
        )
        self._tickets[trajectory.key] = _Ticket(number, time.monotonic(), self._seconds())

    def cancel(self, trajectory: Trajectory) -> None:
        """Cancel an answer that will be renewed before it is trained on."""
        ticket = self._tickets.pop(trajectory.key, None)
        if ticket is not None:
            self._pool.cancel(ticket.number)

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Wait for these answers; returns them in order with their rewards.

        Answers that were not submitted (after a restart) are submitted now.
        """
        for trajectory in trajectories:
            if trajectory.key not in self._tickets:
                self.submit(trajectory)
        tickets = [self._tickets.pop(trajectory.key) for trajectory in trajectories]
        results = self._pool.wait([ticket.number for ticket in tickets])
        return [
            _scored(trajectory, ticket, result)
            for trajectory, ticket, result in zip(trajectories, tickets, results, strict=True)
        ]


def _scored(trajectory: Trajectory, ticket: _Ticket, result: CallResult) -> Trajectory:
    """The answer with its reward, if any."""
    waited = max(0.0, result.began - ticket.pool_seconds)
    scoring = Scoring(
        worker=result.worker, start=ticket.run_seconds + waited, seconds=result.seconds
    )
    if result.score is None:
        return replace(trajectory, scoring=scoring)
    score = result.score
    return replace(trajectory, reward=score.reward, reward_parts=score.parts, scoring=scoring)
