import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation_worlds import answer, verdicts
from sortedrl.errors import DataError
from sortedrl.evaluation import statistics as intervals
from sortedrl.evaluation.statistics import Asked, Evaluation, pass_at, pass_sizes, summarise


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 400)


@given(row=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(row, data):
    k = data.draw(st.integers(1, len(row)))
    choices = list(combinations(row, k))
    share = sum(map(any, choices)) / len(choices)
    assert pass_at(k, num_right=sum(row), num_samples=len(row)) == pytest.approx(share, abs=1e-15)


@given(samples=st.integers(1, 40), chance=st.floats(0, 1), data=st.data())
def test_pass_at_k_is_right_on_average_whatever_the_chance(samples, chance, data):
    k = data.draw(st.integers(1, samples))
    expected = math.fsum(
        math.comb(samples, right)
        * chance**right
        * (1 - chance) ** (samples - right)
        * pass_at(k, num_right=right, num_samples=samples)
        for right in range(samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-9)


def test_pass_at_k_is_exact_where_floats_would_run_over():
    assert pass_at(512, num_right=1, num_samples=4096) == 0.125
    assert pass_at(4096, num_right=1, num_samples=4096) == 1.0
    assert pass_at(2048, num_right=0, num_samples=4096) == 0.0


def test_pass_sizes_are_powers_of_two_and_everything():
    assert [pass_sizes(n) for n in (1, 2, 3, 8, 10)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 10],
    ]


rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=8)


@given(rows=rows, order=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_numbers_are_means_over_prompts_in_any_order_of_answers(rows, order):
    evaluation = verdicts(rows)
    shuffled = list(evaluation.answers)
    order.shuffle(shuffled)
    summary = summarise(Evaluation(label="model", answers=shuffled))
    assert summary == summarise(evaluation)
    (part,) = summary.parts
    mean = sum(sum(row) / len(row) for row in rows) / len(rows)
    assert part.mean.value == pytest.approx(mean)
    assert part.reward == pytest.approx(mean)
    values = [rate.value for rate in part.passes.values()]
    for rate in part.passes.values():
        assert 0 <= rate.low <= rate.value <= rate.high <= 1
        assert rate.low < rate.high
    if len({len(row) for row in rows}) == 1:
        assert values == sorted(values)


def test_prompts_with_too_few_answers_count_for_the_mean_but_not_for_pass_at_k():
    evaluation = verdicts([[1, 0, 0, 0], [1, 1], [0]])
    (part,) = summarise(evaluation).parts
    assert (part.samples, part.num_prompts, part.num_short, part.num_answers) == (4, 3, 2, 7)
    assert part.mean.value == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert part.passes[2].value == pytest.approx((1 / 2 + 1) / 2)
    assert part.passes[4].value == 1
    assert {k: rate.num_prompts for k, rate in part.passes.items()} == {1: 3, 2: 2, 4: 1}
    assert part.num_missing is None


def test_what_was_asked_decides_what_is_short_and_missing():
    asked = {"sums": Asked(prompts=10, samples=8)}
    evaluation = Evaluation(label="model", answers=verdicts([[1, 0]] * 3).answers, asked=asked)
    (part,) = summarise(evaluation).parts
    assert (part.samples, part.num_short, part.num_missing) == (8, 3, 7)
    assert list(part.passes) == [1, 2]


def test_every_level_has_its_numbers_in_the_order_of_levels():
    evaluation = verdicts([[1], [0], [1], [1]], levels=["10", "9", "10", None])
    summary = summarise(evaluation)
    assert [(part.level, part.num_prompts) for part in summary.parts] == [
        (None, 4),
        ("9", 1),
        ("10", 2),
    ]
    assert [part.mean.value for part in summary.levels("sums")] == [0, 1]


def test_a_single_level_is_not_told_again():
    assert len(summarise(verdicts([[1], [0]], levels=["1", "1"])).parts) == 1


def test_in_the_macro_average_every_task_counts_the_same():
    small, large = verdicts([[1, 1]] * 2, task="small"), verdicts([[0, 0]] * 50, task="large")
    summary = summarise(Evaluation(label="model", answers=[*small.answers, *large.answers]))
    assert [part.task for part in summary.tasks] == ["small", "large"]
    assert summary.macro[1].value == 0.5
    assert summary.macro[1].num_prompts == 52
    assert 0 < summary.macro[1].low < 0.5 < summary.macro[1].high < 1
    assert list(summary.macro) == [1, 2]
    assert summarise(small).macro == {}


def test_the_macro_average_has_only_what_all_tasks_have():
    few, many = verdicts([[1]] * 3, task="few"), verdicts([[0, 1]] * 3, task="many")
    summary = summarise(Evaluation(label="model", answers=[*few.answers, *many.answers]))
    assert list(summary.macro) == [1]


def test_truncated_failed_and_unscored_answers_are_counted():
    answers = [
        answer(0, 0, finish_reason="length", num_tokens=100),
        answer(0, 1, failure="timeout", reward=None, num_tokens=20),
        answer(1, 0, reward=3.0, is_correct=True, num_tokens=30),
        answer(1, 1, failure="timeout", reward=None, num_tokens=50),
    ]
    (part,) = summarise(Evaluation(label="model", answers=answers)).parts
    assert part.truncated == 0.25
    assert part.tokens == 50
    assert part.reward == 1.5
    assert part.failures == {"timeout": 2}
    assert part.mean.value == 0.25


def test_named_parts_of_the_reward_are_averaged_over_the_answers_that_have_them():
    answers = [
        answer(0, 0, parts={"answered": 1.0, "length": 4.0}),
        answer(0, 1, parts={"answered": 0.0}),
        answer(1, 0, parts={"answered": 0.0}),
    ]
    (part,) = summarise(Evaluation(label="model", answers=answers)).parts
    assert part.reward_parts == {"answered": 0.25, "length": 4.0}


def test_without_any_reward_there_is_no_mean_reward():
    answers = [answer(0, 0, failure="died", reward=None)]
    assert summarise(Evaluation(label="model", answers=answers)).parts[0].reward is None


def test_an_evaluation_without_answers_has_no_numbers():
    with pytest.raises(DataError, match="at least one answer"):
        summarise(Evaluation(label="model", answers=[]))
