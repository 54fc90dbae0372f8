"""The engine of a run on a cluster: lost workers are replaced, and new machines are made use of.

Both happen when new weights come, because nothing runs then. A cluster that has no room is asked
again at the next hand-over; the run goes on with the workers it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from sortedrl.cluster.fleet import Fleet
from sortedrl.cluster.nodes import free_resources
from sortedrl.cluster.placement import joining
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, EngineLost
from sortedrl.training.cluster import Cluster
from sortedrl.types import Step, Trajectory, Weights


class ElasticEngine:
    """The pool of a fleet that is mended and grows between two rounds."""

    def __init__(self, fleet: Fleet, cluster: Cluster, *, tell: Callable[[str], None]) -> None:
        """The workers are there."""
        self.fleet = fleet
        self._cluster = cluster
        self._tell = tell
        self._complaint: str | None = None

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self.fleet.pool.name

    @property
    def slots(self) -> int:
        """Answers that all living workers write at the same time."""
        return self.fleet.pool.slots

    @property
    def version(self) -> int:
        """Version of the weights it writes with."""
        return self.fleet.pool.version

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work, in order of priority."""
        self.fleet.pool.submit(trajectories, tolerance=tolerance)

    def submit_with(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        """The same with other sampling and another limit."""
        self.fleet.pool.submit_with(
            trajectories, tolerance=tolerance, sampling=sampling, max_tokens=max_tokens
        )

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""
        return self.fleet.pool.step()

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory with its tokens so far."""
        return self.fleet.pool.interrupt()

    def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on, with as many workers as there can be."""
        self.fleet.pool.load_weights(weights)
        known = len(self.fleet.workers)
        try:
            self.fleet.refill(lambda: weights)
            while self._may_grow:
                self.fleet.add(weights)
            self._complaint = None
        except EngineError as error:
            self._complain(str(error))
        for worker in self.fleet.workers[known:]:
            self._tell(f"{worker.name} has joined: {self.slots} slots now")

    def release(self) -> None:
        """Have all workers let go of what only writing needs; nothing is being written."""
        for worker in self.fleet.workers:
            if not worker.is_lost:
                # Whoever is lost now is left out when work comes.
                with suppress(EngineLost):
                    worker.release()

    def close(self) -> None:
        """End all workers."""
        self.fleet.close()

    @property
    def _may_grow(self) -> bool:
        living = sum(not worker.is_lost for worker in self.fleet.workers)
        if living >= self._cluster.most_workers:
            return False
        free, wanted = free_resources(), joining(self._cluster).total
        return all(free.get(name, 0.0) >= amount for name, amount in wanted.items())

    def _complain(self, words: str) -> None:
        """Say it once, not at every hand-over."""
        if words != self._complaint:
            self._tell(words)
        self._complaint = words
