"""The loss of an update: importance ratios, corrections, token losses, and their aggregation.

A ratio is the exponential of a difference of log-probabilities. Corrections for tokens of older
weights have no gradient. The weight of a token depends only on the lengths of the mini-batch's
answers, so the loss of an optimiser step is the sum over its micro-batches, however answers are
packed. Formulas: docs/algorithms.md.

Axes: N answers, T answer tokens, of a mini-batch or of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sortedrl.config.algorithm import (
    Aggregation,
    Algorithm,
    Correction,
    CorrectionName,
    KlEstimator,
)

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
    """The importance weight of each token, in the type of `proximal_T`.

    Tokens that masking keeps are weighted by their ratio (as in IcePop), so masking, like
    truncation, is importance sampling without the extreme weights.
    """
    if correction.kind == "none":
        return torch.ones_like(proximal_T)
    ratios_T = _ratios(behaviour_T, proximal_T, lengths_N=lengths_N, kind=correction.kind)
    if correction.kind in ("token_tis", "sequence_tis"):
        weights_T = ratios_T.clamp(max=correction.max_ratio)
    else:
        is_kept_T = (ratios_T >= correction.min_ratio) & (ratios_T <= correction.max_ratio)
        weights_T = ratios_T.where(is_kept_T, 0.0)
    return weights_T.to(proximal_T.dtype)


def is_held_back(
    behaviour_T: Tensor,
    proximal_T: Tensor,
    *,
    lengths_N: Tensor,
    correction: Correction,
) -> Tensor:
    """For each token, whether its weight is truncated or masked."""
    if correction.kind == "none":
        return torch.zeros_like(proximal_T, dtype=torch.bool)
    ratios_T = _ratios(behaviour_T, proximal_T, lengths_N=lengths_N, kind=correction.kind)
    is_high_T = ratios_T > correction.max_ratio
    if correction.kind in ("token_tis", "sequence_tis"):
        return is_high_T
    return is_high_T | (ratios_T < correction.min_ratio)


def _ratios(
    behaviour_T: Tensor, proximal_T: Tensor, *, lengths_N: Tensor, kind: CorrectionName | None
) -> Tensor:
    """The ratio of each token, or of its whole answer, in float64.

    The ratio of a long answer may be infinite or 0; truncation and masking handle both.
    """
    assert kind is not None, "the kind of a correction is resolved before the update"
    logs_T = proximal_T.detach().double() - behaviour_T.detach().double()
    if kind in ("sequence_tis", "sequence_mis"):
        owners_T = torch.repeat_interleave(lengths_N.to(logs_T.device))
        logs_N = torch.zeros(len(lengths_N), dtype=torch.float64, device=logs_T.device)
        logs_T = logs_N.index_add(0, owners_T, logs_T)[owners_T]
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
        return TokenLosses(
            loss_T=self.loss_T.detach(),
            is_clipped_low_T=self.is_clipped_low_T,
            is_clipped_high_T=self.is_clipped_high_T,
            is_dual_clipped_T=self.is_dual_clipped_T,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss needs beside the current log-probabilities; nothing has a gradient."""

    advantages_T: Tensor
    anchor_T: Tensor
    """The log-probabilities that the clipped ratio is taken against: those of the proximal policy,
    or of the behaviour policy where `correction.ratio` says so."""
    corrections_T: Tensor
    """From `correction_weights`."""
    weights_T: Tensor
    """From `aggregation_weights`."""
    reference_T: Tensor | None = None
    """Log-probabilities under the reference, where the KL divergence is in the loss."""


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
) -> Loss:
    """The loss of tokens whose log-probabilities under the weights being trained are given."""
    tokens = policy_losses(current_T, inputs.anchor_T, inputs.advantages_T, algorithm=algorithm)
    policy = (inputs.weights_T * inputs.corrections_T * tokens.loss_T).sum()
    total, kl, entropy = policy, None, None
    if algorithm.kl_coef > 0 and algorithm.effective_kl_place == "loss":
        assert inputs.reference_T is not None, "a KL divergence in the loss needs the reference"
        kl_T = kl_estimates(current_T, inputs.reference_T, algorithm.effective_kl_estimator)
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


def policy_losses(
    current_T: Tensor, proximal_T: Tensor, advantages_T: Tensor, *, algorithm: Algorithm
) -> TokenLosses:
    """The clipped policy loss of each token.

    The gradient of a token stops where its ratio has moved past the clip range in the direction of
    its advantage, and for a negative advantage also past the dual clip.
    """
    ratios_T = bounded_ratios(current_T, proximal_T)
    lowest, highest = 1 - algorithm.clip, 1 + algorithm.effective_clip_high
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
