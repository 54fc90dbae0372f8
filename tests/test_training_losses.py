"""Losses and their gradients against loops over floats, and parts that add up to the whole."""

import math
from dataclasses import fields, replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plain_algorithms as plain
from sortedrl.config.algorithm import Algorithm
from sortedrl.training.losses import (
    LossInputs,
    TokenLosses,
    aggregation_weights,
    kl_estimates,
    loss,
    policy_losses,
    value_losses,
)

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
ESTIMATORS = ("k1", "k2", "k3")
CLIPS = [Algorithm(), Algorithm(clip=0.1, clip_high=0.35), Algorithm(dual_clip=2.5)]
LIMIT = 16
JOINT = Algorithm(name="grpo", kl_coef=0.3, entropy_coef=0.02, dual_clip=3.0)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
few = settings(max_examples=50)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def logprob(random):
    """Mostly of a size that is met, sometimes absurd."""
    return random.choice((-60.0, -4e3, -1.0)) if random.random() < 0.2 else random.uniform(-2, 0)


def number(random):
    return random.choice((0.0, 1.0)) if random.random() < 0.2 else random.uniform(-5, 5)


def columns(*kinds):
    """Several lists of the same length, drawn from a seed because that is fast."""

    def drawn(seed, size):
        random = Random(seed)
        return [[kind(random) for _ in range(size)] for kind in kinds]

    return st.builds(drawn, st.integers(0, 2**32), st.integers(1, 20))


def bounds(algorithm):
    return {
        "low": algorithm.effective_clip,
        "high": algorithm.effective_clip_high,
        "dual": algorithm.dual_clip,
    }


def slopes(losses_T, leaf_T):
    """The derivative of each token's loss by its own number."""
    return torch.autograd.grad(losses_T.sum(), leaf_T)[0]


@pytest.mark.parametrize("algorithm", CLIPS, ids=["symmetric", "asymmetric", "dual"])
@few
@given(columns(logprob, logprob, number))
def test_policy_losses_and_their_slopes_are_those_of_the_plain_formulas(algorithm, batch):
    current, proximal, advantages = batch
    current_T = doubles(current).requires_grad_()
    ours = policy_losses(current_T, doubles(proximal), doubles(advantages), algorithm=algorithm)
    rows = list(zip(current, proximal, advantages, strict=True))
    theirs = [plain.policy_loss(*row, **bounds(algorithm)) for row in rows]
    torch.testing.assert_close(ours.loss_T, doubles(theirs), rtol=1e-9, atol=1e-12)
    steep = [plain.policy_slope(*row, **bounds(algorithm)) for row in rows]
    torch.testing.assert_close(
        slopes(ours.loss_T, current_T), doubles(steep), rtol=1e-9, atol=1e-12
    )


@few
@given(columns(logprob, logprob, number))
def test_where_a_token_is_clipped_its_gradient_has_stopped_and_elsewhere_not(batch):
    algorithm = Algorithm(clip=0.1, clip_high=0.35, dual_clip=2.5)
    current, proximal, advantages = (doubles(column) for column in batch)
    # Beyond the bound of log ratios the gradient has stopped too.
    current = proximal + (current - proximal).clamp(-19, 19)
    current.requires_grad_()
    ours = policy_losses(current, proximal, advantages, algorithm=algorithm)
    is_clipped = ours.is_clipped_low_T | ours.is_clipped_high_T | ours.is_dual_clipped_T
    has_stopped = slopes(ours.loss_T, current) == 0
    assert torch.equal(is_clipped | (advantages == 0), has_stopped)


KINDS = ("gspo", "gspo_token", "cispo", "sapo", "gmpo")


@st.composite
def answered(draw):
    """Current and anchor log-probabilities and advantages of some answers, as lists per answer."""
    lengths, random = draw(LENGTHS), Random(draw(st.integers(0, 2**32)))
    width = draw(st.sampled_from((1e-3, 0.5, 3.0)))

    def answer(length):
        anchor = [random.uniform(-3, 0) for _ in range(length)]
        current = [value + random.uniform(-width, width) for value in anchor]
        return current, anchor, [number(random) for _ in range(length)]

    return [answer(length) for length in lengths]


@pytest.mark.parametrize("kind", KINDS)
@few
@given(answered(), st.integers(0, 1000))
def test_the_other_losses_are_those_of_the_plain_formulas(kind, answers, seed):
    algorithm = Algorithm(loss=kind)
    columns = [doubles([v for answer in answers for v in answer[i]]) for i in range(3)]
    current_T = columns[0].requires_grad_()
    lengths_N = torch.tensor([len(answer[0]) for answer in answers])
    ours = policy_losses(current_T, *columns[1:], algorithm=algorithm, lengths_N=lengths_N)
    random = Random(seed)
    weights, losses, slope = [], [], []
    for answer in answers:
        own = [random.random() for _ in answer[0]]
        values, rows = plain.answer_losses(kind, *answer, **bounds(algorithm))
        losses += values
        weights += own
        slope += [
            sum(w * row[place] for w, row in zip(own, rows, strict=True))
            for place in range(len(own))
        ]
    torch.testing.assert_close(ours.loss_T, doubles(losses), rtol=1e-9, atol=1e-9)
    total = (ours.loss_T * doubles(weights)).sum()
    torch.testing.assert_close(slopes(total, current_T), doubles(slope), rtol=1e-9, atol=1e-9)


def test_where_all_tokens_of_an_answer_have_one_advantage_gspo_token_is_gspo():
    current_T = doubles([-1.0, -2.0, -0.5, -1.5]).requires_grad_()
    anchor_T = doubles([-1.0001, -2.0002, -0.4999, -1.5])
    advantages_T, lengths_N = doubles([0.7, 0.7, 0.7, -1.0]), torch.tensor([3, 1])
    weights_T = aggregation_weights(lengths_N, "sequence_mean", max_tokens=LIMIT)
    found = []
    for name in ("gspo", "gspo_token"):
        ours = policy_losses(
            current_T, anchor_T, advantages_T, algorithm=Algorithm(loss=name), lengths_N=lengths_N
        )
        total = (weights_T * ours.loss_T).sum()
        found.append((total.item(), slopes(total, current_T).tolist()))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == pytest.approx(found[1][1])


def test_gspo_clips_a_whole_answer():
    """Both tokens of an answer are clipped where their mean is, also the one that has not moved."""
    ours = policy_losses(
        doubles([-0.9, -1.0, -1.0]),
        doubles([-1.0, -1.0, -1.0]),
        doubles([1.0, 1.0, 1.0]),
        algorithm=Algorithm(name="gspo"),
        lengths_N=torch.tensor([2, 1]),
    )
    assert ours.is_clipped_high_T.tolist() == [True, True, False]
    assert ours.loss_T.tolist() == pytest.approx([-1.0004, -1.0004, -1.0])


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_start_of_an_update_every_loss_has_the_gradient_of_reinforce(kind):
    """Over the answer as a whole, where its tokens have one advantage."""
    current_T = doubles([-1.0, -2.0, -3.0]).requires_grad_()
    ours = policy_losses(
        current_T,
        current_T.detach(),
        doubles([0.5, 0.5, -1.5]),
        algorithm=Algorithm(loss=kind),
        lengths_N=torch.tensor([2, 1]),
    )
    assert slopes(ours.loss_T, current_T).tolist() == pytest.approx([-0.5, -0.5, 1.5])


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_ratios_give_finite_losses_and_gradients_of_every_kind(kind):
    current_T = torch.tensor([0.0, 0.0, 0.0, -500.0, -500.0], requires_grad=True)
    ours = policy_losses(
        current_T,
        torch.tensor([-500.0, -500.0, -500.0, 0.0, 0.0]),
        torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0]),
        algorithm=Algorithm(loss=kind),
        lengths_N=torch.tensor([2, 1, 1, 1]),
    )
    assert ours.loss_T.isfinite().all()
    assert slopes(ours.loss_T, current_T).isfinite().all()


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    current_T = doubles([-1.0, -1.0]).requires_grad_()
    ours = policy_losses(
        current_T, doubles([-4.0, -1.5]), doubles([1.0, 1.0]), algorithm=Algorithm(name="cispo")
    )
    assert ours.is_clipped_high_T.tolist() == [True, False]
    assert slopes(ours.loss_T, current_T).tolist() == pytest.approx([-5.0, -math.exp(0.5)])


def test_policy_losses_by_hand():
    """Ratios 2, 2, 1/2, 1/2, 4 and 1 with clips at 0.8, 1.2 and 3."""
    ratios = doubles([2.0, 2.0, 0.5, 0.5, 4.0, 1.0])
    advantages = doubles([1.0, -1.0, 1.0, -1.0, -2.0, 0.0])
    ours = policy_losses(
        ratios.log() - 3, torch.full((6,), -3.0), advantages, algorithm=Algorithm(dual_clip=3.0)
    )
    assert ours.loss_T.tolist() == pytest.approx([-1.2, 2.0, -0.5, 0.8, 6.0, 0.0])
    assert ours.is_clipped_high_T.tolist() == [True, False, False, False, False, False]
    assert ours.is_clipped_low_T.tolist() == [False, False, False, True, False, False]
    assert ours.is_dual_clipped_T.tolist() == [False, False, False, False, True, False]


def test_at_the_start_of_an_update_the_gradient_is_that_of_reinforce():
    current_T = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages_T = torch.tensor([0.5, -1.5, 0.0])
    ours = policy_losses(current_T, current_T.detach(), advantages_T, algorithm=Algorithm())
    assert torch.equal(slopes(ours.loss_T, current_T), -advantages_T)


def test_extreme_ratios_in_float32_give_finite_losses_and_gradients():
    current_T = torch.tensor([0.0, 0.0, 0.0, -500.0, -500.0], requires_grad=True)
    anchor_T = torch.tensor([-500.0, -500.0, -500.0, 0.0, 0.0])
    advantages_T = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0])
    ours = policy_losses(current_T, anchor_T, advantages_T, algorithm=Algorithm())
    assert ours.loss_T.isfinite().all()
    assert slopes(ours.loss_T, current_T).isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@few
@given(columns(logprob, logprob))
def test_divergences_and_their_slopes_are_those_of_the_plain_formulas(estimator, batch):
    policy, reference = batch
    policy_T = doubles(policy).requires_grad_()
    ours = kl_estimates(policy_T, doubles(reference), estimator)
    rows = list(zip(policy, reference, strict=True))
    theirs = [plain.kl_estimate(*row, estimator) for row in rows]
    torch.testing.assert_close(ours, doubles(theirs), rtol=1e-9, atol=1e-12)
    steep = [plain.kl_slope(*row, estimator) for row in rows]
    torch.testing.assert_close(slopes(ours, policy_T), doubles(steep), rtol=1e-9, atol=1e-12)


def test_k1_and_k3_are_right_on_average_over_what_the_policy_samples():
    policy_V = doubles([0.2, 0.1, 1.3, -0.4]).log_softmax(-1)
    reference_V = doubles([0.9, -0.1, 0.6, 0.0]).log_softmax(-1)
    exact = float((policy_V.exp() * (policy_V - reference_V)).sum())
    assert exact > 0.05
    for estimator in ("k1", "k3"):
        estimates_V = kl_estimates(policy_V, reference_V, estimator)
        assert float((policy_V.exp() * estimates_V).sum()) == pytest.approx(exact, rel=1e-12)


@few
@given(columns(logprob, logprob))
def test_k2_and_k3_are_never_negative_in_float32(batch):
    policy_T, reference_T = (torch.tensor(column) for column in batch)
    for estimator in ("k2", "k3"):
        assert (kl_estimates(policy_T, reference_T, estimator) >= 0).all()


@pytest.mark.parametrize("clip", [None, 0.2, 1.5])
@few
@given(columns(number, number, number))
def test_value_losses_are_those_of_the_plain_formula(clip, batch):
    ours = value_losses(*(doubles(column) for column in batch), clip=clip)
    theirs = [plain.value_loss(*row, clip=clip) for row in zip(*batch, strict=True)]
    torch.testing.assert_close(ours, doubles(theirs), rtol=1e-9, atol=1e-12)


def test_the_gradient_of_a_value_stops_where_it_has_moved_towards_its_target_by_the_clip():
    values_T = doubles([0.5, 0.5, 0.1]).requires_grad_()
    losses_T = value_losses(values_T, doubles([0.0] * 3), doubles([1.0, -1.0, 1.0]), clip=0.2)
    assert losses_T.tolist() == pytest.approx([0.32, 1.125, 0.405])
    assert slopes(losses_T, values_T).tolist() == pytest.approx([0.0, 1.5, -0.9])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@few
@given(st.integers(0, 1000), LENGTHS)
def test_weights_join_token_losses_as_the_plain_formulas_do(aggregation, seed, lengths):
    random = Random(seed)
    losses = [[number(random) for _ in range(length)] for length in lengths]
    lengths_N = torch.tensor([len(own) for own in losses])
    weights_T = aggregation_weights(lengths_N, aggregation, max_tokens=LIMIT)
    ours = (weights_T.double() * doubles([value for own in losses for value in own])).sum()
    theirs = plain.joined(aggregation, losses, max_tokens=LIMIT)
    assert weights_T.dtype == torch.float32
    # Weights are float32, the sum is not.
    assert float(ours) == pytest.approx(theirs, rel=0, abs=5 * 2**-23)


def test_weights_by_hand():
    lengths_N = torch.tensor([1, 3])
    expected = {
        "token_mean": [1 / 4] * 4,
        "sequence_mean": [1 / 2, 1 / 6, 1 / 6, 1 / 6],
        "constant": [1 / 32] * 4,
    }
    for aggregation, weights in expected.items():
        ours = aggregation_weights(lengths_N, aggregation, max_tokens=LIMIT)
        assert ours.tolist() == pytest.approx(weights)


def random_step(seed, *, lengths):
    """Current log-probabilities, entropies and the rest of the inputs, in float64."""
    random = Random(seed)
    size = sum(lengths)

    def column(low, high):
        return doubles([random.uniform(low, high) for _ in range(size)])

    current_T = column(-3, 0)
    inputs = LossInputs(
        advantages_T=column(-2, 2),
        anchor_T=current_T + column(-0.5, 0.5),
        corrections_T=column(0, 2) * (column(0, 1) > 0.3),
        weights_T=aggregation_weights(torch.tensor(lengths), "sequence_mean", max_tokens=LIMIT),
        reference_T=current_T + column(-1, 1),
    )
    return current_T, column(0, 2), inputs


@few
@given(st.integers(0, 1000), LENGTHS, st.sampled_from(("k2", "k3")))
def test_the_loss_and_its_gradient_join_all_terms(seed, lengths, estimator):
    algorithm = replace(JOINT, kl_estimator=estimator)
    current_T, entropy_T, inputs = random_step(seed, lengths=lengths)
    current_T.requires_grad_()
    ours = loss(current_T, inputs, algorithm=algorithm, entropy_T=entropy_T)
    total, steep = 0.0, []
    rows = zip(
        current_T.tolist(),
        inputs.anchor_T.tolist(),
        inputs.advantages_T.tolist(),
        inputs.reference_T.tolist(),
        inputs.weights_T.tolist(),
        inputs.corrections_T.tolist(),
        entropy_T.tolist(),
        strict=True,
    )
    for current, anchor, advantage, reference, weight, correction, entropy in rows:
        policy = plain.policy_loss(current, anchor, advantage, **bounds(algorithm))
        policy_slope = plain.policy_slope(current, anchor, advantage, **bounds(algorithm))
        kl = plain.kl_estimate(current, reference, estimator)
        kl_slope = plain.kl_slope(current, reference, estimator)
        total += weight * (correction * policy + 0.3 * kl - 0.02 * entropy)
        steep.append(weight * (correction * policy_slope + 0.3 * kl_slope))
    assert ours.total.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(slopes(ours.total, current_T), doubles(steep), rtol=1e-9, atol=1e-12)
    parts = ours.policy.item() + 0.3 * ours.kl.item() - 0.02 * ours.entropy.item()
    assert parts == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert not ours.policy.requires_grad
    assert not ours.tokens.loss_T.requires_grad


@few
@given(st.integers(0, 1000), LENGTHS)
def test_the_loss_agrees_with_finite_differences(seed, lengths):
    current_T, entropy_T, inputs = random_step(seed, lengths=lengths)

    def total(current_T):
        return loss(current_T, inputs, algorithm=JOINT, entropy_T=entropy_T).total

    ratios_T = (current_T - inputs.anchor_T).exp()
    corners_T = doubles([0.8, 1.2, 3.0])
    if (ratios_T[:, None] - corners_T).abs().min() < 1e-3:
        return
    assert torch.autograd.gradcheck(total, current_T.requires_grad_(), eps=1e-5)


def part_of(inputs, places):
    """The tokens at some places, in their order."""
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return LossInputs(**{name: None if t is None else t[places] for name, t in tensors.items()})


@few
@given(st.integers(0, 1000), LENGTHS, st.randoms(use_true_random=False))
def test_parts_add_up_to_the_whole_in_any_packing(seed, lengths, random):
    current_T, entropy_T, inputs = random_step(seed, lengths=lengths)
    whole = loss(current_T, inputs, algorithm=JOINT, entropy_T=entropy_T)
    places = list(range(sum(lengths)))
    random.shuffle(places)
    cut = random.randint(0, len(places))
    parts = []
    for chosen in (torch.tensor(places[:cut], dtype=torch.long), torch.tensor(places[cut:]).long()):
        parts.append(
            loss(
                current_T[chosen],
                part_of(inputs, chosen),
                algorithm=JOINT,
                entropy_T=entropy_T[chosen],
            )
        )
    for name in ("total", "policy", "kl", "entropy"):
        of_parts = sum(float(getattr(part, name)) for part in parts)
        assert of_parts == pytest.approx(float(getattr(whole, name)), rel=1e-9, abs=1e-12)
    tokens = TokenLosses.joined([part.tokens for part in parts])
    assert torch.equal(tokens.loss_T, whole.tokens.loss_T[torch.tensor(places)])
    assert torch.equal(tokens.is_clipped_low_T.sum(), whole.tokens.is_clipped_low_T.sum())


def test_masked_tokens_contribute_nothing_and_stay_in_the_denominator():
    current_T = torch.full((4,), -1.0, requires_grad=True)
    inputs = LossInputs(
        advantages_T=torch.ones(4),
        anchor_T=torch.full((4,), -1.0),
        corrections_T=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        weights_T=aggregation_weights(torch.tensor([2, 2]), "token_mean", max_tokens=LIMIT),
    )
    ours = loss(current_T, inputs, algorithm=Algorithm())
    assert ours.total.item() == pytest.approx(-0.5)
    assert slopes(ours.total, current_T).tolist() == pytest.approx([-0.25, 0.0, 0.0, -0.25])
    assert ours.kl is None
    assert ours.entropy is None


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@few
@given(st.integers(0, 1000), LENGTHS)
def test_a_weighted_divergence_is_that_of_the_plain_formula(estimator, seed, lengths):
    algorithm = Algorithm(name="grpo", kl_coef=0.3, kl_estimator=estimator)
    current_T, _, inputs = random_step(seed, lengths=lengths)
    current_T.requires_grad_()
    inputs = replace(inputs, advantages_T=torch.zeros_like(inputs.advantages_T))
    ours = loss(current_T, inputs, algorithm=algorithm, weight_kl=True)
    total, steep = 0.0, []
    rows = zip(
        current_T.tolist(),
        inputs.anchor_T.tolist(),
        inputs.reference_T.tolist(),
        inputs.weights_T.tolist(),
        inputs.corrections_T.tolist(),
        strict=True,
    )
    for current, anchor, reference, weight, correction in rows:
        value = plain.kl_estimate(current, reference, estimator)
        weight *= correction * math.exp(current - anchor)
        total += weight * value
        # By the product rule for k3 it is k1; k2 gives it without the slope of the ratio.
        steep.append(0.3 * weight * (current - reference))
    assert ours.kl.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(slopes(ours.total, current_T), doubles(steep), rtol=1e-9, atol=1e-12)


def test_a_weighted_divergence_has_the_gradient_of_the_divergence_whoever_sampled():
    """Over everything that an older policy samples, with its probabilities."""
    logits_V = doubles([0.2, 0.1, 1.3, -0.4]).requires_grad_()
    older_V = doubles([0.9, 0.3, -0.2, 0.1]).log_softmax(-1)
    reference_V = doubles([0.5, -0.1, 0.6, 0.0]).log_softmax(-1)
    policy_V = logits_V.log_softmax(-1)
    exact = torch.autograd.grad(
        (policy_V.exp() * (policy_V - reference_V)).sum(), logits_V, retain_graph=True
    )[0]
    for estimator in ("k2", "k3"):
        inputs = LossInputs(
            advantages_T=torch.zeros(4, dtype=torch.float64),
            anchor_T=policy_V.detach(),
            corrections_T=(policy_V.detach() - older_V).exp(),
            weights_T=older_V.exp(),
            reference_T=reference_V,
        )
        own = Algorithm(name="grpo", kl_coef=1.0, kl_estimator=estimator)
        total = loss(policy_V, inputs, algorithm=own, weight_kl=True).total
        found = torch.autograd.grad(total, logits_V, retain_graph=True)[0]
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
        plain_total = loss(policy_V, inputs, algorithm=own).total
        unweighted = torch.autograd.grad(plain_total, logits_V, retain_graph=True)[0]
        assert (unweighted - exact).abs().max() > 0.01


def test_a_divergence_in_the_reward_is_not_in_the_loss_too():
    current_T, entropy_T, inputs = random_step(3, lengths=[4, 2])
    ours = loss(current_T, inputs, algorithm=Algorithm(kl_coef=0.5), entropy_T=entropy_T)
    assert ours.kl is None
    assert ours.total.item() == ours.policy.item()
    assert math.isclose(ours.entropy.item(), float((inputs.weights_T * entropy_T).sum()))
