from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation_worlds import chances, sampled
from sortedrl.evaluation import statistics as intervals
from sortedrl.evaluation.statistics import (
    difference_draws,
    estimate,
    mean_draws,
    p_value,
    rate_draws,
)


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 500)


def interval(values, *, key="test"):
    (draws,) = rate_draws([(value,) for value in values], key=key)
    return estimate(sum(values) / len(values), draws, num_prompts=len(values))


def shares(rows):
    return [sum(row) / len(row) for row in rows]


@pytest.mark.usefixtures("few_resamples")
@given(values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=60))
@settings(max_examples=60)
def test_an_interval_holds_its_value_has_width_and_stays_in_range(values):
    found = interval(values)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high
    assert found == interval(list(reversed(values)))


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("prompts", [30, 200])
@pytest.mark.parametrize("samples", [1, 4])
def test_95_of_100_intervals_hold_the_truth(prompts, samples):
    held = 0
    worlds = 300
    for world in range(worlds):
        key = f"{world} {prompts} {samples}"
        rows = sampled(key, chances(key, prompts=prompts), samples=samples)
        found = interval(shares(rows), key=key)
        held += found.low <= 1 / 3 <= found.high
    assert 0.92 <= held / worlds <= 0.98


@pytest.mark.usefixtures("few_resamples")
def test_it_also_holds_where_nearly_everything_is_right():
    held = 0
    worlds = 300
    for world in range(worlds):
        rows = sampled(world, [0.95] * 30, samples=1)
        found = interval(shares(rows), key=str(world))
        held += found.low <= 0.95 <= found.high
    assert 0.92 <= held / worlds <= 0.995


def test_all_right_is_not_certain_and_more_prompts_say_more():
    few, many = interval([1.0] * 10), interval([1.0] * 1000)
    assert few.high == many.high == 1
    assert 0.75 < few.low < 0.85
    assert 0.996 < many.low < 0.999
    assert interval([0.0] * 10).high == pytest.approx(1 - few.low, abs=0.02)


def test_with_one_answer_for_each_prompt_it_is_the_jeffreys_interval():
    found = interval([1.0] * 7 + [0.0] * 13)
    # 2.5 % and 97.5 % of the Beta(7.5, 13.5) distribution
    assert found.low == pytest.approx(0.1723, abs=0.01)
    assert found.high == pytest.approx(0.5678, abs=0.01)


def test_more_answers_to_the_same_prompts_do_not_feign_more_prompts():
    prompts = chances(0, prompts=40)
    once = interval(shares(sampled(1, prompts, samples=64)))
    often = interval(shares(sampled(1, prompts, samples=4096)))
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.1)


def test_prompts_without_a_value_are_left_out():
    with_gaps = [(1.0, 1.0), (0.0, None), (0.0, None), (1.0, 0.0)]
    _, gaps = rate_draws(with_gaps, key="test")
    (alone,) = rate_draws([(1.0,), (0.0,)], key="other")
    assert sorted(gaps)[5000] == pytest.approx(sorted(alone)[5000], abs=0.03)


def test_many_different_values_are_resampled_as_well_as_few():
    random = Random(0)
    values = [random.random() for _ in range(1000)]
    found = interval(values)
    spread = (sum((v - found.value) ** 2 for v in values) / 1000 / 1000) ** 0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.05)


changes = st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.0, 0.25, 1.0]), min_size=1, max_size=50)


@pytest.mark.usefixtures("few_resamples")
@given(values=changes)
@settings(max_examples=60)
def test_p_is_below_5_per_cent_exactly_where_the_interval_leaves_out_0(values):
    (draws,) = difference_draws([(value,) for value in values], key="test")
    found = estimate(sum(values) / len(values), draws, num_prompts=len(values))
    p = p_value(draws)
    assert 0 < p <= 1
    assert (p < 0.05) == (found.low > 0 or found.high < 0)


def test_pairs_that_never_differ_do_not_prove_equality():
    (draws,) = difference_draws([(0.0,)] * 20, key="test")
    found = estimate(0.0, draws, num_prompts=20)
    assert found.low < -0.05
    assert found.high > 0.05
    assert p_value(draws) > 0.9


def test_five_wins_of_five_are_judged_like_tossed_coins():
    (draws,) = difference_draws([(1.0,)] * 5 + [(0.0,)] * 15, key="test")
    assert p_value(draws) == pytest.approx(2 / 2**6, abs=0.01)


def test_the_macro_average_of_two_tasks_is_surer_than_either():
    first, second = ([(0.0,)] * 20 + [(1.0,)] * 20 for _ in range(2))
    (one,), (two,) = rate_draws(first, key="one"), rate_draws(second, key="two")
    alone = estimate(0.5, one, num_prompts=40)
    both = estimate(0.5, mean_draws([one, two]), num_prompts=80)
    assert (both.high - both.low) / (alone.high - alone.low) == pytest.approx(0.707, abs=0.03)
