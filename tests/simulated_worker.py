"""The simulated engine inside a rollout worker, for tests and benchmarks of the cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sortedrl.core.clock import VirtualClock
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.simulate.costs import Costs, ticks
from sortedrl.simulate.engine import SimulatedEngine
from sortedrl.simulate.lengths import Lengths, LengthSettings
from sortedrl.types import Step, Trajectory, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFactory:
    """Makes the simulated engine for a rollout worker; it takes no time unless it pauses."""

    slots: int
    max_tokens: int
    lengths: LengthSettings = field(default_factory=LengthSettings)
    samples_per_prompt: int = 1
    costs: Costs = field(default_factory=ticks)
    seed: int = 0
    pause_seconds: float = 0.0
    """Real seconds of every step."""

    def engine(self) -> RolloutEngine:
        """A new engine with a clock of its own."""
        lengths = Lengths(
            self.lengths,
            seed=self.seed,
            max_tokens=self.max_tokens,
            samples_per_prompt=self.samples_per_prompt,
        )
        engine = SimulatedEngine(
            slots=self.slots, lengths=lengths, costs=self.costs, clock=VirtualClock()
        )
        return PacedEngine(engine, pause_seconds=self.pause_seconds)


class PacedEngine:
    """A simulated engine whose steps take time, for a worker to hold."""

    name = "simulated engine"

    def __init__(self, engine: SimulatedEngine, *, pause_seconds: float) -> None:
        """Each step takes so long."""
        self._engine = engine
        self._pause = pause_seconds

    @property
    def slots(self) -> int:
        """Answers written at the same time."""
        return self._engine.slots

    @property
    def version(self) -> int:
        """Version of the weights it would write with."""
        return self._engine.version

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """None: it accepts everything."""
        return ()

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work; lengths are drawn regardless of the sampling."""
        self._engine.submit(trajectories, tolerance=tolerance)

    def step(self) -> Step:
        """Work until the next answer is complete."""
        if self._pause:
            time.sleep(self._pause)
        return self._engine.step()

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back everything that is not complete."""
        return self._engine.interrupt()

    def load_weights(self, weights: Weights) -> None:
        """Take over the version."""
        self._engine.load_weights(weights)

    def close(self) -> None:
        """Nothing to let go of."""
