"""An engine as a guest uses it between updates: other sampling, the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from sortedrl.engines.sampling import Sampling
from sortedrl.protocols import Engine
from sortedrl.types import Step, Trajectory, Weights


class RolloutEngine(Engine, Protocol):
    """What a run asks of its engine beyond the loop: to be lent, and to be let go of."""

    @property
    def name(self) -> str:
        """What it is, for messages."""

    def submit_with(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        """Take on work with other sampling and another limit."""

    def close(self) -> None:
        """Let go of everything it holds; a second time it does nothing."""


@runtime_checkable
class Releasable(Protocol):
    """An engine that shares its memory with a trainer, in turns."""

    def release(self) -> None:
        """Let go of what only writing needs, until work comes; only while there is none."""


class Guest:
    """An `Engine` over another one, which must be idle meanwhile."""

    def __init__(self, engine: RolloutEngine, *, sampling: Sampling, max_tokens: int) -> None:
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
        self._engine.submit_with(
            trajectories,
            tolerance=tolerance,
            sampling=self._sampling,
            max_tokens=self._max_tokens,
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
