"""The length-aware controller. It decides; the loop acts.

From the state of the buffer it decides how many prompts to load, which trajectories to start,
whether to harvest, and what to train on. It does no I/O, has no clock and no tensors, and keeps no
state between calls, so a run can be stopped and resumed between any two rounds.
A mode, one small object, decides how interrupted generations are handled. It has three methods,
each for one trajectory: `interrupted` (it was running when the engine was stopped), `renewed` (it
is complete but waited through an update) and `resumed` (it is about to run again). Each returns
the trajectory to continue with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.strategies import RoundPlan, strategy_for, units_of
from sortedrl.types import Key, Trajectory


class Controller:
    """A strategy and a mode, with the rules that all strategies share."""

    def __init__(self, schedule: Schedule) -> None:
        """Set up the strategy and the mode of the schedule."""
        self.schedule = schedule
        self.mode = mode_for(schedule)
        self._strategy = strategy_for(schedule)

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """The plan of the round that starts now."""
        return self._strategy.plan(buffer, is_exhausted=is_exhausted)

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan, *, free_slots: int) -> int:
        """Prompts to load now as one group; 0 for none."""
        if self.to_start(buffer, plan, free_slots=free_slots) == 0:
            return 0
        return self._strategy.prompts_to_load(buffer, plan)

    def to_start(self, buffer: Buffer, plan: RoundPlan, *, free_slots: int) -> int:
        """Maximum number of waiting trajectories to start now."""
        room = free_slots
        if plan.limit is not None:
            active = buffer.num_running + buffer.num_outside
            room = min(room, plan.limit - active - buffer.num_harvestable)
        # After losing a worker, an engine temporarily has fewer slots than running trajectories.
        return max(0, room)

    def should_harvest(self, buffer: Buffer, plan: RoundPlan, *, is_exhausted: bool) -> bool:
        """Whether to stop the engine and train.

        A round also ends when nothing is left to run. Unless batches are exact, the round waits for
        a remainder that could not fill a batch of its own, so an update has a full batch or all
        that is left of the data.
        """
        if plan.target is None or buffer.num_harvestable < plan.target:
            return False
        cap = self.schedule.max_restarts
        if cap is not None and buffer.any_running_interrupted(cap):
            return False
        if self.schedule.exact:
            return True
        left = buffer.num_unfinished
        refills = not is_exhausted and self._strategy.loads_after_update(buffer)
        return left == 0 or left >= self.schedule.update_batch or refills

    def widened(self, buffer: Buffer, plan: RoundPlan) -> RoundPlan | None:
        """The plan for the rest of the round, now that nothing runs; `None` ends the round.

        When a plan that admits only some of the waiting trajectories runs out of them before an
        update batch is complete, at the end of the data, it is replaced by one that admits all.
        """
        any_work = RoundPlan(target=self.schedule.update_batch)
        has_batch = buffer.num_harvestable >= self.schedule.update_batch
        return None if has_batch or not buffer.num_waiting or plan == any_work else any_work

    def batches(self, buffer: Buffer) -> list[list[Key]]:
        """The harvestable trajectories as update batches, in training order."""
        ready = buffer.harvestable()
        if self.schedule.exact and not self.schedule.splits_rollouts:
            ready = _first_batch(ready, self.schedule)
        return self._strategy.batches(ready) if ready else []


def _first_batch(ready: list[Trajectory], schedule: Schedule) -> list[Trajectory]:
    """Whole units up to `update_batch`: older groups first, then the shortest."""
    first: list[Trajectory] = []
    for unit in sorted(
        units_of(ready, schedule),
        key=lambda unit: (unit[0].group, sum(t.num_tokens for t in unit), unit[0].key),
    ):
        if len(first) == schedule.update_batch:
            break
        first += unit
    return first


class Mode(Protocol):
    """How cached tokens of interrupted trajectories are handled."""

    @property
    def tolerance(self) -> float | None:
        """Tolerance for verifying cached tokens in the engine; `None` trusts them."""

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory to put back for one that was running."""

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """The trajectory to put back for a complete one; `None` leaves it ready."""

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """The trajectory to start for a waiting one."""


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Discards the tokens; the answer is resampled from new noise."""

    tolerance: None = None

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """Without its tokens, on a new noise stream."""
        return replace(
            _emptied(trajectory),
            attempt=trajectory.attempt + 1,
            interruptions=trajectory.interruptions + 1,
        )

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """Complete answers of older weights are resampled too."""
        if _age(trajectory, version) == 0:
            return None
        return replace(_emptied(trajectory), attempt=trajectory.attempt + 1)

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """Unchanged, unless it is a conversation with turns of older weights: resampled."""
        renewed = self.renewed(trajectory, version=version)
        return trajectory if renewed is None else renewed


@dataclass(frozen=True, slots=True)
class Redraw:
    """Discards the tokens; the answer is resampled from its own noise.

    Where new and old weights agree, the same tokens come back, so an answer that was interrupted
    because it is long is not traded for a shorter one.
    """

    tolerance: None = None

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """Without its tokens, on the same noise stream."""
        return replace(_emptied(trajectory), interruptions=trajectory.interruptions + 1)

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """Complete answers of older weights are resampled too."""
        return None if _age(trajectory, version) == 0 else _emptied(trajectory)

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """Unchanged, unless it is a conversation with turns of older weights: resampled."""
        renewed = self.renewed(trajectory, version=version)
        return trajectory if renewed is None else renewed


@dataclass(frozen=True, slots=True)
class Partial:
    """Keeps tokens and their log-probabilities, up to `max_staleness`."""

    max_staleness: int | None = None
    tolerance: None = None

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """With all its tokens."""
        return replace(trajectory, interruptions=trajectory.interruptions + 1)

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """A complete answer is kept until it is too stale."""
        return _emptied(trajectory) if self._is_too_old(trajectory, version) else None

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """Without its tokens if they are too stale.

        Versions only grow along an answer, so the first token is the oldest, and dropping it drops
        all tokens that follow.
        """
        return _emptied(trajectory) if self._is_too_old(trajectory, version) else trajectory

    def _is_too_old(self, trajectory: Trajectory, version: int) -> bool:
        return self.max_staleness is not None and _age(trajectory, version) > self.max_staleness


@dataclass(frozen=True, slots=True)
class Coupled:
    """Keeps the tokens that the new weights also sample from the same noise."""

    tolerance: float = 0.0

    def interrupted(self, trajectory: Trajectory) -> Trajectory:
        """With all its tokens; the engine verifies them."""
        return replace(trajectory, interruptions=trajectory.interruptions + 1)

    def renewed(self, trajectory: Trajectory, *, version: int) -> Trajectory | None:
        """Complete answers of older weights are verified: one prefill if nothing changed."""
        if _age(trajectory, version) == 0:
            return None
        return replace(trajectory, finish_reason=None, reward=None)

    def resumed(self, trajectory: Trajectory, *, version: int) -> Trajectory:
        """Unchanged."""
        return trajectory


def mode_for(schedule: Schedule) -> Mode:
    """The mode of a schedule."""
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
