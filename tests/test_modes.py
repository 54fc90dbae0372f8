"""What each mode does with one interrupted, one renewed and one resumed answer."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sortedrl.config.schedule import Schedule
from sortedrl.core.controller import Coupled, OnPolicy, Partial, mode_for
from worlds import done, fresh, written

# Two tokens of version 3, three of version 5.
HALF = written(written(fresh(0), 2, version=3), 3, version=5)
DONE = replace(HALF, finish_reason="stop", reward=1.0)


def test_on_policy_throws_interrupted_tokens_away_and_counts_a_new_attempt():
    after = OnPolicy().interrupted(HALF)
    assert (after.num_tokens, after.attempt, after.interruptions) == (0, 1, 1)
    assert (after.decoded_tokens, after.seed) == (5, HALF.seed)


def test_on_policy_draws_a_complete_answer_again_only_under_new_weights():
    mode = OnPolicy()
    assert mode.renewed(done(fresh(0), 4, version=5), version=5) is None
    after = mode.renewed(DONE, version=5)
    assert (after.num_tokens, after.attempt, after.interruptions) == (0, 1, 0)
    assert (after.finish_reason, after.reward) == (None, None)


def test_partial_keeps_interrupted_tokens_with_their_versions_and_the_attempt():
    after = Partial().interrupted(HALF)
    assert after.segments == HALF.segments
    assert (after.attempt, after.interruptions) == (0, 1)


def test_partial_without_a_limit_never_renews_and_never_drops():
    mode = Partial()
    assert mode.renewed(DONE, version=1000) is None
    assert mode.resumed(HALF, version=1000) is HALF


def test_partial_drops_an_answer_whose_oldest_token_is_too_old():
    mode = Partial(max_staleness=2)
    assert mode.resumed(HALF, version=5) is HALF
    after = mode.resumed(HALF, version=6)
    assert (after.num_tokens, after.attempt, after.decoded_tokens) == (0, 0, 5)
    assert mode.renewed(DONE, version=5) is None
    again = mode.renewed(DONE, version=6)
    assert (again.num_tokens, again.finish_reason, again.reward) == (0, None, None)


def test_coupled_keeps_tokens_and_attempt_for_the_engine_to_verify():
    after = Coupled().interrupted(HALF)
    assert after.segments == HALF.segments
    assert (after.attempt, after.interruptions) == (0, 1)
    assert Coupled().resumed(after, version=9) is after


def test_coupled_verifies_a_complete_answer_only_under_new_weights():
    mode = Coupled()
    assert mode.renewed(done(fresh(0), 4, version=5), version=5) is None
    after = mode.renewed(DONE, version=6)
    assert after.segments == DONE.segments
    assert (after.finish_reason, after.reward, after.interruptions) == (None, None, 0)


def test_an_answer_without_tokens_has_no_age():
    for mode in (OnPolicy(), Partial(max_staleness=0), Coupled()):
        assert mode.resumed(fresh(0), version=9) == fresh(0)
        assert mode.renewed(done(fresh(0), 0), version=9) is None


def test_a_schedule_names_its_mode_and_only_coupled_verifies():
    assert mode_for(Schedule(mode="on_policy")) == OnPolicy()
    assert mode_for(Schedule(mode="partial", max_staleness=4)) == Partial(max_staleness=4)
    assert mode_for(Schedule(mode="coupled")).tolerance == 0
    assert mode_for(Schedule(mode="coupled", tolerance=0.3)).tolerance == 0.3
    assert mode_for(Schedule(mode="on_policy")).tolerance is None
    assert mode_for(Schedule(mode="partial")).tolerance is None


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 5), st.none() | st.integers(0, 3))
def test_after_a_resume_no_cached_token_is_older_than_the_limit(ages, attempt, limit):
    trajectory = replace(fresh(0), attempt=attempt)
    for age in sorted(ages, reverse=True):
        trajectory = written(trajectory, 2, version=10 - age)
    after = Partial(max_staleness=limit).resumed(trajectory, version=10)
    assert after.tokens in ([], trajectory.tokens)
    if limit is None:
        assert after == trajectory
    else:
        assert (after.tokens == trajectory.tokens) == (max(ages, default=0) <= limit)
    assert (after.seed, after.attempt) == (trajectory.seed, attempt)
