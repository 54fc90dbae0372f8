"""The schedule of a run, read off its events where its config is not at hand.

What a log does not show keeps its default: a tolerance, a limit of restarts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import cast, get_args

from sortedrl.config import HarvestUnit, ModeName, Schedule, StrategyName
from sortedrl.events import Begin, Event, Load, Start, Update

_GROUP_BATCHES = 4


def observed_schedule(events: Sequence[Event]) -> Schedule | None:
    """The schedule that wrote these events; `None` where too little has happened to tell.

    A group that the strategy does not use is taken as four update batches.
    """
    begin = next((e for e in events if isinstance(e, Begin)), None)
    loads = [e for e in events if isinstance(e, Load) and e.prompts]
    updates = [e for e in events if isinstance(e, Update) and e.trained]
    if begin is None or not loads or not updates:
        return None
    strategy, mode, lookahead = _named(begin.schedule)
    samples = max(1, loads[0].trajectories // loads[0].prompts)
    # The last update takes what is left of the data, and any may take more than a batch.
    batch = min(len(update.trained) for update in updates[:-1] or updates)
    prompts = max(load.prompts for load in loads)
    if not shows_group(strategy):
        prompts = max(1, _GROUP_BATCHES * batch // samples)
    over_launch = 1.25
    if strategy in ("tail_batching", "april"):
        over_launch = max(1.0, loads[0].trajectories / batch)
    return Schedule(
        strategy=strategy,
        mode=mode,
        group_prompts=max(prompts, math.ceil(batch / samples)),
        samples_per_prompt=samples,
        update_batch=batch,
        lookahead=lookahead,
        harvest_unit=_unit(updates, samples),
        max_staleness=_max_staleness(events, updates) if mode == "partial" else None,
        over_launch=over_launch,
    )


def shows_group(strategy: StrategyName) -> bool:
    """Whether the loads of a log tell the size of a group."""
    return strategy in ("sorted", "posthoc", "ungrouped")


def _named(name: str) -> tuple[StrategyName, ModeName, int]:
    """Strategy, mode and lookahead from the few letters of `Schedule.name`."""
    rules, _, ahead = name.partition(" +")
    strategy, _, mode = rules.partition("/")
    if strategy not in get_args(StrategyName) or mode not in ("", *get_args(ModeName)):
        return "sorted", "partial", 0
    return (
        cast(StrategyName, strategy),
        cast(ModeName, mode or "on_policy"),
        int(ahead) if ahead.isdecimal() else 0,
    )


def _unit(updates: Sequence[Update], samples: int) -> HarvestUnit:
    """prompt, where no update has held some of a prompt's answers without the others."""
    if samples == 1:
        return "trajectory"
    for update in updates:
        answers = Counter(trained.prompt for trained in update.trained)
        if any(count < samples for count in answers.values()):
            return "trajectory"
    return "prompt"


def _max_staleness(events: Sequence[Event], updates: Sequence[Update]) -> int | None:
    """The oldest tokens trained on, where older ones were dropped."""
    if not any(isinstance(event, Start) and event.dropped for event in events):
        return None
    return max(trained.staleness_max for update in updates for trained in update.trained)
