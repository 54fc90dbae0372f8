"""The numbers we report, each by hand on a log of a few events."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.core.events import (
    Begin,
    Finish,
    Harvest,
    Interrupt,
    Load,
    Renew,
    Resume,
    Start,
    SyncWeights,
    Trained,
    Update,
)
from sortedrl.core.meter import Figures, Ledger, Meter, ks_distance, length_bias, measure
from sortedrl.simulate.fit import fit
from sortedrl.simulate.settings import PRESETS, six
from worlds import rescheduled, run


def begin(*, slots=2):
    return Begin(seconds=0.0, schedule="sorted/partial", slots=slots, seed=0)


def load(seconds, group=0, *, round=0):
    return Load(seconds=seconds, round=round, group=group, prompts=1, trajectories=1)


def start(seconds, prompt=0, *, running=1, cached=0, dropped=0, round=0, group=0, sample=0):
    return Start(
        seconds=seconds,
        round=round,
        prompt=prompt,
        sample=sample,
        group=group,
        attempt=0,
        prompt_tokens=10,
        cached=cached,
        dropped=dropped,
        running=running,
    )


def finish(seconds, prompt=0, *, tokens, decoded, running=0, sample=0):
    return Finish(
        seconds=seconds,
        prompt=prompt,
        sample=sample,
        tokens=tokens,
        decoded=decoded,
        reason="stop",
        running=running,
        engine_decoded=0,
        engine_prefilled=0,
    )


def interrupt(seconds, prompt=0, *, tokens, decoded, kept, running=0):
    return Interrupt(
        seconds=seconds,
        prompt=prompt,
        sample=0,
        tokens=tokens,
        decoded=decoded,
        kept=kept,
        running=running,
    )


def harvest(seconds, *, round=0):
    return Harvest(
        seconds=seconds,
        round=round,
        ready=0,
        waiting=0,
        running=0,
        engine_decoded=0,
        engine_prefilled=0,
    )


def update(seconds, *trained, version=0, round=0, closed=()):
    return Update(
        seconds=seconds,
        round=round,
        version=version,
        took_seconds=0.0,
        trained=trained,
        closed=closed,
    )


def trained(prompt=0, *, tokens, group=0, staleness_sum=0, staleness_max=0):
    return Trained(prompt, 0, group, tokens, staleness_sum, staleness_max)


def test_one_of_two_slots_busy_is_half_a_bubble():
    metrics = measure([begin(slots=2), start(0.0), harvest(10.0)])
    assert metrics.run.bubble == 0.5
    assert metrics.run.busy_slot_seconds == 10.0


def test_time_before_the_first_start_is_bubble_too():
    assert measure([begin(slots=1), start(4.0), harvest(10.0)]).run.bubble == 0.4


def test_updates_and_hand_overs_count_in_the_idle_share_but_not_in_the_bubble():
    log = [
        begin(slots=1),
        load(0.0),
        start(0.0),
        finish(6.0, tokens=6, decoded=6),
        harvest(6.0),
        update(8.0, trained(tokens=6), closed=(0,)),
        SyncWeights(seconds=10.0, round=1, version=1, took_seconds=2.0),
    ]
    run = measure(log).run
    assert (run.seconds, run.rollout_seconds) == (10.0, 6.0)
    assert run.bubble == 0.0
    assert run.idle_share == pytest.approx(0.4)
    assert run.goodput == run.throughput == 1.0
    assert run.trained_per_second == 0.6


def test_the_bubble_of_six_prompts_on_four_slots():
    """Busy 30 slot-seconds: of 4 x 12 sorted, of 4 x (7 + 9) in two synchronous batches."""
    ours = measure(run(six()).events)
    assert ours.run.bubble == pytest.approx(1 - 30 / 48)
    assert [r.bubble for r in ours.rounds] == pytest.approx([0.0, 1 - 10 / 28])
    sync = measure(run(rescheduled(six(), strategy="sync")).events)
    assert sync.run.bubble == pytest.approx(1 - 30 / 64)
    assert ours.run.ledger == Ledger(decoded=30, trained=30, kept=10, prefilled_again=10)
    assert sync.run.ledger == Ledger(decoded=30, trained=30)


RESTARTED = [begin(), load(0.0), start(0.0)]


def test_the_ledger_of_on_policy_mode_discards_what_was_interrupted():
    log = [
        *RESTARTED,
        interrupt(5.0, tokens=5, decoded=5, kept=0),
        start(5.0),
        finish(9.0, tokens=4, decoded=4),
        update(9.0, trained(tokens=4)),
    ]
    ledger = measure(log).run.ledger
    assert ledger == Ledger(decoded=9, trained=4, discarded=5, kept=0, prefilled_again=10)
    assert ledger.cached == 0


def test_the_ledger_of_partial_mode_keeps_what_was_interrupted():
    log = [
        *RESTARTED,
        interrupt(5.0, tokens=5, decoded=5, kept=5),
        start(5.0, cached=5),
        finish(8.0, tokens=8, decoded=3),
    ]
    ledger = measure(log).run.ledger
    assert ledger == Ledger(decoded=8, kept=5, prefilled_again=15)
    assert ledger.cached == 8
    ledger = measure([*log, update(9.0, trained(tokens=8))]).run.ledger
    assert (ledger.trained, ledger.cached) == (8, 0)


def test_the_ledger_discards_tokens_dropped_for_their_age():
    log = [
        *RESTARTED,
        interrupt(5.0, tokens=5, decoded=5, kept=5),
        start(5.0, cached=0, dropped=5),
        finish(12.0, tokens=7, decoded=7),
        update(12.0, trained(tokens=7)),
    ]
    ledger = measure(log).run.ledger
    assert ledger == Ledger(decoded=12, trained=7, discarded=5, prefilled_again=10)


def test_the_ledger_of_coupled_mode_discards_what_was_not_verified():
    log = [
        *RESTARTED,
        interrupt(5.0, tokens=5, decoded=5, kept=5),
        start(5.0, cached=5),
        finish(10.0, tokens=8, decoded=5),
        update(10.0, trained(tokens=8)),
    ]
    ledger = measure(log).run.ledger
    assert ledger == Ledger(decoded=10, trained=8, discarded=2, kept=3, prefilled_again=15)


def test_the_ledger_discards_what_a_renewed_answer_loses():
    log = [
        *RESTARTED,
        finish(5.0, tokens=5, decoded=5),
        Renew(seconds=5.0, prompt=0, sample=0, tokens=5, kept=2),
        start(5.0, cached=2),
        finish(8.0, tokens=5, decoded=3),
        update(8.0, trained(tokens=5)),
    ]
    ledger = measure(log).run.ledger
    assert ledger == Ledger(decoded=8, trained=5, discarded=3, kept=2, prefilled_again=12)


def test_staleness_is_a_mean_over_tokens_and_a_mean_over_answers():
    log = [
        begin(),
        load(0.0),
        start(0.0, 0, running=1),
        start(0.0, 1, running=2),
        finish(1.0, 0, tokens=10, decoded=10, running=1),
        finish(1.0, 1, tokens=30, decoded=30),
        update(
            2.0,
            trained(0, tokens=10, staleness_sum=20, staleness_max=4),
            trained(1, tokens=30),
            version=4,
        ),
    ]
    metrics = measure(log)
    assert metrics.run.mean_staleness == 0.5
    assert metrics.run.mean_trajectory_staleness == 2.0
    assert metrics.run.staleness_max == 4
    assert metrics.run.mean_length == 20
    assert metrics.trained_lengths == (((0, 0), 4, 10), ((1, 0), 4, 30))


def one_group(number, first, last):
    """A group alone on one slot from one second to another, and its update."""
    tokens = int(last - first)
    return [
        load(first, number, round=number),
        start(first, number, round=number, group=number),
        finish(last, number, tokens=tokens, decoded=tokens),
        harvest(last, round=number),
        update(
            last + 1,
            trained(number, tokens=tokens, group=number),
            round=number,
            version=number,
            closed=(number,),
        ),
    ]


def test_the_steady_state_leaves_out_the_first_and_the_last_group():
    log = [begin(slots=2), *one_group(0, 0, 9), *one_group(1, 10, 14), *one_group(2, 15, 40)]
    metrics = measure(log)
    assert metrics.steady.seconds == 5.0
    assert metrics.steady.rollout_seconds == 4.0
    assert metrics.steady.bubble == 0.5
    assert metrics.steady.ledger == Ledger(decoded=4, trained=4)
    assert metrics.steady.trajectories == metrics.steady.updates == 1
    assert [(g.group, g.rounds, g.figures.ledger.trained) for g in metrics.groups] == [
        (0, 1, 9),
        (1, 1, 4),
        (2, 1, 25),
    ]
    assert [r.ledger.decoded for r in metrics.rounds] == [9, 4, 25]


def test_two_groups_have_no_steady_state():
    assert measure([begin(), *one_group(0, 0, 9), *one_group(1, 10, 14)]).steady is None
    assert measure([begin(), *one_group(0, 0, 9)]).steady is None


def test_overlapping_groups_own_their_answers_and_share_the_time():
    log = [
        begin(slots=2),
        load(0.0, 0),
        start(0.0, 0, running=1),
        load(2.0, 1),
        start(2.0, 1, running=2, group=1),
        finish(6.0, 1, tokens=4, decoded=4, running=1),
        finish(8.0, 0, tokens=8, decoded=8),
        harvest(8.0),
        update(8.0, trained(0, tokens=8), trained(1, tokens=4, group=1), closed=(0, 1)),
    ]
    first, second = measure(log).groups
    assert (first.figures.ledger.decoded, second.figures.ledger.decoded) == (8, 4)
    assert (first.figures.rollout_seconds, second.figures.rollout_seconds) == (8.0, 6.0)
    assert second.figures.busy_slot_seconds == 10.0


def test_a_meter_counts_while_the_run_goes_on():
    meter = Meter()
    for event in [begin(slots=2), load(0.0), start(0.0), finish(4.0, tokens=4, decoded=4)]:
        meter(event)
    assert meter.metrics().run.ledger.cached == 4
    meter(harvest(8.0))
    assert meter.metrics().run.bubble == 0.75


def test_saving_and_taking_up_a_run_again_is_neither_rollout_nor_busy():
    log = [
        begin(slots=1),
        *one_group(0, 0, 6),
        Resume(seconds=9.0, round=0, version=1),
        SyncWeights(seconds=10.0, round=1, version=1, took_seconds=1.0),
        *one_group(1, 10, 14),
    ]
    run = measure(log).run
    assert (run.seconds, run.rollout_seconds, run.busy_slot_seconds) == (15.0, 10.0, 10.0)
    assert [r.seconds for r in measure(log).rounds] == [9.0, 6.0]


def test_a_resume_after_every_update_changes_no_number():
    simulation = replace(PRESETS["paper"](), groups=2)
    events = run(simulation).events
    resumed = []
    for event in events:
        resumed.append(event)
        if isinstance(event, Update):
            version = event.version + 1
            resumed.append(Resume(seconds=event.seconds, round=event.round, version=version))
    assert len(resumed) > len(events)
    assert measure(resumed) == measure(events)
    assert fit(resumed) == fit(events)


def test_a_log_that_does_not_open_with_begin_is_refused():
    with pytest.raises(ValueError, match="must start with 'begin', got 'start'"):
        measure([start(0.0)])
    with pytest.raises(ValueError, match="empty"):
        measure([])


def test_nothing_measured_is_zero_and_not_an_error():
    nothing = Figures()
    assert (nothing.bubble, nothing.idle_share, nothing.goodput, nothing.mean_length) == (0,) * 4


def brute_force_ks(first, second):
    def share(sample, value):
        return sum(x <= value for x in sample) / len(sample)

    return max(abs(share(first, v) - share(second, v)) for v in [*first, *second])


samples = st.lists(st.integers(1, 20), min_size=1, max_size=30)


@given(samples, samples)
def test_ks_distance_is_the_largest_gap_between_the_distribution_functions(first, second):
    assert ks_distance(first, second) == pytest.approx(brute_force_ks(first, second))
    assert ks_distance(first, second) == ks_distance(second, first)
    assert ks_distance(first, first) == 0


def test_samples_that_do_not_overlap_are_one_apart():
    assert ks_distance([1, 2], [3, 4, 5]) == 1.0


def test_length_bias_compares_what_was_trained_with_what_the_policy_writes():
    bias = length_bias([2, 4], [4, 8])
    assert (bias.trained_mean, bias.reference_mean, bias.ratio) == (3.0, 6.0, 0.5)
    assert bias.ks_distance == 0.5


def test_a_window_in_which_nothing_was_written_is_no_steady_state():
    second, third = one_group(1, 10, 14), one_group(2, 15, 19)
    first = [begin(), *one_group(0, 0, 9)]
    assert measure([*first, *second, *third]).steady is not None
    at_once = [*second[:2], replace(third[0], seconds=11), *second[2:], *third[1:]]
    assert measure([*first, *at_once]).steady is None
