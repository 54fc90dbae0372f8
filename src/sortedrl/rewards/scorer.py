"""A `Scorer` over a reward pool: every complete answer is scored while others are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sortedrl.rewards.calls import Outcome
from sortedrl.rewards.pool import RewardPool
from sortedrl.types import Key, Scoring, Trajectory


@dataclass(frozen=True, slots=True)
class _Ticket:
    """An answer at the pool, and when it came there: on the pool's clock and on the run's."""

    number: int
    pool_seconds: float
    run_seconds: float


class PoolScorer:
    """Hands answers to a pool as text, and gives them back with their rewards."""

    def __init__(
        self,
        pool: RewardPool,
        *,
        text: Callable[[Trajectory], str],
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text` is an answer as a person reads it, `seconds` the time of the run."""
        self._pool = pool
        self._text = text
        self._seconds = seconds
        self._tickets: dict[Key, _Ticket] = {}

    def submit(self, trajectory: Trajectory) -> None:
        """Start to score a complete answer; never waits."""
        number = self._pool.submit(
            trajectory.prompt, self._text(trajectory), sample_index=trajectory.sample_index
        )
        self._tickets[trajectory.key] = _Ticket(number, time.monotonic(), self._seconds())

    def cancel(self, trajectory: Trajectory) -> None:
        """Forget an answer that will be renewed before it is trained on."""
        ticket = self._tickets.pop(trajectory.key, None)
        if ticket is not None:
            self._pool.cancel(ticket.number)

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Wait for these answers and give them back, in order, with their rewards.

        One that was not submitted, as after a restart, is submitted now.
        """
        for trajectory in trajectories:
            if trajectory.key not in self._tickets:
                self.submit(trajectory)
        tickets = [self._tickets.pop(trajectory.key) for trajectory in trajectories]
        outcomes = self._pool.wait([ticket.number for ticket in tickets])
        return [
            _scored(trajectory, ticket, outcome)
            for trajectory, ticket, outcome in zip(trajectories, tickets, outcomes, strict=True)
        ]


def _scored(trajectory: Trajectory, ticket: _Ticket, outcome: Outcome) -> Trajectory:
    """The answer with its reward, if it got one."""
    waited = max(0.0, outcome.began - ticket.pool_seconds)
    scoring = Scoring(
        worker=outcome.worker, start=ticket.run_seconds + waited, seconds=outcome.seconds
    )
    if outcome.score is None:
        return replace(trajectory, scoring=scoring)
    score = outcome.score
    return replace(trajectory, reward=score.reward, reward_parts=score.parts, scoring=scoring)
