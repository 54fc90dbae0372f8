"""Corrections for tokens of older weights: every kind against loops over floats."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plain_algorithms as plain
from sortedrl.config.algorithm import Correction
from sortedrl.training.losses import (
    bounded_ratios,
    correction_weights,
    is_held_back,
    is_masked,
    step_scale,
)

KINDS = ("none", "token_tis", "sequence_tis", "token_mis", "sequence_mis")
few = settings(max_examples=60)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def pairs(draw):
    """For each answer, its tokens' log-probabilities under two policies; some are absurd."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    random = Random(draw(st.integers(0, 2**32)))

    def logprob():
        return random.choice((-900.0, -40.0)) if random.random() < 0.1 else random.uniform(-3, 0)

    return [[[logprob() for _ in range(length)] for _ in range(2)] for length in lengths]


def setting(kind, *, least=0.0, most=2.0, **mask):
    return Correction(kind=kind, max_ratio=most, min_ratio=0.0 if kind == "none" else least, **mask)


def tensors(answers):
    behaviour_T = doubles([value for behaviour, _ in answers for value in behaviour])
    proximal_T = doubles([value for _, proximal in answers for value in proximal])
    return behaviour_T, proximal_T, torch.tensor([len(own) for own, _ in answers])


def applied(function, answers, correction):
    behaviour_T, proximal_T, lengths_N = tensors(answers)
    return function(behaviour_T, proximal_T, lengths_N=lengths_N, correction=correction)


@few
@given(
    pairs(),
    st.sampled_from(KINDS),
    st.sampled_from((0.0, 0.0625, 0.51)),
    st.sampled_from((0.73, 1.9, 50.0)),
)
def test_weights_are_those_of_the_plain_formulas(answers, kind, least, most):
    """Bounds are no round numbers, so no ratio lies on one by design."""
    correction = setting(kind, least=least, most=most)
    theirs, held = [], []
    for behaviour, proximal in answers:
        own = plain.correction(kind, behaviour, proximal, least=correction.min_ratio, most=most)
        theirs += own[0]
        held += own[1]
    weights = applied(correction_weights, answers, correction)
    torch.testing.assert_close(weights, doubles(theirs), rtol=1e-9, atol=1e-300)
    assert applied(is_held_back, answers, correction).tolist() == held


@few
@given(
    pairs(),
    st.sampled_from(KINDS),
    st.sampled_from(("token", "sequence", "geometric")),
    st.sampled_from((0.0, 0.63, 0.951)),
    st.sampled_from((1.013, 1.9)),
)
def test_a_mask_of_its_own_goes_beside_every_kind_of_weight(answers, kind, mask, lowest, highest):
    bounds = {"mask_min_ratio": lowest, "mask_max_ratio": highest}
    correction = setting(kind, least=0.31, mask=mask, **bounds)
    theirs, held = [], []
    for behaviour, proximal in answers:
        own = plain.correction(
            kind,
            behaviour,
            proximal,
            least=0.31,
            most=2.0,
            mask=mask,
            lowest=lowest,
            highest=highest,
        )
        theirs += own[0]
        held += own[1]
    weights = applied(correction_weights, answers, correction)
    torch.testing.assert_close(weights, doubles(theirs), rtol=1e-9, atol=1e-300)
    assert applied(is_held_back, answers, correction).tolist() == held
    masked = applied(is_masked, answers, correction)
    assert (weights[masked] == 0).all()


def test_a_geometric_mask_does_not_depend_on_the_length():
    """A ratio of 1.02 at every token: the product leaves any bound, the geometric mean does not."""
    short, long = [[[-1.0] * n, [-1.0 + math.log(1.02)] * n] for n in (2, 500)]
    for mask, kept in (("sequence", [True, False]), ("geometric", [True, True])):
        correction = Correction(kind="none", mask=mask, mask_min_ratio=0.9, mask_max_ratio=1.1)
        for answer, is_kept in zip((short, long), kept, strict=True):
            weights = applied(correction_weights, [answer], correction)
            assert bool((weights == 1).all()) == is_kept
            assert bool((weights == 0).all()) != is_kept


@few
@given(pairs(), st.sampled_from(("token", "sequence")), st.sampled_from((1.9, 5.0)))
def test_the_step_scale_is_the_root_of_the_effective_share(answers, level, most):
    correction = Correction(kind="token_tis", max_ratio=most, scale_by_ess=level)
    scale = applied(step_scale, answers, correction)
    assert scale == pytest.approx(plain.step_scale(level, answers, most=most), rel=1e-9)
    assert 0 < scale <= 1 + 1e-12
    fresh = [[own, own] for own, _ in answers]
    assert applied(step_scale, fresh, correction) == 1
    assert applied(step_scale, answers, Correction(kind="token_tis")) == 1


@few
@given(pairs(), st.sampled_from(KINDS))
def test_weights_are_finite_never_above_the_bound_and_have_no_gradient(answers, kind):
    behaviour_T, proximal_T, lengths_N = tensors(answers)
    correction = setting(kind)
    weights = correction_weights(
        behaviour_T,
        proximal_T.float().requires_grad_(),
        lengths_N=lengths_N,
        correction=correction,
    )
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert ((weights >= 0) & (weights <= 2)).all()


@few
@given(pairs(), st.sampled_from(KINDS))
def test_tokens_of_the_present_weights_count_fully(answers, kind):
    fresh = [[own, own] for own, _ in answers]
    assert (applied(correction_weights, fresh, setting(kind, least=0.5)) == 1).all()
    assert not applied(is_held_back, fresh, setting(kind, least=0.5)).any()


@few
@given(pairs(), st.sampled_from(("tis", "mis")))
def test_of_single_token_answers_the_ratio_is_that_of_the_token(answers, ending):
    single = [[own[:1], other[:1]] for own, other in answers]
    token = applied(correction_weights, single, setting(f"token_{ending}"))
    assert torch.equal(token, applied(correction_weights, single, setting(f"sequence_{ending}")))


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("none", [1, 1, 1, 1]),
        ("token_tis", [2, 0.3, 0.5, 1.5]),
        ("token_mis", [0, 0, 0.5, 1.5]),
        ("sequence_tis", [1.0, 1.0, 0.75, 0.75]),
        ("sequence_mis", [1.0, 1.0, 0.75, 0.75]),
    ],
)
def test_two_answers_by_hand(kind, weights):
    """Ratios 4 and 1/4 in the first answer, 1/2 and 3/2 in the second."""
    answers = [
        [[math.log(0.2), math.log(0.8)], [math.log(0.8), math.log(0.2)]],
        [[math.log(0.4), math.log(0.4)], [math.log(0.2), math.log(0.6)]],
    ]
    ours = applied(correction_weights, answers, setting(kind, least=0.3))
    assert ours.tolist() == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("drift", [0.5, -0.5])
def test_the_ratio_of_a_long_answer_may_leave_the_range_of_floats(drift):
    answers = [[[-1.0] * 4000, [-1.0 + drift] * 4000]]
    truncated = applied(correction_weights, answers, setting("sequence_tis"))
    floored = applied(correction_weights, answers, setting("sequence_tis", least=0.1))
    assert set(floored.tolist()) == {2.0 if drift > 0 else 0.1}
    masked = applied(correction_weights, answers, setting("sequence_mis", least=0.1))
    assert set(truncated.tolist()) == {2.0 if drift > 0 else 0.0}
    assert set(masked.tolist()) == {0.0}


def test_bounded_ratios_are_finite_and_above_0():
    ratios = bounded_ratios(torch.tensor([0.0, -1e4, -1.0]), torch.tensor([-1e4, 0.0, -1.5]))
    assert ratios.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(0.5)])
