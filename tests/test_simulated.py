"""The simulated engine against the obvious slow one, and the lengths against their definition."""

import math
from collections import Counter
from dataclasses import replace
from statistics import NormalDist, correlation, mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.core.buffer import open_group
from sortedrl.core.clock import VirtualClock
from sortedrl.core.meter import ks_distance
from sortedrl.simulate.costs import Costs, ticks
from sortedrl.simulate.engine import (
    BRANCH,
    SimulatedEngine,
    SimulatedPrompts,
    SimulatedTrainer,
    Zeros,
)
from sortedrl.simulate.lengths import Divergence, Lengths, LengthSettings
from sortedrl.types import Prompt, Segment, TrainBatch, Weights
from worlds import done, fresh


def lengths_of(settings, *, max_tokens=10**6, samples_per_prompt=1, seed=0):
    return Lengths(
        settings, seed=seed, max_tokens=max_tokens, samples_per_prompt=samples_per_prompt
    )


def replayed(*values, **changes):
    return LengthSettings(values=values, replay=True, **changes)


def engine_of(settings, *, slots=4, costs=None, clock=None, max_tokens=10**6):
    return SimulatedEngine(
        slots=slots,
        lengths=lengths_of(settings, max_tokens=max_tokens),
        costs=costs or ticks(),
        clock=clock or VirtualClock(),
    )


def group_of(count, *, prompt_tokens=0, samples_per_prompt=1, seed=0):
    prompts = [Prompt(id=number, tokens=range(prompt_tokens)) for number in range(count)]
    return open_group(prompts, group=0, samples_per_prompt=samples_per_prompt, seed=seed)


def drained(engine, count):
    finished = []
    while len(finished) < count:
        finished += engine.step().finished
    return finished


def naive_seconds(lengths, *, slots, prompt_tokens, costs):
    """Token by token: when each answer finishes, and how many tokens were prefilled."""
    waiting, running, seconds, ends = list(range(len(lengths))), {}, 0.0, {}
    while waiting or running:
        while waiting and len(running) < slots:
            running[waiting.pop(0)] = 0
            seconds += prompt_tokens * costs.prefill_token_seconds
        while True:
            cached = sum(prompt_tokens + tokens for tokens in running.values())
            seconds += costs.step_seconds + len(running) * costs.sequence_seconds
            seconds += cached * costs.cached_token_seconds
            running = {number: tokens + 1 for number, tokens in running.items()}
            complete = [n for n, tokens in running.items() if tokens == lengths[n]]
            if complete:
                break
        for number in complete:
            ends[number] = seconds
            del running[number]
    return ends


cost = st.floats(0, 1)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 5),
    st.builds(
        Costs,
        step_seconds=st.floats(0.1, 1),
        sequence_seconds=cost,
        cached_token_seconds=cost,
        prefill_token_seconds=cost,
    ),
)
def test_the_closed_form_of_time_is_the_sum_over_all_steps(lengths, slots, prompt_tokens, costs):
    clock = VirtualClock()
    engine = engine_of(replayed(*lengths), slots=slots, costs=costs, clock=clock)
    engine.submit(group_of(len(lengths), prompt_tokens=prompt_tokens), tolerance=None)
    ends, decoded, prefilled = {}, 0, 0
    while len(ends) < len(lengths):
        step = engine.step()
        decoded += step.decoded_tokens
        prefilled += step.prefilled_tokens
        ends |= {t.prompt.id: clock.seconds() for t in step.finished}
        assert all(t.num_tokens == lengths[t.prompt.id] for t in step.finished)
    naive = naive_seconds(lengths, slots=slots, prompt_tokens=prompt_tokens, costs=costs)
    assert ends == pytest.approx(naive)
    assert decoded == sum(lengths)
    assert prefilled == prompt_tokens * len(lengths)


def test_work_beyond_the_slots_queues():
    clock = VirtualClock()
    engine = engine_of(replayed(3, 5, 2), slots=2, clock=clock)
    engine.submit(group_of(3), tolerance=None)
    ends = []
    for _ in range(2):
        ends += [(t.prompt.id, clock.seconds()) for t in engine.step().finished]
    assert ends == [(0, 3.0), (1, 5.0), (2, 5.0)]


def test_a_token_is_its_place_and_certain():
    engine = engine_of(replayed(3))
    engine.submit(group_of(1), tolerance=None)
    (answer,) = engine.step().finished
    assert (answer.tokens, answer.logprobs) == ([0, 1, 2], [0.0, 0.0, 0.0])
    assert (answer.finish_reason, answer.decoded_tokens) == ("stop", 3)


def test_an_answer_at_the_token_limit_is_cut_off():
    engine = engine_of(replayed(30, 5), max_tokens=7)
    engine.submit(group_of(2), tolerance=None)
    reasons = [(t.num_tokens, t.finish_reason) for t in drained(engine, 2)]
    assert reasons == [(5, "stop"), (7, "length")]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 5))
def test_everything_submitted_comes_back_exactly_once(lengths, slots, steps):
    engine = engine_of(replayed(*lengths), slots=slots)
    submitted = group_of(len(lengths))
    engine.submit(submitted, tolerance=None)
    back, decoded = [], 0
    for _ in range(steps):
        step = engine.step()
        back += step.finished
        decoded += step.decoded_tokens
    stopped = engine.interrupt()
    assert all(t.finish_reason is None for t in stopped)
    assert all(t.num_tokens < lengths[t.prompt.id] for t in stopped)
    back += stopped
    assert sorted(t.key for t in back) == [t.key for t in submitted]
    assert sum(t.num_tokens for t in back) == decoded
    assert engine.interrupt() == []


def test_interrupted_work_goes_on_with_new_segments_and_pays_its_prefill():
    clock = VirtualClock()
    costs = Costs(step_seconds=1, prefill_token_seconds=0.5, interrupt_seconds=3)
    engine = engine_of(replayed(2, 6), clock=clock, costs=costs)
    engine.submit(group_of(2, prompt_tokens=4), tolerance=None)
    engine.step()
    assert clock.seconds() == 4 + 2
    (stopped,) = engine.interrupt()
    assert clock.seconds() == 9
    engine.load_weights(Weights(1))
    engine.submit([stopped], tolerance=None)
    step = engine.step()
    assert (step.prefilled_tokens, step.decoded_tokens) == (6, 4)
    assert clock.seconds() == 9 + 3 + 4
    (answer,) = step.finished
    assert [(s.version, list(s.tokens)) for s in answer.segments] == [
        (0, [0, 1]),
        (1, [2, 3, 4, 5]),
    ]
    assert answer.decoded_tokens == 6


def test_verified_tokens_carry_the_new_version():
    engine = engine_of(replayed(6, mismatch_rate=0.0))
    half = replace(group_of(1)[0], segments=(Segment(range(4), Zeros(4), 0),), decoded_tokens=4)
    engine.load_weights(Weights(3))
    engine.submit([half], tolerance=0.0)
    (answer,) = engine.step().finished
    assert [(s.version, len(s.tokens)) for s in answer.segments] == [(3, 6)]
    assert answer.decoded_tokens == 6


def test_a_complete_answer_that_verifies_costs_one_prefill_and_no_token():
    clock = VirtualClock()
    costs = Costs(step_seconds=1, prefill_token_seconds=0.5)
    engine = engine_of(replayed(6, mismatch_rate=0.0), clock=clock, costs=costs)
    whole = replace(group_of(1)[0], segments=(Segment(range(6), Zeros(6), 0),), decoded_tokens=6)
    engine.load_weights(Weights(1))
    engine.submit([whole], tolerance=0.0)
    step = engine.step()
    assert (step.decoded_tokens, step.prefilled_tokens, clock.seconds()) == (0, 6, 3.0)
    assert [t.num_tokens for t in step.finished] == [6]


def test_tokens_that_do_not_verify_were_prefilled_all_the_same():
    engine = engine_of(replayed(6, mismatch_rate=0.99))
    half = replace(group_of(1)[0], segments=(Segment(range(5), Zeros(5), 0),), decoded_tokens=5)
    engine.load_weights(Weights(9))
    engine.submit([half], tolerance=0.0)
    step = engine.step()
    assert (step.prefilled_tokens, step.decoded_tokens) == (5, 6)


def kept_tokens(*, rate, age, cached, count, tolerance=0.0):
    """How many cached tokens of each answer survive a resume."""
    settings = LengthSettings(values=(10**5,), mismatch_rate=rate)
    engine = engine_of(settings, slots=count)
    segment = Segment(range(cached), Zeros(cached), 0)
    engine.load_weights(Weights(age))
    engine.submit([replace(t, segments=(segment,)) for t in group_of(count)], tolerance=tolerance)
    back = engine.step().finished
    back += tuple(engine.interrupt())
    return [t.num_tokens - t.decoded_tokens for t in back]


@pytest.mark.parametrize("age", [1, 3])
def test_the_kept_prefix_is_geometric_in_tokens_and_versions(age):
    rate, count = 0.02, 20_000
    kept = kept_tokens(rate=rate, age=age, cached=50_000, count=count)
    survives = (1 - rate) ** age
    expected = survives / (1 - survives)
    deviation = math.sqrt(survives) / (1 - survives)
    assert mean(kept) == pytest.approx(expected, abs=4 * deviation / math.sqrt(count))
    share = sum(k >= 20 for k in kept) / count
    assert share == pytest.approx(survives**20, abs=0.015)
    assert sum(k == 0 for k in kept) / count == pytest.approx(1 - survives, abs=0.01)


def test_a_prefix_shorter_than_the_geometric_number_is_kept_whole():
    kept = kept_tokens(rate=0.02, age=1, cached=10, count=20_000)
    assert max(kept) == 10
    assert sum(k == 10 for k in kept) / 20_000 == pytest.approx(0.98**10, abs=0.015)


def test_tokens_of_the_present_version_and_infinite_tolerance_are_always_kept():
    assert set(kept_tokens(rate=0.5, age=0, cached=100, count=50)) == {100}
    assert set(kept_tokens(rate=0.5, age=4, cached=100, count=50, tolerance=math.inf)) == {100}
    assert set(kept_tokens(rate=0.5, age=4, cached=100, count=50, tolerance=None)) == {100}


@given(st.integers(0, 1000), st.integers(0, 30), st.sampled_from(("same", "fresh")))
def test_after_a_mismatch_the_answer_is_longer_than_what_was_kept(seed, kept, after):
    lengths = lengths_of(LengthSettings(median=10, after_mismatch=after), max_tokens=60)
    (trajectory,) = group_of(1, seed=seed)
    length = lengths.length(trajectory, version=1, divergence=Divergence(1, kept))
    assert kept < length <= 60
    if after == "same":
        assert length == max(kept + 1, lengths.length(trajectory, version=1))


@pytest.mark.parametrize("after", ["same", "fresh"])
def test_an_answer_that_parted_keeps_its_tokens_and_its_length_when_it_is_resumed(after):
    settings = LengthSettings(median=400, mismatch_rate=0.05, after_mismatch=after)
    engine = engine_of(settings, slots=200)
    segment = Segment(range(100), Zeros(100), 0)
    cached = [
        replace(t, segments=(segment,), decoded_tokens=100)
        for t in group_of(200)
        if lengths_of(settings).length(t, version=0) > 100
    ]
    engine.load_weights(Weights(1))
    engine.submit(cached, tolerance=0.0)
    whole = {t.key: t for t in drained(engine, len(cached))}
    engine.submit(cached, tolerance=0.0)
    engine.step()
    halves = engine.interrupt()
    assert sum(t.tokens[-1] > BRANCH for t in halves) > 50
    engine.submit(halves, tolerance=0.0)
    for answer in drained(engine, len(halves)):
        assert answer.tokens == whole[answer.key].tokens


def siblings(prompt_share, *, count=4000):
    lengths = lengths_of(LengthSettings(prompt_share=prompt_share), samples_per_prompt=2)
    drawn = [math.log(lengths.length(t, version=0)) for t in group_of(count, samples_per_prompt=2)]
    return drawn[::2], drawn[1::2]


def test_prompt_share_1_makes_siblings_and_redraws_equal():
    first, second = siblings(1.0, count=50)
    assert first == second
    assert len(set(first)) > 40
    lengths = lengths_of(LengthSettings(prompt_share=1.0))
    (trajectory,) = group_of(1)
    again = replace(trajectory, attempt=1)
    assert lengths.length(trajectory, version=0) == lengths.length(again, version=0)


@pytest.mark.parametrize("prompt_share", [0.0, 0.3, 0.7])
def test_prompt_share_is_the_correlation_of_siblings(prompt_share):
    first, second = siblings(prompt_share)
    assert correlation(first, second) == pytest.approx(prompt_share, abs=0.04)


@pytest.mark.parametrize("prompt_share", [0.0, 0.5, 1.0])
def test_prompt_share_leaves_the_distribution_alone(prompt_share):
    first, _ = siblings(prompt_share)
    shape = NormalDist(mu=math.log(1097), sigma=1.0)
    assert ks_distance(first, [shape.inv_cdf((i + 0.5) / 4000) for i in range(4000)]) < 0.03


def drawn_lengths(settings, count, **kwargs):
    lengths = lengths_of(settings, **kwargs)
    return [lengths.length(t, version=0) for t in group_of(count)]


def test_a_redraw_is_another_length_of_the_same_distribution():
    lengths = lengths_of(LengthSettings())
    first = [lengths.length(t, version=0) for t in group_of(4000)]
    again = [lengths.length(replace(t, attempt=1), version=0) for t in group_of(4000)]
    assert abs(correlation(first, again)) < 0.05
    assert ks_distance(first, again) < 0.05


def test_observed_lengths_come_as_often_as_they_were_seen():
    counts = Counter(drawn_lengths(LengthSettings(values=(5, 100, 5, 9)), 8000))
    assert set(counts) == {5, 9, 100}
    assert counts[5] / 8000 == pytest.approx(0.5, abs=0.02)
    assert counts[9] / 8000 == pytest.approx(0.25, abs=0.02)


def test_a_mixture_has_the_quantiles_of_its_parts():
    parts = ((3.0, 50.0, 0.3), (1.0, 2000.0, 0.5))
    drawn = drawn_lengths(LengthSettings(components=parts), 8000)

    def share(length):
        shapes = [(w, NormalDist(math.log(m), s)) for w, m, s in parts]
        return sum(w * shape.cdf(math.log(length)) for w, shape in shapes) / 4

    for length in (30, 50, 80, 500, 1500, 2000, 4000):
        below = sum(x < length for x in drawn) / 8000
        assert below == pytest.approx(share(length), abs=0.02)


def test_a_mixture_of_one_is_the_lognormal():
    one = drawn_lengths(LengthSettings(components=((1.0, 1097.0, 1.0),)), 2000)
    plain = drawn_lengths(LengthSettings(median=1097.0, sigma=1.0), 2000)
    assert max(abs(a - b) / b for a, b in zip(one, plain, strict=True)) < 0.01


def test_replay_gives_the_lengths_out_in_order_and_starts_over():
    lengths = lengths_of(replayed(7, 8, 9), samples_per_prompt=2)
    drawn = [lengths.length(t, version=0) for t in group_of(2, samples_per_prompt=2)]
    assert drawn == [7, 8, 9, 7]
    again = replace(fresh(0), attempt=1)
    assert lengths.length(again, version=0) in (7, 8, 9)


def test_drift_lets_all_lengths_grow_with_each_version():
    lengths = lengths_of(replayed(100, 1000, drift=0.1))
    first, second = group_of(2)
    assert [lengths.length(first, version=v) for v in (0, 1, 2)] == [100, 110, 121]
    assert lengths.length(second, version=1) == 1100
    shrinking = lengths_of(replayed(100, drift=-0.5))
    assert [shrinking.length(first, version=v) for v in (0, 1, 9)] == [100, 50, 1]


def test_an_answer_is_never_empty_and_never_beyond_the_limit():
    drawn = drawn_lengths(LengthSettings(median=5, sigma=3), 2000, max_tokens=40)
    assert (min(drawn), max(drawn)) == (1, 40)


def test_zeros_behave_like_a_list_of_zeros():
    assert list(Zeros(3)) == [0.0, 0.0, 0.0]
    assert list(Zeros(5)[1:4]) == [0.0] * 3
    with pytest.raises(IndexError):
        Zeros(3)[3]


def test_prompts_count_up_and_run_out():
    source = SimulatedPrompts(3, prompt_tokens=2)
    assert [p.id for p in source.take(2)] == [0, 1]
    assert not source.is_exhausted
    assert [(p.id, len(p.tokens)) for p in source.take(2)] == [(2, 2)]
    assert source.is_exhausted
    assert source.take(1) == []


def test_an_update_takes_its_time_and_counts_a_version():
    clock = VirtualClock()
    costs = Costs(step_seconds=1, update_seconds=2, update_token_seconds=0.5)
    trainer = SimulatedTrainer(costs=costs, clock=clock)
    trainer.update(TrainBatch(0, (done(fresh(0), 3), done(fresh(1), 5))))
    assert (trainer.version, clock.seconds()) == (1, 6.0)
    assert trainer.weights() == Weights(1)
