"""What the controller answers, by hand, with numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer, Feed
from sortedrl.core.controller import Controller
from sortedrl.core.strategies import RoundPlan
from worlds import done, fresh, schedules


def buffer_with(*, ready, running, waiting=0, interruptions=0):
    """One group: the ready have the lowest ids; the running were interrupted that often."""
    buffer = Buffer()
    total = ready + running + waiting
    buffer.load([replace(fresh(n), interruptions=interruptions) for n in range(total)])
    begun = buffer.start(ready + running, feed=Feed.OLDEST_FIRST)
    for trajectory in begun[:ready]:
        buffer.finish(done(trajectory))
    return buffer


def harvests(schedule, buffer, *, is_exhausted=False):
    controller = Controller(schedule)
    plan = controller.plan(buffer, is_exhausted=is_exhausted)
    return controller.should_harvest(buffer, plan, is_exhausted=is_exhausted)


def test_sorted_harvests_when_a_batch_is_ready_and_another_one_is_left():
    schedule = Schedule(group_prompts=8, update_batch=3)
    assert not harvests(schedule, buffer_with(ready=2, running=6))
    assert harvests(schedule, buffer_with(ready=3, running=5))
    assert harvests(schedule, buffer_with(ready=3, running=1, waiting=2))


def test_sorted_waits_for_a_remainder_smaller_than_a_batch():
    schedule = Schedule(group_prompts=8, update_batch=3)
    assert harvests(schedule, buffer_with(ready=5, running=3))
    assert not harvests(schedule, buffer_with(ready=6, running=2))
    assert not harvests(schedule, buffer_with(ready=7, running=1))
    assert harvests(schedule, buffer_with(ready=8, running=0))


def test_with_lookahead_a_remainder_joins_the_next_group_unless_there_is_none():
    schedule = Schedule(group_prompts=8, update_batch=3, lookahead=1)
    assert harvests(schedule, buffer_with(ready=6, running=2))
    assert not harvests(schedule, buffer_with(ready=6, running=2), is_exhausted=True)


def test_without_groups_a_remainder_is_waited_for_only_at_the_end():
    schedule = Schedule(strategy="ungrouped", group_prompts=8, update_batch=3)
    assert harvests(schedule, buffer_with(ready=6, running=2))
    assert not harvests(schedule, buffer_with(ready=6, running=2), is_exhausted=True)


@pytest.mark.parametrize("strategy", ["sync", "posthoc"])
def test_sync_and_posthoc_never_stop_running_work(strategy):
    schedule = Schedule(strategy=strategy, group_prompts=8, update_batch=3)
    assert not harvests(schedule, buffer_with(ready=7, running=1))


def test_a_harvest_waits_for_running_work_that_was_interrupted_often_enough():
    schedule = Schedule(group_prompts=8, update_batch=3, max_restarts=2)
    assert harvests(schedule, buffer_with(ready=3, running=5, interruptions=1))
    assert not harvests(schedule, buffer_with(ready=3, running=5, interruptions=2))
    assert not harvests(schedule, buffer_with(ready=3, running=5, interruptions=3))


def test_waiting_work_that_was_interrupted_often_does_not_hold_up_a_harvest():
    buffer = Buffer()
    buffer.load([fresh(0), fresh(1), replace(fresh(2), interruptions=9)])
    first, _ = buffer.start(2, feed=Feed.OLDEST_FIRST)
    buffer.finish(done(first))
    assert harvests(Schedule(group_prompts=3, update_batch=1, max_restarts=2), buffer)


def test_answers_that_wait_for_their_siblings_count_as_left():
    schedule = Schedule(
        group_prompts=2, samples_per_prompt=2, update_batch=2, harvest_unit="prompt"
    )
    buffer = Buffer(unit_size=2)
    buffer.load([fresh(0, 0), fresh(0, 1), fresh(1, 0), fresh(1, 1)])
    buffer.start(4, feed=Feed.OLDEST_FIRST)
    for key in ((1, 0), (0, 0), (0, 1)):
        assert not harvests(schedule, buffer)
        buffer.finish(done(fresh(*key)))
    assert harvests(schedule, buffer), "one runs and one waits for it: a batch is left"


def test_work_is_started_up_to_the_free_slots_and_the_limit_of_the_plan():
    controller = Controller(Schedule(group_prompts=8, update_batch=3))
    buffer = buffer_with(ready=2, running=3, waiting=3)
    assert controller.to_start(buffer, RoundPlan(), free_slots=5) == 5
    assert controller.to_start(buffer, RoundPlan(limit=6), free_slots=5) == 1
    assert controller.to_start(buffer, RoundPlan(limit=4), free_slots=5) == 0
    assert controller.to_start(buffer, RoundPlan(limit=20), free_slots=5) == 5


def test_prompts_are_loaded_only_for_a_free_slot():
    controller = Controller(Schedule(group_prompts=8, update_batch=3))
    assert controller.prompts_to_load(Buffer(), RoundPlan(), free_slots=0) == 0
    assert controller.prompts_to_load(Buffer(), RoundPlan(), free_slots=1) == 8


def test_a_plan_that_ran_dry_before_a_batch_is_complete_gives_way_to_any_work():
    controller = Controller(Schedule(strategy="tail_batching", group_prompts=8, update_batch=3))
    plan = controller.plan(Buffer(), is_exhausted=False)
    anything = RoundPlan(feed=Feed.OLDEST_FIRST, target=3)
    assert controller.widened(buffer_with(ready=2, running=0, waiting=2), plan) == anything
    assert controller.widened(buffer_with(ready=2, running=0, waiting=2), anything) is None
    assert controller.widened(buffer_with(ready=3, running=0, waiting=2), plan) is None
    assert controller.widened(buffer_with(ready=2, running=0, waiting=0), plan) is None


def test_nothing_ready_is_no_batch_at_all():
    controller = Controller(Schedule(group_prompts=8, update_batch=3))
    assert controller.batches(Buffer()) == []


@given(schedules(), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_the_controller_changes_nothing_and_answers_the_same_again(
    schedule, ready, running, waiting
):
    buffer = Buffer()
    if ready + running + waiting:
        buffer = buffer_with(ready=ready, running=running, waiting=waiting)

    def answers():
        controller = Controller(schedule)
        plan = controller.plan(buffer, is_exhausted=False)
        return (
            plan,
            controller.should_harvest(buffer, plan, is_exhausted=False),
            controller.to_start(buffer, plan, free_slots=3),
            controller.prompts_to_load(buffer, plan, free_slots=3),
            controller.batches(buffer),
            (buffer.num_waiting, buffer.num_running, buffer.num_harvestable),
        )

    assert answers() == answers()
