"""Answers on their way through an engine that is on trial: each must come back exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sortedrl.engines.guest import RolloutEngine
from sortedrl.errors import EngineError
from sortedrl.types import Key, Trajectory

Submit = Callable[[Sequence[Trajectory]], None]


class SelfTestFailed(EngineError):
    """The engine does not do what a run relies on."""


def expect(claim: bool, otherwise: str) -> None:
    """Fail the self-test unless a claim holds."""
    if not claim:
        raise SelfTestFailed(otherwise)


class Rollout:
    """Keeps the books that the engine should keep too."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Nothing is asked for yet."""
        self.seconds = 0.0
        """Spent in the engine."""
        self.told_tokens = 0
        """Tokens it says it has written."""
        self._engine = engine
        self._open: set[Key] = set()

    def submit(self, trajectories: Sequence[Trajectory], *, by: Submit) -> None:
        """Ask for these answers, in a way of the caller's."""
        self._open |= {trajectory.key for trajectory in trajectories}
        by(trajectories)

    def until(self, tokens: int) -> list[Trajectory]:
        """Step until it has told of so many tokens; gives the answers completed on the way."""
        goal = self.told_tokens + tokens
        finished: list[Trajectory] = []
        while self.told_tokens < goal and self._open:
            finished += self._step()
        return finished

    def to_end(self) -> list[Trajectory]:
        """Step until all answers are complete."""
        finished: list[Trajectory] = []
        while self._open:
            finished += self._step()
        left = self._engine.interrupt()
        expect(not left, f"it gave back {len(left)} answers after all were complete")
        return finished

    def interrupt(self) -> list[Trajectory]:
        """Stop; gives the unfinished answers."""
        began = time.monotonic()
        stopped = list(self._engine.interrupt())
        self.seconds += time.monotonic() - began
        self._came_back(stopped)
        expect(not self._open, f"{len(self._open)} answers did not come back from an interruption")
        return stopped

    def _step(self) -> Sequence[Trajectory]:
        began = time.monotonic()
        step = self._engine.step()
        self.seconds += time.monotonic() - began
        expect(
            bool(step.finished or step.decoded_tokens),
            f"it lost {len(self._open)} answers: they are not complete, but it writes nothing more",
        )
        self.told_tokens += step.decoded_tokens
        self._came_back(step.finished)
        return step.finished

    def _came_back(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            expect(
                trajectory.key in self._open,
                f"answer {trajectory.key} came back twice, or was never asked for",
            )
            self._open.remove(trajectory.key)
