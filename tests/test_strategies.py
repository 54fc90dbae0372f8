"""The rules of each scheduler, by hand, with numbers."""

from dataclasses import replace

import pytest

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer, Feed
from sortedrl.core.strategies import (
    April,
    RoundPlan,
    Sorted,
    Sync,
    TailBatching,
    Ungrouped,
    strategy_for,
)
from worlds import STRATEGIES, done, fresh


def holding(*, fresh_work=0, returned=0, running=0, ready=0, unit_size=1):
    """A buffer with one group that holds so many of each; ready ones have the lowest ids."""
    buffer = Buffer(unit_size=unit_size)
    total = fresh_work + returned + running + ready
    if not total:
        return buffer
    buffer.load([fresh(number) for number in range(total)])
    begun = buffer.start(returned + running + ready, feed=Feed.OLDEST_FIRST)
    for trajectory in begun[:ready]:
        buffer.finish(done(trajectory))
    for trajectory in begun[ready : ready + returned]:
        buffer.put_back(replace(trajectory, interruptions=1))
    return buffer


def answers(*lengths, samples=1):
    keys = [divmod(number, samples) for number in range(len(lengths))]
    return [done(fresh(*key), length) for key, length in zip(keys, lengths, strict=True)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_schedule_names_its_strategy(name):
    strategy = strategy_for(Schedule(strategy=name))
    rules = {"posthoc": "minibatch"}.get(name, name)  # the same rules, with sorted batches
    assert type(strategy).__name__.lower() == rules.replace("_", "")


def test_sync_loads_one_update_batch_of_prompts_when_everything_is_trained():
    schedule = Schedule(strategy="sync", group_prompts=8, samples_per_prompt=4, update_batch=10)
    strategy = Sync(schedule)
    assert strategy.prompts_to_load(holding(), RoundPlan()) == 3
    assert strategy.prompts_to_load(holding(ready=1), RoundPlan()) == 0
    assert strategy.plan(holding(), is_exhausted=False) == RoundPlan(target=None)


def test_sync_trains_on_everything_at_once_in_the_order_of_the_data_set():
    strategy = Sync(Schedule(strategy="sync", group_prompts=8, update_batch=2))
    assert strategy.batches(answers(5, 1, 3)[::-1]) == [[(0, 0), (1, 0), (2, 0)]]


def test_posthoc_loads_a_whole_group_and_cuts_it_shortest_first():
    strategy = strategy_for(Schedule(strategy="posthoc", group_prompts=4, update_batch=2))
    assert strategy.prompts_to_load(holding(), RoundPlan()) == 4
    assert strategy.prompts_to_load(holding(running=1), RoundPlan()) == 0
    assert strategy.batches(answers(9, 2, 7, 4)) == [[(1, 0), (3, 0)], [(2, 0), (0, 0)]]


def test_minibatch_cuts_a_group_in_an_order_that_has_nothing_to_do_with_length():
    schedule = Schedule(strategy="minibatch", group_prompts=64, update_batch=16)
    ready = answers(*range(1, 65))
    batches = strategy_for(schedule).batches(ready)
    assert sorted(key for batch in batches for key in batch) == [t.key for t in ready]
    assert [len(batch) for batch in batches] == [16] * 4
    means = [sum(prompt + 1 for prompt, _ in batch) / 16 for batch in batches]
    assert max(means) - min(means) < 20  # sorted batches differ by 48
    assert strategy_for(schedule).batches(ready[::-1]) == batches


def test_posthoc_lets_a_remainder_join_the_last_batch():
    strategy = strategy_for(Schedule(strategy="posthoc", group_prompts=5, update_batch=2))
    batches = strategy.batches(answers(9, 2, 7, 4, 5))
    assert batches == [[(1, 0), (3, 0)], [(4, 0), (2, 0), (0, 0)]]


def test_posthoc_keeps_siblings_together_and_sorts_prompts_by_their_mean_length():
    schedule = Schedule(
        strategy="posthoc",
        group_prompts=3,
        samples_per_prompt=2,
        update_batch=2,
        harvest_unit="prompt",
    )
    batches = strategy_for(schedule).batches(answers(9, 1, 2, 2, 8, 6, samples=2))
    assert batches == [[(1, 0), (1, 1)], [(0, 0), (0, 1)], [(2, 0), (2, 1)]]


def test_posthoc_without_units_sorts_siblings_apart():
    schedule = Schedule(strategy="posthoc", group_prompts=2, samples_per_prompt=2, update_batch=2)
    batches = strategy_for(schedule).batches(answers(9, 1, 2, 8, samples=2))
    assert batches == [[(0, 1), (1, 0)], [(1, 1), (0, 0)]]


def test_sorted_harvests_at_one_update_batch_and_trains_on_everything_ready():
    strategy = Sorted(Schedule(group_prompts=8, update_batch=2))
    assert strategy.plan(holding(), is_exhausted=False) == RoundPlan(target=2)
    assert strategy.batches(answers(9, 2, 2)) == [[(1, 0), (2, 0), (0, 0)]]


def test_sorted_loads_the_next_group_only_when_the_last_one_is_trained():
    strategy = Sorted(Schedule(group_prompts=8, update_batch=2))
    assert strategy.prompts_to_load(holding(), RoundPlan()) == 8
    assert strategy.prompts_to_load(holding(fresh_work=1), RoundPlan()) == 0
    assert strategy.prompts_to_load(holding(running=1), RoundPlan()) == 0
    assert strategy.prompts_to_load(holding(ready=1), RoundPlan()) == 0


def test_lookahead_lends_slots_only_to_the_next_groups_after_the_oldest_open_one():
    strategy = Sorted(Schedule(group_prompts=2, update_batch=1, lookahead=2))
    buffer = Buffer()
    for group in range(3):
        assert strategy.prompts_to_load(buffer, RoundPlan()) == 2
        buffer.load([fresh(2 * group, group=group), fresh(2 * group + 1, group=group)])
        assert strategy.prompts_to_load(buffer, RoundPlan()) == 0, "work waits"
        buffer.start(2, feed=Feed.OLDEST_FIRST)
    assert strategy.prompts_to_load(buffer, RoundPlan()) == 0, "groups 0, 1 and 2 are open"
    for prompt in (2, 3, 4, 5):
        buffer.finish(done(fresh(prompt, group=prompt // 2)))
    buffer.take([(2, 0), (3, 0)])
    assert buffer.num_open_groups == 2
    assert strategy.prompts_to_load(buffer, RoundPlan()) == 0, "group 3 is 3 after the oldest, 0"
    assert not strategy.loads_after_update(buffer)
    buffer.finish(done(fresh(0)))
    buffer.finish(done(fresh(1)))
    assert strategy.prompts_to_load(buffer, RoundPlan()) == 0, "group 0 is still untrained"
    assert strategy.loads_after_update(buffer)
    buffer.take([(0, 0), (1, 0)])
    assert strategy.prompts_to_load(buffer, RoundPlan()) == 2


def test_ungrouped_runs_only_fresh_prompts_until_there_are_none():
    strategy = Ungrouped(Schedule(strategy="ungrouped", group_prompts=8, update_batch=2))
    plan = strategy.plan(holding(returned=3), is_exhausted=False)
    assert plan == RoundPlan(feed=Feed.FRESH_ONLY, target=2)
    assert strategy.prompts_to_load(holding(returned=3, running=2), plan) == 8
    assert strategy.prompts_to_load(holding(fresh_work=1), plan) == 0
    assert strategy.plan(holding(returned=3), is_exhausted=True) == RoundPlan(target=2)


def test_tail_batching_launches_too_many_fresh_ones_in_a_short_round():
    schedule = Schedule(strategy="tail_batching", group_prompts=8, update_batch=4, over_launch=1.5)
    strategy = TailBatching(schedule)
    plan = strategy.plan(holding(returned=3), is_exhausted=False)
    assert plan == RoundPlan(feed=Feed.FRESH_ONLY, target=4, limit=6)
    assert strategy.prompts_to_load(holding(returned=3), plan) == 6
    assert strategy.prompts_to_load(holding(fresh_work=1, running=2, ready=1), plan) == 2


def test_tail_batching_runs_a_long_round_when_the_returned_ones_fill_a_batch():
    strategy = TailBatching(Schedule(strategy="tail_batching", group_prompts=8, update_batch=4))
    buffer = holding(returned=5, fresh_work=3)
    plan = strategy.plan(buffer, is_exhausted=False)
    assert plan == RoundPlan(feed=Feed.RETURNED_ONLY, target=None, limit=4)
    assert strategy.prompts_to_load(buffer, plan) == 0


def test_april_resumes_first_and_tops_up_with_new_prompts():
    schedule = Schedule(strategy="april", group_prompts=8, update_batch=4, over_launch=2)
    strategy = April(schedule)
    buffer = holding(returned=3, fresh_work=1)
    plan = strategy.plan(buffer, is_exhausted=False)
    assert plan == RoundPlan(target=4, limit=8)
    assert strategy.prompts_to_load(buffer, plan) == 4
    assert [t.key for t in buffer.start(4, feed=plan.feed)] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_over_launch_counts_whole_prompts():
    schedule = Schedule(
        strategy="april",
        group_prompts=8,
        samples_per_prompt=4,
        harvest_unit="prompt",
        update_batch=6,
        over_launch=1.5,
    )
    plan = April(schedule).plan(holding(), is_exhausted=False)
    assert (plan.target, plan.limit) == (6, 12)
    assert April(schedule).prompts_to_load(holding(), plan) == 3


def test_over_launch_is_not_rounded_up_by_floating_point():
    schedule = Schedule(strategy="april", update_batch=100, over_launch=1.1)
    assert April(schedule).plan(holding(), is_exhausted=False).limit == 110
