"""Probability ratios, and the weights by which they correct for tokens of older weights.

A ratio is the exponential of a difference of log-probabilities. Corrections are numbers, never
part of a gradient.

Axes: N answers, T answer tokens of all of them together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sortedrl.training.correction import Correction, CorrectionName

LARGEST_LOG_RATIO = 20.0
"""Log ratios are held within this: beyond, a ratio is as good as 0 or infinite, and an advantage
of 0 times an infinite ratio would be no number."""


def bounded_ratios(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """The ratio of two probabilities, given their logarithms; always finite and above 0."""
    return (numerator_T - denominator_T).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def correction_weights(
    behaviour_T: Tensor,
    proximal_T: Tensor,
    *,
    lengths_N: Tensor,
    correction: Correction,
    kind: CorrectionName,
) -> Tensor:
    """How much each token counts, in the type of `proximal_T`.

    Tokens that are not left out count by their ratio (as in IcePop), so masking, like truncation,
    is importance sampling with the extreme weights taken out.
    """
    if kind == "none":
        return torch.ones_like(proximal_T)
    ratios_T = _ratios(behaviour_T, proximal_T, lengths_N=lengths_N, kind=kind)
    if kind in ("token_tis", "sequence_tis"):
        weights_T = ratios_T.clamp(max=correction.most)
    else:
        is_kept_T = (ratios_T >= correction.least) & (ratios_T <= correction.most)
        weights_T = ratios_T.where(is_kept_T, 0.0)
    return weights_T.to(proximal_T.dtype)


def is_held_back(
    behaviour_T: Tensor,
    proximal_T: Tensor,
    *,
    lengths_N: Tensor,
    correction: Correction,
    kind: CorrectionName,
) -> Tensor:
    """For each token, whether its weight is truncated, or the token left out."""
    if kind == "none":
        return torch.zeros_like(proximal_T, dtype=torch.bool)
    ratios_T = _ratios(behaviour_T, proximal_T, lengths_N=lengths_N, kind=kind)
    is_high_T = ratios_T > correction.most
    if kind in ("token_tis", "sequence_tis"):
        return is_high_T
    return is_high_T | (ratios_T < correction.least)


def _ratios(
    behaviour_T: Tensor, proximal_T: Tensor, *, lengths_N: Tensor, kind: CorrectionName
) -> Tensor:
    """The ratio of each token, or of its whole answer, in float64.

    The ratio of a long answer may be infinite or 0; neither truncation nor masking minds.
    """
    logs_T = proximal_T.detach().double() - behaviour_T.detach().double()
    if kind in ("sequence_tis", "sequence_mis"):
        owners_T = torch.repeat_interleave(lengths_N.to(logs_T.device))
        logs_N = torch.zeros(len(lengths_N), dtype=torch.float64, device=logs_T.device)
        logs_T = logs_N.index_add(0, owners_T, logs_T)[owners_T]
    return logs_T.exp()
