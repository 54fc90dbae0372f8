"""Station 3: the length-aware controller. It answers questions; the loop acts.

From the buffer's counts it says how many prompts to load, which work to start, whether to harvest
now, and what to train on. It does no I/O, has no clock and no tensors, and keeps no state of its
own between calls, so a run can be cut and taken up again between any two rounds.
"""

from __future__ import annotations

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.modes import mode_for
from sortedrl.core.strategies import Plan, strategy_for, units_of
from sortedrl.types import Key, Trajectory


class Controller:
    """A strategy and a mode, with the rules that all strategies share."""

    def __init__(self, schedule: Schedule) -> None:
        """Take the rules from the schedule."""
        self.schedule = schedule
        self.mode = mode_for(schedule)
        self._strategy = strategy_for(schedule)

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """The rules of the round that starts now."""
        return self._strategy.plan(buffer, is_exhausted=is_exhausted)

    def prompts_to_load(self, buffer: Buffer, plan: Plan, *, free_slots: int) -> int:
        """Prompts to load now as one group; 0 for none."""
        if self.to_start(buffer, plan, free_slots=free_slots) == 0:
            return 0
        return self._strategy.prompts_to_load(buffer, plan)

    def to_start(self, buffer: Buffer, plan: Plan, *, free_slots: int) -> int:
        """Waiting trajectories to start now, at most."""
        room = free_slots
        if plan.limit is not None:
            active = buffer.num_running + buffer.num_outside
            room = min(room, plan.limit - active - buffer.num_harvestable)
        # An engine that lost a part of itself has fewer slots than answers for a while.
        return max(0, room)

    def should_harvest(self, buffer: Buffer, plan: Plan, *, is_exhausted: bool) -> bool:
        """Whether enough is complete to stop the engine and train.

        A round also ends when nothing is left to run. Unless batches are exact, a remainder that
        could not fill one of its own is waited for, so an update holds a batch or all that is left
        of the data.
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

    def widened(self, buffer: Buffer, plan: Plan) -> Plan | None:
        """The plan for the rest of the round, now that nothing runs; `None` ends the round.

        A plan that admits only some of the waiting work, and has used it up before an update
        batch is complete, gives way to one that admits all of it. This is the end of the data.
        """
        any_work = Plan(target=self.schedule.update_batch)
        has_batch = buffer.num_harvestable >= self.schedule.update_batch
        return None if has_batch or not buffer.num_waiting or plan == any_work else any_work

    def batches(self, buffer: Buffer) -> list[list[Key]]:
        """The harvestable trajectories as update batches, in training order."""
        ready = buffer.harvestable()
        if self.schedule.exact and not self.schedule.splits_rollouts:
            ready = _first_batch(ready, self.schedule)
        return self._strategy.batches(ready) if ready else []


def _first_batch(ready: list[Trajectory], schedule: Schedule) -> list[Trajectory]:
    """Whole units up to `update_batch`: those of older groups first, then the shortest."""
    first: list[Trajectory] = []
    for unit in sorted(
        units_of(ready, schedule),
        key=lambda unit: (unit[0].group, sum(t.num_tokens for t in unit), unit[0].key),
    ):
        if len(first) == schedule.update_batch:
            break
        first += unit
    return first
