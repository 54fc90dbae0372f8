"""The loss of an update: importance ratios, corrections, token losses, and their aggregation.

A ratio is the exponential of a difference of log-probabilities. Corrections for tokens of older
weights have no gradient. The weight of a token depends only on the lengths of the mini-batch's
answers, so the loss of an optimiser step is the sum over its micro-batches, however answers are
packed. Formulas: docs/explanation/algorithms.md.

Axes: N answers, T answer tokens, of a mini-batch or of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sortedrl.config.algorithm import (
    Aggregation,
    Algorithm,
    Correction,
    CorrectionMask,
    CorrectionName,
    KlEstimator,
    is_function,
)
from sortedrl.training.functions import token_losses

LARGEST_LOG_RATIO = 20.0
"""Log ratios are clamped to this: beyond, a ratio is practically 0 or infinite, and an advantage of
0 times an infinite ratio would be NaN."""


def bounded_ratios(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """The ratio of two probabilities, given their logarithms; finite and above 0."""
    return (numerator_T - denominator_T).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def correction_weights(
    behaviour_T: Tensor,
    proximal_T: Tensor,
    *,
    lengths_N: Tensor,
    correction: Correction,
) -> Tensor:
    """The importance weight of each token, in the type of `proximal_T`; 0 where it is masked.

    Tokens that masking keeps are weighted by their ratio (as in IcePop), so masking, like
    truncation, is importance sampling without the extreme weights.
    """
    weights_T = torch.ones_like(proximal_T)
    if correction.kind != "none":
        ratios_T = _ratios(
            behaviour_T, proximal_T, lengths_N=lengths_N, level=_level(correction.kind)
        )
        if correction.kind in _TRUNCATING:
            ratios_T = ratios_T.clamp(correction.min_ratio, correction.max_ratio)
        else:
            is_kept_T = (ratios_T >= correction.min_ratio) & (ratios_T <= correction.max_ratio)
            ratios_T = ratios_T.where(is_kept_T, 0.0)
        weights_T = ratios_T.to(proximal_T.dtype)
    if correction.mask != "none":
        is_masked_T = is_masked(behaviour_T, proximal_T, lengths_N=lengths_N, correction=correction)
        weights_T = weights_T.masked_fill(is_masked_T, 0.0)
    return weights_T


def is_masked(
    behaviour_T: Tensor, proximal_T: Tensor, *, lengths_N: Tensor, correction: Correction
) -> Tensor:
    """For each token, whether `correction.mask` leaves it without a loss."""
    if correction.mask == "none":
        return torch.zeros_like(proximal_T, dtype=torch.bool)
    ratios_T = _ratios(behaviour_T, proximal_T, lengths_N=lengths_N, level=correction.mask)
    return (ratios_T < correction.mask_min_ratio) | (ratios_T > correction.mask_max_ratio)


def is_held_back(
    behaviour_T: Tensor,
    proximal_T: Tensor,
    *,
    lengths_N: Tensor,
    correction: Correction,
) -> Tensor:
    """For each token, whether its weight is truncated or masked."""
    is_held_T = is_masked(behaviour_T, proximal_T, lengths_N=lengths_N, correction=correction)
    if correction.kind == "none":
        return is_held_T
    ratios_T = _ratios(behaviour_T, proximal_T, lengths_N=lengths_N, level=_level(correction.kind))
    return is_held_T | (ratios_T > correction.max_ratio) | (ratios_T < correction.min_ratio)


def step_scale(
    behaviour_T: Tensor, proximal_T: Tensor, *, lengths_N: Tensor, correction: Correction
) -> float:
    """The factor of the learning rate of a step: 1 if all weights are equal.

    It is the square root of the effective share, as the steps of AdamW do not shrink with the
    gradient. Weights are truncated at `max_ratio`: one absurd ratio must not stop learning.
    """
    if correction.scale_by_ess == "none":
        return 1.0
    ratios = _ratios(behaviour_T, proximal_T, lengths_N=lengths_N, level=correction.scale_by_ess)
    if correction.scale_by_ess == "sequence":
        ratios = ratios[lengths_N.to(ratios.device).cumsum(0) - 1]
    smallest = math.exp(-LARGEST_LOG_RATIO)
    return math.sqrt(effective_share(ratios.clamp(smallest, correction.max_ratio)))


def effective_share(weights_T: Tensor) -> float:
    """Effective sample size over sample size: 1 where all weights are alike, 1/T where one rules.

    >>> from torch import tensor
    >>> effective_share(tensor([2.0, 2.0])), effective_share(tensor([1.0, 0.0]))
    (1.0, 0.5)
    """
    return float(weights_T.sum() ** 2 / (len(weights_T) * (weights_T**2).sum()))


_TRUNCATING = ("token_tis", "sequence_tis")


def _level(kind: CorrectionName | None) -> CorrectionMask:
    """What a kind takes the ratio of."""
    assert kind is not None, "the kind of a correction is resolved before the update"
    return "sequence" if kind in ("sequence_tis", "sequence_mis") else "token"


def _ratios(
    behaviour_T: Tensor, proximal_T: Tensor, *, lengths_N: Tensor, level: CorrectionMask
) -> Tensor:
    """The ratio of each token, of its whole answer, or the geometric mean there, in float64.

    The ratio of a long answer may be infinite or 0; truncation and masking handle both.
    """
    logs_T = proximal_T.detach().double() - behaviour_T.detach().double()
    if level != "token":
        lengths_N = lengths_N.to(logs_T.device)
        owners_T = torch.repeat_interleave(lengths_N)
        logs_N = torch.zeros(len(lengths_N), dtype=torch.float64, device=logs_T.device)
        logs_N = logs_N.index_add(0, owners_T, logs_T)
        logs_T = (logs_N / lengths_N if level == "geometric" else logs_N)[owners_T]
    return logs_T.exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """The policy loss of each token, and where it is clipped."""

    loss_T: Tensor
    is_clipped_low_T: Tensor
    """Negative advantage, and a ratio below the clip range."""
    is_clipped_high_T: Tensor
    """Positive advantage, and a ratio above the clip range."""
    is_dual_clipped_T: Tensor
    """Negative advantage, and a ratio above the dual clip."""

    @classmethod
    def unclipped(cls, loss_T: Tensor) -> TokenLosses:
        """Losses of which clipping stops none."""
        nowhere_T = torch.zeros_like(loss_T, dtype=torch.bool)
        return cls(
            loss_T=loss_T,
            is_clipped_low_T=nowhere_T,
            is_clipped_high_T=nowhere_T,
            is_dual_clipped_T=nowhere_T,
        )

    @classmethod
    def joined(cls, parts: Sequence[TokenLosses]) -> TokenLosses:
        """Those of several micro-batches, concatenated."""
        return cls(
            loss_T=torch.cat([part.loss_T for part in parts]),
            is_clipped_low_T=torch.cat([part.is_clipped_low_T for part in parts]),
            is_clipped_high_T=torch.cat([part.is_clipped_high_T for part in parts]),
            is_dual_clipped_T=torch.cat([part.is_dual_clipped_T for part in parts]),
        )

    def detached(self) -> TokenLosses:
        """The same without the autograd graph."""
        return replace(self, loss_T=self.loss_T.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of the loss besides the current log-probabilities; none has a gradient."""

    advantages_T: Tensor
    anchor_T: Tensor
    """The log-probabilities that the clipped ratio is taken against: those of the proximal policy,
    or of the behaviour policy, depending on `correction.ratio`."""
    corrections_T: Tensor
    """From `correction_weights`."""
    weights_T: Tensor
    """From `aggregation_weights`."""
    reference_T: Tensor | None = None
    """Log-probabilities under the reference, where the KL divergence is in the loss."""
    lengths_N: Tensor | None = None
    """Tokens of each answer, where ratios are those of whole answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a micro-batch; `total` sums to the loss of the optimiser step."""

    total: Tensor
    """The one with a gradient."""
    policy: Tensor
    kl: Tensor | None
    """Before its coefficient; `None` where it is not in the loss."""
    entropy: Tensor | None
    """Before its coefficient; `None` where it is not computed."""
    tokens: TokenLosses


def loss(
    current_T: Tensor,
    inputs: LossInputs,
    *,
    algorithm: Algorithm,
    entropy_T: Tensor | None = None,
    weight_kl: bool = False,
) -> Loss:
    """The loss of tokens whose log-probabilities under the weights being trained are given.

    `weight_kl`: the KL divergence is weighted by importance, too.
    """
    tokens = policy_losses(
        current_T,
        inputs.anchor_T,
        inputs.advantages_T,
        algorithm=algorithm,
        lengths_N=inputs.lengths_N,
    )
    policy = (inputs.weights_T * inputs.corrections_T * tokens.loss_T).sum()
    total, kl, entropy = policy, None, None
    if algorithm.kl_coef > 0 and algorithm.effective_kl_place == "loss":
        assert inputs.reference_T is not None, "a KL divergence in the loss needs the reference"
        kl_T = kl_estimates(current_T, inputs.reference_T, algorithm.effective_kl_estimator)
        if weight_kl:
            kl_T = kl_T * _kl_weights(current_T, inputs, algorithm.effective_kl_estimator)
        kl = (inputs.weights_T * kl_T).sum()
        total = total + algorithm.kl_coef * kl
    if entropy_T is not None:
        entropy = (inputs.weights_T * entropy_T).sum()
    if algorithm.entropy_coef != 0:
        assert entropy is not None, "an entropy bonus needs the entropy"
        total = total - algorithm.entropy_coef * entropy
    return Loss(
        total=total,
        policy=policy.detach(),
        kl=None if kl is None else kl.detach(),
        entropy=None if entropy is None else entropy.detach(),
        tokens=tokens.detached(),
    )


def _kl_weights(current_T: Tensor, inputs: LossInputs, estimator: KlEstimator) -> Tensor:
    """The importance of each token under the weights being trained.

    Only k3 needs the gradient of the ratio: with it, and k2 without it, the gradient is that of the
    divergence.
    """
    ratios_T = bounded_ratios(current_T, inputs.anchor_T)
    return inputs.corrections_T * (ratios_T if estimator == "k3" else ratios_T.detach())


def policy_losses(
    current_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    *,
    algorithm: Algorithm,
    lengths_N: Tensor | None = None,
) -> TokenLosses:
    """The policy loss of each token; `lengths_N` where ratios are those of whole answers.

    The gradient of a token stops where its ratio has moved past the clip range in the direction of
    its advantage, and for a negative advantage also past the dual clip.
    """
    kind = algorithm.effective_loss
    if is_function(kind):
        assert lengths_N is not None, "a loss of the user is given the lengths of answers"
        return _of_user(kind, current_T, anchor_T, advantages_T, lengths_N=lengths_N)
    if kind == "clip":
        return _clipped(bounded_ratios(current_T, anchor_T), advantages_T, algorithm=algorithm)
    if kind == "cispo":
        return _weighted(current_T, anchor_T, advantages_T, algorithm=algorithm)
    if kind == "sapo":
        return _gated(bounded_ratios(current_T, anchor_T), advantages_T)
    assert lengths_N is not None, f"the loss {kind!r} needs the lengths of answers"
    if kind == "gmpo":
        return _clipped_mean(
            current_T - anchor_T, advantages_T, algorithm=algorithm, lengths_N=lengths_N
        )
    ratios_T = answer_ratios(current_T, anchor_T, lengths_N=lengths_N)
    if kind == "gspo_token":
        # The value is that of the answer; the gradient is that of the token alone.
        ratios_T = ratios_T.detach() * (current_T - current_T.detach()).exp()
    return _clipped(ratios_T, advantages_T, algorithm=algorithm)


def answer_ratios(numerator_T: Tensor, denominator_T: Tensor, *, lengths_N: Tensor) -> Tensor:
    """For each token the geometric mean of the ratios of its answer; finite and above 0."""
    logs_T = _answer_means(numerator_T - denominator_T, lengths_N=lengths_N)
    return logs_T.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _answer_means(values_T: Tensor, *, lengths_N: Tensor) -> Tensor:
    """For each token the mean over its answer, summed in float64."""
    lengths_N = lengths_N.to(values_T.device)
    owners_T = torch.repeat_interleave(lengths_N)
    sums_N = torch.zeros(len(lengths_N), dtype=torch.float64, device=values_T.device)
    means_N = sums_N.index_add(0, owners_T, values_T.double()) / lengths_N
    return means_N[owners_T].to(values_T.dtype)


def _clipped(ratios_T: Tensor, advantages_T: Tensor, *, algorithm: Algorithm) -> TokenLosses:
    lowest, highest = 1 - algorithm.effective_clip, 1 + algorithm.effective_clip_high
    is_low_T = (advantages_T < 0) & (ratios_T < lowest)
    is_high_T = (advantages_T > 0) & (ratios_T > highest)
    loss_T = -advantages_T * ratios_T
    loss_T = torch.where(is_low_T, -advantages_T * lowest, loss_T)
    loss_T = torch.where(is_high_T, -advantages_T * highest, loss_T)
    is_dual_T = torch.zeros_like(is_low_T)
    if algorithm.dual_clip is not None:
        is_dual_T = (advantages_T < 0) & (ratios_T > algorithm.dual_clip)
        loss_T = torch.where(is_dual_T, -advantages_T * algorithm.dual_clip, loss_T)
    return TokenLosses(
        loss_T=loss_T,
        is_clipped_low_T=is_low_T,
        is_clipped_high_T=is_high_T,
        is_dual_clipped_T=is_dual_T,
    )


def _weighted(
    current_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, *, algorithm: Algorithm
) -> TokenLosses:
    """CISPO: clipping bounds a token's weight and stops no gradient."""
    lowest, highest = 1 - algorithm.effective_clip, 1 + algorithm.effective_clip_high
    weights_T = bounded_ratios(current_T.detach(), anchor_T)
    losses = TokenLosses.unclipped(-advantages_T * weights_T.clamp(lowest, highest) * current_T)
    is_low_T, is_high_T = weights_T < lowest, weights_T > highest
    return replace(losses, is_clipped_low_T=is_low_T, is_clipped_high_T=is_high_T)


SAPO_TEMPERATURES = (1.0, 1.05)
"""Of the gate for advantages above 0, and for the others."""


def _gated(ratios_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """SAPO: the gradient fades as the ratio leaves 1, faster for negative advantages."""
    positive, negative = SAPO_TEMPERATURES
    temperatures_T = torch.full_like(ratios_T, negative).masked_fill(advantages_T > 0, positive)
    gates_T = (temperatures_T * (ratios_T - 1)).sigmoid() * 4 / temperatures_T
    return TokenLosses.unclipped(-advantages_T * gates_T)


def _clipped_mean(
    logs_T: Tensor, advantages_T: Tensor, *, algorithm: Algorithm, lengths_N: Tensor
) -> TokenLosses:
    """GMPO: each token's ratio is clipped before the geometric mean over its answer."""
    lowest = math.log(1 - algorithm.effective_clip)
    highest = math.log(1 + algorithm.effective_clip_high)
    is_low_T = (advantages_T < 0) & (logs_T < lowest)
    is_high_T = (advantages_T > 0) & (logs_T > highest)
    clipped_T = logs_T.masked_fill(is_low_T, lowest).masked_fill(is_high_T, highest)
    means_T = _answer_means(clipped_T, lengths_N=lengths_N)
    ratios_T = means_T.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    losses = TokenLosses.unclipped(-advantages_T * ratios_T)
    return replace(losses, is_clipped_low_T=is_low_T, is_clipped_high_T=is_high_T)


def _of_user(
    address: str,
    current_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    *,
    lengths_N: Tensor,
) -> TokenLosses:
    lengths_N = lengths_N.to(current_T.device)
    given = {
        "current_T": current_T,
        "anchor_T": anchor_T,
        "advantages_T": advantages_T,
        "owners_T": torch.repeat_interleave(lengths_N),
        "lengths_N": lengths_N,
    }
    # An empty micro-batch of a rank that has no answers left is no case for the user.
    return TokenLosses.unclipped(token_losses(address, given) if len(current_T) else current_T)


def kl_estimates(policy_T: Tensor, reference_T: Tensor, estimator: KlEstimator) -> Tensor:
    """An estimate of KL(policy || reference) at each token that the policy sampled."""
    logs_T = policy_T - reference_T
    if estimator == "k1":
        return logs_T
    if estimator == "k2":
        return logs_T**2 / 2
    inverse_T = (-logs_T).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return inverse_T.expm1() - inverse_T


def value_losses(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None
) -> Tensor:
    """The critic's loss of each token: half the squared error, of the clipped value if larger."""
    losses_T = (values_T - returns_T) ** 2 / 2
    if clip is None:
        return losses_T
    clipped_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    return torch.maximum(losses_T, (clipped_T - returns_T) ** 2 / 2)


def aggregation_weights(lengths_N: Tensor, aggregation: Aggregation, *, max_tokens: int) -> Tensor:
    """The weight of each token in the loss of an optimiser step on answers of these lengths.

    A token that a correction masks contributes nothing but counts in the denominator: otherwise
    the remaining tokens would weigh more the more tokens are masked.
    """
    lengths_N = lengths_N.double()
    if aggregation == "token_mean":
        weights_N = (1 / lengths_N.sum()).expand(len(lengths_N))
    elif aggregation == "sequence_mean":
        weights_N = 1 / (len(lengths_N) * lengths_N)
    else:
        weights_N = torch.full_like(lengths_N, 1 / (len(lengths_N) * max_tokens))
    return weights_N.repeat_interleave(lengths_N.long()).float()
