"""The engine as a guest uses it between updates: other sampling, the same weights and cache."""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.engines.native.engine import NativeEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.types import Step, Trajectory, Weights


class Guest:
    """An `Engine` over another one, which must be idle meanwhile."""

    def __init__(self, engine: NativeEngine, *, sampling: Sampling, max_tokens: int) -> None:
        """Write with this sampling, at most so many tokens."""
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens

    @property
    def slots(self) -> int:
        """Answers written at the same time."""
        return self._engine.slots

    @property
    def version(self) -> int:
        """Version of the weights it writes with."""
        return self._engine.version

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work, in order of priority."""
        self._engine.enqueue(
            [
                self._engine.request(
                    trajectory,
                    tolerance=tolerance,
                    limit=self._max_tokens,
                    sampling=self._sampling,
                )
                for trajectory in trajectories
            ]
        )

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""
        return self._engine.step()

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory."""
        return self._engine.interrupt()

    def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on."""
        self._engine.load_weights(weights)
