"""An engine that writes no text but takes as long, and the trainer and prompts that go with it.

It jumps from one finished answer to the next: see `simulated_batch` for what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.clock import VirtualClock
from sortedrl.engines.simulated_batch import BRANCH, SimulatedBatch, Zeros
from sortedrl.simulate.costs import Costs
from sortedrl.simulate.lengths import Lengths
from sortedrl.types import Prompt, Step, TrainBatch, Trajectory, Weights

__all__ = [
    "BRANCH",
    "SimulatedEngine",
    "SimulatedPrompts",
    "SimulatedScorer",
    "SimulatedTrainer",
    "Zeros",
]


class SimulatedEngine:
    """Continuous batching on a virtual clock."""

    def __init__(self, *, slots: int, lengths: Lengths, costs: Costs, clock: VirtualClock) -> None:
        """An empty engine with the weights of version 0."""
        self.slots = slots
        self._batch = SimulatedBatch(slots=slots, lengths=lengths, costs=costs)
        self._costs = costs
        self._clock = clock

    @property
    def version(self) -> int:
        """Version of the weights it writes with."""
        return self._batch.version

    @version.setter
    def version(self, version: int) -> None:
        self._batch.version = version

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work; what exceeds the slots queues."""
        self._batch.queue([(trajectory, tolerance) for trajectory in trajectories])

    def step(self) -> Step:
        """Work until the next answer is complete."""
        batch = self._batch
        prefilled = batch.admit()
        count, running = batch.steps_to_finish, batch.num_running
        self._clock.advance(
            prefilled * self._costs.prefill_token_seconds + batch.decode_seconds(count)
        )
        return Step(
            finished=tuple(batch.decode(count)),
            decoded_tokens=running * count,
            prefilled_tokens=prefilled,
        )

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back everything that is not complete."""
        self._clock.advance(self._costs.interrupt_seconds)
        return [trajectory for trajectory, _ in self._batch.stop()]

    def load_weights(self, weights: Weights) -> None:
        """Take over the version; the rest is time."""
        assert not self._batch.num_running, "weights change only while nothing runs"
        self._clock.advance(self._costs.hand_over_seconds)
        self.version = weights.version


class SimulatedTrainer:
    """Counts versions and lets time pass."""

    def __init__(self, *, costs: Costs, clock: VirtualClock) -> None:
        """At version 0."""
        self.version = 0
        self._costs = costs
        self._clock = clock

    def update(self, batch: TrainBatch) -> None:
        """One update's worth of seconds."""
        tokens = batch.num_tokens * self._costs.update_token_seconds
        self._clock.advance(self._costs.update_seconds + tokens)
        self.version += 1

    def weights(self) -> Weights:
        """Nothing but a version."""
        return Weights(self.version)


class SimulatedScorer:
    """Gives no reward and takes no time."""

    def submit(self, trajectory: Trajectory) -> None:
        """Nothing to do."""

    def cancel(self, trajectory: Trajectory) -> None:
        """Nothing to do."""

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """As they came."""
        return trajectories


class SimulatedPrompts:
    """Prompts that are only numbers, all of one length."""

    def __init__(self, count: int, *, prompt_tokens: int) -> None:
        """`count` prompts."""
        self._count = count
        self._tokens = range(prompt_tokens)
        self._next = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self._next >= self._count

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts."""
        first = self._next
        self._next = min(first + count, self._count)
        return [Prompt(id=number, tokens=self._tokens) for number in range(first, self._next)]
