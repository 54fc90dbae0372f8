"""The scheduling strategies: one small object each.

A strategy is asked for a `RoundPlan` at the start of each round, for the number of prompts to load
during the round, and after the harvest for the update batches.
It reads the buffer's counts and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sortedrl.config.schedule import Schedule, StrategyName
from sortedrl.core.buffer import Buffer, Feed
from sortedrl.core.randomness import mix
from sortedrl.types import Key, Trajectory

_ORDER_KEY = 0x6F72646572


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The rules of one round."""

    feed: Feed = Feed.OLDEST_FIRST
    target: int | None = None
    """Harvest when this many are harvestable; `None`: when nothing is left to run."""
    limit: int | None = None
    """Maximum of running and harvestable trajectories; `None`: as many as there are slots."""


class Strategy(Protocol):
    """The rules of one scheduler."""

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """The plan of the round that starts now."""

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan) -> int:
        """Prompts to load now that a slot is free; 0 for none."""

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Whether prompts may be loaded once everything harvestable is trained."""

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """The harvestable trajectories as update batches, in training order."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Rolls out one update batch of prompts at a time; the update waits for the longest answer."""

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """Run everything to completion."""
        return RoundPlan()

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan) -> int:
        """One update batch, once the last one is trained."""
        if buffer.oldest_open_group is not None:
            return 0
        return math.ceil(self.schedule.update_batch / self.schedule.samples_per_prompt)

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Never: everything must be trained first."""
        return buffer.num_unfinished == 0

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything as one batch, in the order of the data."""
        return [sorted(t.key for t in ready)]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Rolls out a whole group, and then splits it into updates.

    Units (an answer, or all answers to a prompt) go to random mini-batches; with `is_sorted`, they
    are ordered by length instead. The two differ in nothing else, which separates order from
    freshness.
    """

    schedule: Schedule
    is_sorted: bool

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """Run everything to completion."""
        return RoundPlan()

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan) -> int:
        """A group, once the last one is trained."""
        return 0 if buffer.oldest_open_group is not None else self.schedule.group_prompts

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Never: everything must be trained first."""
        return buffer.num_unfinished == 0

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Units split into updates; unless batches are exact, a small rest joins the last one."""
        units = units_of(ready, self.schedule)
        batches: list[list[Key]] = [[]]
        left = len(ready)
        for members in sorted(units, key=_mean_length if self.is_sorted else _noise):
            is_full = len(batches[-1]) >= self.schedule.update_batch
            if is_full and (self.schedule.exact or left >= self.schedule.update_batch):
                batches.append([])
            batches[-1] += [t.key for t in members]
            left -= len(members)
        return batches


@dataclass(frozen=True, slots=True)
class Sorted:
    """The paper's scheduler: full slots, early harvest, grouped loading.

    Answers finish shortest first, so update batches run from short to long inside a group.
    Idle slots are lent to `lookahead` groups after the oldest open one.
    """

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """Harvest as soon as an update batch is complete."""
        return RoundPlan(target=self.schedule.update_batch)

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan) -> int:
        """The next group, if nothing waits and it is within `lookahead` of the oldest open one."""
        if buffer.num_waiting or not self._is_near(buffer, buffer.oldest_open_group):
            return 0
        return self.schedule.group_prompts

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Whether the next group will be within `lookahead` of the oldest one then open."""
        return self._is_near(buffer, buffer.oldest_unfinished_group)

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready as one update, shortest first."""
        return [_shortest_first(ready)]

    def _is_near(self, buffer: Buffer, oldest: int | None) -> bool:
        return oldest is None or buffer.next_group - oldest <= self.schedule.lookahead


@dataclass(frozen=True, slots=True)
class Ungrouped:
    """The paper's ablation: no groups, new prompts always first, so long answers starve."""

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """Only fresh prompts while there are any; harvest as soon as a batch is complete."""
        feed = Feed.OLDEST_FIRST if is_exhausted else Feed.FRESH_ONLY
        return RoundPlan(feed=feed, target=self.schedule.update_batch)

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan) -> int:
        """More prompts whenever no fresh one waits."""
        return 0 if buffer.num_fresh else self.schedule.group_prompts

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Always."""
        return True

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready as one update, shortest first."""
        return [_shortest_first(ready)]


@dataclass(frozen=True, slots=True)
class TailBatching:
    """Launches extra answers, trains on the first to finish, batches the rest in long rounds.

    A short round runs fresh prompts only. When the returned ones fill an update batch, a long
    round runs only those, to completion.
    """

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """A long round when it is due, otherwise a short one."""
        batch = _whole_units(self.schedule, self.schedule.update_batch)
        if buffer.num_returned >= batch:
            return RoundPlan(feed=Feed.RETURNED_ONLY, limit=batch)
        return RoundPlan(
            feed=Feed.FRESH_ONLY,
            target=self.schedule.update_batch,
            limit=_launched(self.schedule),
        )

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan) -> int:
        """The prompts missing from the launch of a short round."""
        if plan.feed is not Feed.FRESH_ONLY:
            return 0
        return _missing_prompts(self.schedule, buffer, plan, waiting=buffer.num_fresh)

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Always."""
        return True

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready as one update, shortest first."""
        return [_shortest_first(ready)]


@dataclass(frozen=True, slots=True)
class April:
    """Launches extra answers, trains on the first to finish, resumes the rest in the next round."""

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> RoundPlan:
        """Harvest as soon as an update batch is complete."""
        return RoundPlan(target=self.schedule.update_batch, limit=_launched(self.schedule))

    def prompts_to_load(self, buffer: Buffer, plan: RoundPlan) -> int:
        """The prompts missing from the launch of a round."""
        return _missing_prompts(self.schedule, buffer, plan, waiting=buffer.num_waiting)

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Always."""
        return True

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready as one update, shortest first."""
        return [_shortest_first(ready)]


def strategy_for(schedule: Schedule) -> Strategy:
    """The strategy of a schedule."""
    strategies: dict[StrategyName, Callable[[Schedule], Strategy]] = {
        "sync": Sync,
        "minibatch": partial(MiniBatch, is_sorted=False),
        "posthoc": partial(MiniBatch, is_sorted=True),
        "sorted": Sorted,
        "ungrouped": Ungrouped,
        "tail_batching": TailBatching,
        "april": April,
    }
    return strategies[schedule.strategy](schedule)


def units_of(ready: list[Trajectory], schedule: Schedule) -> list[list[Trajectory]]:
    """The trajectories that are trained together: each alone, or all answers to a prompt."""
    units: dict[Key, list[Trajectory]] = {}
    for trajectory in sorted(ready, key=lambda t: t.key):
        unit = (trajectory.prompt.id, 0) if schedule.unit_size > 1 else trajectory.key
        units.setdefault(unit, []).append(trajectory)
    return list(units.values())


def _shortest_first(ready: list[Trajectory]) -> list[Key]:
    return [key for _, key in sorted((t.num_tokens, t.key) for t in ready)]


def _mean_length(unit: list[Trajectory]) -> float:
    return sum(t.num_tokens for t in unit) / len(unit)


def _noise(unit: list[Trajectory]) -> int:
    """A random sort key that depends only on the seed of the run."""
    return mix(unit[0].seed, *unit[0].key, _ORDER_KEY)


def _whole_units(schedule: Schedule, trajectories: float) -> int:
    return math.ceil(round(trajectories / schedule.unit_size, 9)) * schedule.unit_size


def _launched(schedule: Schedule) -> int:
    return _whole_units(schedule, schedule.over_launch * schedule.update_batch)


def _missing_prompts(schedule: Schedule, buffer: Buffer, plan: RoundPlan, *, waiting: int) -> int:
    if plan.limit is None:
        return 0
    active = buffer.num_running + buffer.num_outside
    missing = plan.limit - active - buffer.num_harvestable - waiting
    return max(0, math.ceil(missing / schedule.samples_per_prompt))
