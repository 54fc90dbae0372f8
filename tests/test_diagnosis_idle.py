from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.compare import simulate
from sortedrl.events import Load
from sortedrl.meter import measure
from sortedrl.report.advice.observed import Idle, idle
from sortedrl.simulate.presets import PRESETS

picture = PRESETS["picture"]()


def events_of(**changes):
    events = []
    schedule = replace(picture.schedule, **changes)
    simulate(replace(picture, schedule=schedule), record=events.append)
    return events


@given(
    st.sampled_from(["sync", "posthoc", "sorted", "ungrouped", "tail_batching", "april"]),
    st.sampled_from(["on_policy", "partial", "coupled"]),
    st.sampled_from([1, 4]),
    st.floats(0.1, 1),
)
@settings(max_examples=15, deadline=None)
def test_the_places_add_up_to_the_bubble_of_the_meter(strategy, mode, samples, share):
    events = events_of(
        strategy=strategy, mode=mode, samples_per_prompt=samples, group_prompts=32 // samples
    )
    events = events[: max(1, round(share * len(events)))]
    found, run = idle(events), measure(events).run
    assert found.rollout_seconds == pytest.approx(run.rollout_seconds)
    assert found.total == pytest.approx(run.bubble * run.slots * run.rollout_seconds, abs=1e-6)
    assert min(found.tail, found.ending, found.elsewhere) >= -1e-9
    assert 0 <= found.full_share <= 1
    assert found.peak <= run.slots


def test_lookahead_empties_the_tail():
    tail, ahead = idle(events_of()), idle(events_of(lookahead=3))
    assert tail.tail_share > 0.5
    assert ahead.tail == 0
    assert ahead.ending > 0


def test_what_is_idle_after_the_last_load_is_no_tail():
    events = events_of(group_prompts=128, update_batch=8)
    assert sum(isinstance(event, Load) for event in events) == 4
    alone = events_of(strategy="sync", group_prompts=32, update_batch=32)
    assert idle(alone).tail > 0
    assert idle(alone).ending > 0


def test_a_log_without_an_end_has_no_ending():
    events = events_of()
    whole, cut = idle(events), idle(events[:-1])
    assert cut.tail == whole.tail + whole.ending
    assert cut.ending == 0


@pytest.mark.parametrize("mode", ["on_policy", "coupled"])
def test_sorted_leaves_no_work_waiting_beside_an_idle_slot(mode):
    events = events_of(mode=mode, samples_per_prompt=4, group_prompts=8, harvest_unit="prompt")
    assert idle(events).elsewhere == 0


def test_an_empty_log_has_no_idle_slots():
    assert idle([]) == Idle()
    assert Idle().tail_share == Idle().full_share == 0
