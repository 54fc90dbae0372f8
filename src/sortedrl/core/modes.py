"""How interrupted generations are handled: one small object per mode.

A mode is asked three questions, each about one trajectory:
`interrupted` (it ran when the engine was stopped), `renewed` (it is complete but waited through
an update) and `resumed` (it is about to run again). It answers with the trajectory to go on with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from sortedrl.config.schedule import Schedule
from sortedrl.types import Trajectory


class Mode(Protocol):
    """The rules for cached tokens."""

    @property
    def tolerance(self) -> float | None:
        """How the engine treats cached tokens: `None` trusts them, a number verifies them."""

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """What goes back to waiting in place of a trajectory that was running."""

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """What goes back to waiting in place of a complete one; `None` leaves it ready."""

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """What is started in place of a waiting trajectory."""


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Tokens are thrown away, and the answer is drawn again from fresh noise."""

    tolerance: None = None

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """Without its tokens, on a new noise stream."""
        return replace(
            _emptied(trajectory),
            attempt=trajectory.attempt + 1,
            interruptions=trajectory.interruptions + 1,
        )

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """A complete answer of older weights is drawn again too."""
        if _age(trajectory, version) == 0:
            return None
        return replace(_emptied(trajectory), attempt=trajectory.attempt + 1)

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """As it waited; a conversation that waited with turns of older weights is drawn again."""
        renewed = self.renewed(trajectory, version=version)
        return trajectory if renewed is None else renewed


@dataclass(frozen=True, slots=True)
class Redraw:
    """Tokens are thrown away, and the answer is drawn again from its own noise.

    Where the new weights agree with the old ones, the same tokens come back; so an answer that was
    interrupted because it is long is not traded for a shorter one.
    """

    tolerance: None = None

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """Without its tokens, on the same noise stream."""
        return replace(_emptied(trajectory), interruptions=trajectory.interruptions + 1)

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """A complete answer of older weights is drawn again too."""
        return None if _age(trajectory, version) == 0 else _emptied(trajectory)

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """As it waited; a conversation that waited with turns of older weights is drawn again."""
        renewed = self.renewed(trajectory, version=version)
        return trajectory if renewed is None else renewed


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens and their log-probabilities are kept, unless they are older than allowed."""

    max_staleness: int | None = None
    tolerance: None = None

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """With all its tokens."""
        return replace(trajectory, interruptions=trajectory.interruptions + 1)

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """A complete answer stands until it is too old."""
        return _emptied(trajectory) if self._is_too_old(trajectory, version) else None

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """Written anew if its tokens are too old.

        Versions only grow along an answer, so the first token is the oldest one,
        and dropping it drops what was built on it.
        """
        return _emptied(trajectory) if self._is_too_old(trajectory, version) else trajectory

    def _is_too_old(self, trajectory: Trajectory, version: int) -> bool:
        return self.max_staleness is not None and _age(trajectory, version) > self.max_staleness


@dataclass(frozen=True, slots=True)
class Coupled:
    """Tokens are kept as far as the new weights write them too, from the same noise."""

    tolerance: float = 0.0

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """With all its tokens, for the engine to verify."""
        return replace(trajectory, interruptions=trajectory.interruptions + 1)

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """A complete answer of older weights is verified: one prefill if nothing changed."""
        if _age(trajectory, version) == 0:
            return None
        return replace(trajectory, finish_reason=None, reward=None)

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """As it waited."""
        return trajectory


def mode_for(schedule: Schedule) -> Mode:
    """The mode a schedule names."""
    if schedule.mode == "on_policy":
        return OnPolicy()
    if schedule.mode == "redraw":
        return Redraw()
    if schedule.keeps_stale_tokens:
        return Partial(max_staleness=schedule.max_staleness)
    return Coupled(tolerance=schedule.tolerance or 0.0)


def _emptied(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, segments=(), given=(), finish_reason=None, reward=None)


def _age(trajectory: Trajectory, version: int) -> int:
    oldest = trajectory.oldest_version
    return 0 if oldest is None else version - oldest
