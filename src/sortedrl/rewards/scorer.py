"""A `Scorer` over a reward pool: every complete answer is scored while others are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sortedrl.rewards.pool import RewardPool
from sortedrl.types import Key, Trajectory


class PoolScorer:
    """Hands answers to a pool as text, and gives them back with their rewards."""

    def __init__(self, pool: RewardPool, *, text: Callable[[Trajectory], str]) -> None:
        """`text` is an answer as a person reads it."""
        self._pool = pool
        self._text = text
        self._tickets: dict[Key, int] = {}

    def submit(self, trajectory: Trajectory) -> None:
        """Start to score a complete answer; never waits."""
        self._tickets[trajectory.key] = self._pool.submit(
            trajectory.prompt, self._text(trajectory), sample_index=trajectory.sample_index
        )

    def cancel(self, trajectory: Trajectory) -> None:
        """Forget an answer that will be renewed before it is trained on."""
        ticket = self._tickets.pop(trajectory.key, None)
        if ticket is not None:
            self._pool.cancel(ticket)

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Wait for these answers and give them back, in order, with their rewards.

        One that was not submitted, as after a restart, is submitted now.
        """
        for trajectory in trajectories:
            if trajectory.key not in self._tickets:
                self.submit(trajectory)
        outcomes = self._pool.wait([self._tickets.pop(t.key) for t in trajectories])
        return [
            trajectory
            if outcome.score is None
            else replace(trajectory, reward=outcome.score.reward, reward_parts=outcome.score.parts)
            for trajectory, outcome in zip(trajectories, outcomes, strict=True)
        ]
