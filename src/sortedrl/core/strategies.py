"""The rules of the schedulers: one small object per strategy.

A strategy is asked at the start of each round for a `Plan`, during the round how many prompts to
load, and after the harvest how to cut the ready trajectories into update batches.
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
class Plan:
    """The rules of one round."""

    feed: Feed = Feed.OLDEST_FIRST
    target: int | None = None
    """Harvest when that many are harvestable; `None`: when nothing is left to run."""
    limit: int | None = None
    """Trajectories running or harvestable at once; `None`: as many as there are slots for."""


class Strategy(Protocol):
    """The rules of one scheduler."""

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """The rules of the round that starts now."""

    def prompts_to_load(self, buffer: Buffer, plan: Plan) -> int:
        """Prompts to load now that a slot is free; 0 for none."""

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Whether prompts may be loaded once everything harvestable is trained."""

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """The harvestable trajectories as update batches, in training order."""


@dataclass(frozen=True, slots=True)
class Sync:
    """One update batch of prompts at a time; the update waits for the longest answer."""

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """Run everything loaded to its end."""
        return Plan()

    def prompts_to_load(self, buffer: Buffer, plan: Plan) -> int:
        """One update batch, when the last one is trained."""
        if buffer.oldest_open_group is not None:
            return 0
        return math.ceil(self.schedule.update_batch / self.schedule.samples_per_prompt)

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Never before everything is trained."""
        return buffer.num_unfinished == 0

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything at once, in the order of the data set."""
        return [sorted(t.key for t in ready)]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """A whole group is rolled out to its end, and then split into updates.

    Each unit (an answer, or a prompt's answers) goes to a random mini-batch; `is_sorted` orders
    the units by length instead. The two differ in nothing else, so they tell order from freshness.
    """

    schedule: Schedule
    is_sorted: bool

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """Run everything loaded to its end."""
        return Plan()

    def prompts_to_load(self, buffer: Buffer, plan: Plan) -> int:
        """A group, when the last one is trained."""
        return 0 if buffer.oldest_open_group is not None else self.schedule.group_prompts

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Never before everything is trained."""
        return buffer.num_unfinished == 0

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """The units cut into updates; unless batches are exact, a small rest joins the last."""
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
    Free slots are lent to `lookahead` groups after the oldest open one.
    """

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """Harvest as soon as an update batch is complete."""
        return Plan(target=self.schedule.update_batch)

    def prompts_to_load(self, buffer: Buffer, plan: Plan) -> int:
        """The next group, when nothing waits and it is near enough to the oldest open one."""
        if buffer.num_waiting or not self._is_near(buffer, buffer.oldest_open_group):
            return 0
        return self.schedule.group_prompts

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Whether the next group will be near enough to the oldest one then open."""
        return self._is_near(buffer, buffer.oldest_unfinished_group)

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready is one update, shortest first."""
        return [_shortest_first(ready)]

    def _is_near(self, buffer: Buffer, oldest: int | None) -> bool:
        return oldest is None or buffer.next_group - oldest <= self.schedule.lookahead


@dataclass(frozen=True, slots=True)
class Ungrouped:
    """The paper's ablation: no groups, new prompts always first, so long answers starve."""

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """Only fresh prompts while there are any; harvest as soon as a batch is complete."""
        feed = Feed.OLDEST_FIRST if is_exhausted else Feed.FRESH_ONLY
        return Plan(feed=feed, target=self.schedule.update_batch)

    def prompts_to_load(self, buffer: Buffer, plan: Plan) -> int:
        """More prompts whenever no fresh one waits."""
        return 0 if buffer.num_fresh else self.schedule.group_prompts

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Always."""
        return True

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready is one update, shortest first."""
        return [_shortest_first(ready)]


@dataclass(frozen=True, slots=True)
class TailBatching:
    """Launch too many, train on the first to finish, collect the rest for long rounds.

    A short round runs fresh prompts only. When the returned ones fill an update batch, a long
    round runs just those to their end.
    """

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """A long round when it is due, a short one otherwise."""
        batch = _whole_units(self.schedule, self.schedule.update_batch)
        if buffer.num_returned >= batch:
            return Plan(feed=Feed.RETURNED_ONLY, limit=batch)
        return Plan(
            feed=Feed.FRESH_ONLY,
            target=self.schedule.update_batch,
            limit=_launched(self.schedule),
        )

    def prompts_to_load(self, buffer: Buffer, plan: Plan) -> int:
        """What is missing to the launch of a short round."""
        if plan.feed is not Feed.FRESH_ONLY:
            return 0
        return _missing_prompts(self.schedule, buffer, plan, waiting=buffer.num_fresh)

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Always."""
        return True

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready is one update, shortest first."""
        return [_shortest_first(ready)]


@dataclass(frozen=True, slots=True)
class April:
    """Launch too many, train on the first to finish, resume the rest first in the next round."""

    schedule: Schedule

    def plan(self, buffer: Buffer, *, is_exhausted: bool) -> Plan:
        """Harvest as soon as an update batch is complete."""
        return Plan(target=self.schedule.update_batch, limit=_launched(self.schedule))

    def prompts_to_load(self, buffer: Buffer, plan: Plan) -> int:
        """What is missing to the launch of a round."""
        return _missing_prompts(self.schedule, buffer, plan, waiting=buffer.num_waiting)

    def loads_after_update(self, buffer: Buffer) -> bool:
        """Always."""
        return True

    def batches(self, ready: list[Trajectory]) -> list[list[Key]]:
        """Everything ready is one update, shortest first."""
        return [_shortest_first(ready)]


def strategy_for(schedule: Schedule) -> Strategy:
    """The strategy a schedule names."""
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
    """A place in a random order that only the seed of the run decides."""
    return mix(unit[0].seed, *unit[0].key, _ORDER_KEY)


def _whole_units(schedule: Schedule, trajectories: float) -> int:
    return math.ceil(round(trajectories / schedule.unit_size, 9)) * schedule.unit_size


def _launched(schedule: Schedule) -> int:
    return _whole_units(schedule, schedule.over_launch * schedule.update_batch)


def _missing_prompts(schedule: Schedule, buffer: Buffer, plan: Plan, *, waiting: int) -> int:
    if plan.limit is None:
        return 0
    active = buffer.num_running + buffer.num_outside
    missing = plan.limit - active - buffer.num_harvestable - waiting
    return max(0, math.ceil(missing / schedule.samples_per_prompt))
