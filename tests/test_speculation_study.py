"""The replay of drafts: what is right stands, and no answer takes fewer steps than it can."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from speculation_study import (
    DRAFTS,
    Answer,
    aligned_steps,
    complete,
    num_right,
    own_source,
    replay,
    steps_with,
    written_so_far,
)

texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(texts, texts, texts, st.sampled_from(DRAFTS))
def test_an_answer_takes_one_step_per_token_at_most_and_k_plus_1_tokens_per_step_at_best(
    prompt, answer, other, count
):
    for source in (
        own_source(prompt, answer),
        written_so_far(prompt, [other]),
        complete(prompt, [other]),
    ):
        steps = steps_with(prompt, answer, source, count=count)
        assert -(-len(answer) // (count + 1)) <= steps <= len(answer)


@pytest.mark.parametrize("count", DRAFTS)
def test_a_source_that_holds_the_answer_gets_every_draft_right(count):
    prompt, answer = list(range(50, 55)), list(range(36))
    fewest = -(-len(answer) // (count + 1))
    assert steps_with(prompt, answer, complete(prompt, [answer]), count=count) == fewest
    assert aligned_steps(answer, answer, start=0, count=count) == fewest


def test_a_sibling_in_the_same_step_is_no_step_ahead():
    prompt, answer = [9], list(range(20))
    assert steps_with(prompt, answer, written_so_far(prompt, [answer]), count=4) == 20


def test_an_answer_that_repeats_itself_is_its_own_source():
    answer = [1, 2, 3, 4, 5] * 10
    assert steps_with([9], answer, own_source([9], answer), count=4) == 5 + 1 + 9


def test_only_what_coupled_mode_threw_away_counts_as_thrown_away():
    whole = list(range(20))
    changed = [*whole[:5], 99, *whole[6:]]
    rows = {
        row.source: row
        for row in replay([Answer("kind", [50], before=whole, epoch=whole, coupled=changed)])
    }
    assert rows["aligned"].per_step[8] == 14 / 2
    assert rows["coupled"].per_step[8] == 14 / 3
    same = replay([Answer("kind", [50], before=whole, epoch=whole, coupled=whole)])
    assert "aligned" not in {row.source for row in same}


@given(texts, texts)
def test_right_tokens_are_a_common_beginning(drafted, true):
    count = num_right(drafted, true)
    assert drafted[:count] == true[:count]
    assert count == min(len(drafted), len(true)) or drafted[count] != true[count]
