from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.config.schedule import Schedule
from sortedrl.core.events import Interrupt, Start
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.lengths import (
    LengthObservation,
    LengthSettings,
    length_observations,
    written_lengths,
)
from sortedrl.simulate.settings import PRESETS

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def test_complete_answers_give_their_own_distribution():
    survival = written_lengths([LengthObservation(0, n, True) for n in (2, 4, 4, 10)])
    assert survival.survival == ((2, 0.75), (4, 0.25), (10, 0.0))
    assert survival.mean == pytest.approx(5.0)
    assert survival.sample_lengths(4) == (2, 4, 4, 10)
    assert [survival.quantile(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [2, 2, 4, 4, 10]


def test_an_interrupted_answer_counts_as_far_as_it_was_seen():
    # At length 4 two of three are left, and one ends; the one stopped at 3 says nothing there.
    survival = written_lengths(
        [
            LengthObservation(0, 2, True),
            LengthObservation(0, 3, False),
            LengthObservation(0, 4, True),
            LengthObservation(0, 8, True),
        ]
    )
    assert survival.survival == ((2, 0.75), (4, 0.375), (8, 0.0))


def test_a_resumed_answer_is_seen_only_from_its_entry_on():
    survival = written_lengths(
        [
            LengthObservation(0, 2, True),
            LengthObservation(0, 3, False),
            LengthObservation(3, 8, True),
        ]
    )
    assert survival.survival == ((2, 0.5), (8, 0.0))


def test_what_was_never_seen_to_end_ends_at_the_longest_exit():
    assert written_lengths(
        [LengthObservation(0, 2, True), LengthObservation(0, 9, False)]
    ).survival == (
        (2, 0.5),
        (9, 0.0),
    )
    assert written_lengths([LengthObservation(0, 5, False)]).mean == 5
    assert written_lengths(
        [LengthObservation(0, 9, True), LengthObservation(0, 9, False)]
    ).survival == ((9, 0.0),)


def test_a_stretch_without_tokens_shows_nothing():
    with pytest.raises(ValueError, match="at least one observation"):
        written_lengths([LengthObservation(7, 7, True)])


@given(lengths)
def test_with_nothing_interrupted_the_mean_is_the_plain_mean(values):
    survival = written_lengths([LengthObservation(0, n, True) for n in values])
    assert survival.mean == pytest.approx(sum(values) / len(values))
    assert survival.sample_lengths(len(values)) == tuple(sorted(values))


@given(lengths, st.data())
def test_cutting_answers_into_resumed_stretches_changes_nothing(values, data):
    pieces = []
    for value in values:
        cut = data.draw(st.integers(1, value))
        pieces += (
            [LengthObservation(0, value, True)]
            if cut == value
            else [LengthObservation(0, cut, False), LengthObservation(cut, value, True)]
        )
    whole = written_lengths([LengthObservation(0, n, True) for n in values])
    assert written_lengths(pieces).mean == pytest.approx(whole.mean)
    assert written_lengths(pieces).sample_lengths(20) == whole.sample_lengths(20)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.booleans()), min_size=1))
def test_shares_fall_from_1_to_0_and_quantiles_rise(drawn):
    survival = written_lengths(
        [LengthObservation(entry, entry + more, end) for entry, more, end in drawn]
    )
    shares = [1.0, *(longer for _, longer in survival.survival)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0
    sample = survival.sample_lengths(50)
    assert list(sample) == sorted(sample)


def test_a_verified_answer_is_one_draw_and_a_redrawn_one_two():
    def start(seconds, attempt, cached):
        return Start(
            seconds=seconds,
            round=0,
            prompt=0,
            sample=0,
            group=0,
            attempt=attempt,
            prompt_tokens=3,
            cached=cached,
            dropped=0,
            running=1,
        )

    def interrupt(seconds, tokens, decoded, kept):
        return Interrupt(
            seconds=seconds,
            prompt=0,
            sample=0,
            tokens=tokens,
            decoded=decoded,
            kept=kept,
            running=0,
        )

    resumed = [start(0, 0, 0), interrupt(1, 9, 9, 9), start(2, 0, 9), interrupt(3, 7, 2, 7)]
    assert list(length_observations(resumed)) == [LengthObservation(0, 7, False)]
    redrawn = [start(0, 0, 0), interrupt(1, 9, 9, 0), start(2, 1, 0), interrupt(3, 4, 4, 0)]
    assert list(length_observations(redrawn)) == [
        LengthObservation(0, 9, False),
        LengthObservation(0, 4, False, False),
    ]


def test_ends_are_counted_among_first_draws_while_there_are_enough():
    first = [LengthObservation(0, 5, True)] * 10 + [LengthObservation(0, 9, True)] * 10
    redraws = [LengthObservation(0, 9, True, is_first=False)] * 100
    survival = written_lengths(first + redraws)
    assert survival.survival == ((5, 0.5), (9, 0.0))


@pytest.mark.parametrize("prompt_share", [0.0, 0.5, 0.9])
def test_redraws_that_resemble_each_other_hardly_spoil_the_estimate(prompt_share):
    lengths = LengthSettings(prompt_share=prompt_share)
    simulation = replace(
        PRESETS["paper"](), groups=4, schedule=Schedule(mode="on_policy"), lengths=lengths
    )
    events = []
    outcome = simulate(simulation, record=events.append)
    estimate = written_lengths(length_observations(events))
    assert estimate.mean == pytest.approx(outcome.bias.reference_mean, rel=0.12)
    median = estimate.quantile(0.5)
    assert estimate.longer_than(median) <= 0.5 <= estimate.longer_than(median - 1)


@pytest.mark.parametrize("mode", ["on_policy", "partial", "coupled"])
def test_the_true_mean_is_found_in_a_run_that_interrupts(mode):
    paper = PRESETS["paper"]()
    events = []
    simulation = replace(paper, groups=4, schedule=Schedule(mode=mode))
    outcome = simulate(simulation, record=events.append)
    estimate = written_lengths(length_observations(events)).mean
    assert estimate == pytest.approx(outcome.bias.reference_mean, rel=0.05)
    if mode == "on_policy":
        assert outcome.bias.ratio < 0.7
