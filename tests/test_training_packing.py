"""Packs: nothing lost, nothing twice, nothing over the budget, and tight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.errors import ConfigError
from sortedrl.training.batch import Pack, TokenSequence, fill, packs

lengths = st.lists(st.integers(1, 40), max_size=60)
budgets = st.integers(1, 50)


@given(lengths, budgets)
def test_every_sequence_is_in_exactly_one_pack(lengths, budget):
    packed = packs(lengths, budget=budget)
    assert sorted(i for pack in packed for i in pack.indices) == list(range(len(lengths)))


@given(lengths, budgets)
def test_a_pack_holds_at_most_the_budget_or_one_long_sequence(lengths, budget):
    for pack in packs(lengths, budget=budget):
        assert pack.num_tokens == sum(lengths[i] for i in pack.indices) > 0
        assert pack.num_tokens <= budget or len(pack.indices) == 1


@given(lengths, budgets)
def test_no_two_packs_could_be_one(lengths, budget):
    sizes = sorted(pack.num_tokens for pack in packs(lengths, budget=budget))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > budget


@given(lengths, budgets, st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_does_not_change_how_they_are_packed(lengths, budget, random):
    shuffled = lengths[:]
    random.shuffle(shuffled)

    def sizes(lengths):
        return [[lengths[i] for i in pack.indices] for pack in packs(lengths, budget=budget)]

    assert sizes(lengths) == sizes(shuffled)


@given(lengths, budgets)
def test_fill_is_a_share(lengths, budget):
    packed = packs(lengths, budget=budget)
    assert 0 < fill(packed, budget=budget) <= 1


def test_short_sequences_go_where_they_fit_best():
    packed = packs([2, 6, 5, 3, 4], budget=10)
    assert packed == [Pack((1, 4), 10), Pack((2, 3, 0), 10)]
    assert fill(packed, budget=10) == 1


def test_fill_counts_the_room_that_is_left_and_none_in_a_pack_over_the_budget():
    assert fill([Pack((0,), 30), Pack((1,), 5)], budget=10) == 35 / 40
    assert fill([], budget=10) == 1


def test_the_last_token_is_predicted_but_never_read():
    assert TokenSequence([1, 2, 3], [4, 5]).num_rows == 4


@pytest.mark.parametrize(("lengths", "budget"), [([1], 0), ([3, 0], 8)])
def test_no_budget_and_no_tokens_are_refused(lengths, budget):
    with pytest.raises(ConfigError, match="at least 1"):
        packs(lengths, budget=budget)
