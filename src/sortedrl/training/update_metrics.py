"""The metrics of one update, and the per-token outputs that they are computed from.

They are computed once, after the update; nothing has a gradient. Each rank records the outputs of
its own micro-batches, and after every step all ranks have all of them. A metric that does not
exist, such as the gap without fresh tokens, has no entry.

Axes: T answer tokens of the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sortedrl.config.algorithm import Correction
from sortedrl.training.batch import Answers, RankGroup
from sortedrl.training.losses import (
    TokenLosses,
    answer_ratios,
    bounded_ratios,
    effective_share,
    is_held_back,
    is_masked,
)


@dataclass(slots=True)
class TokenOutputs:
    """The outputs of an update's micro-batches, per token; the last step over a token counts."""

    current_T: Tensor
    proximal_T: Tensor
    entropy_T: Tensor
    losses: list[TokenLosses]
    """Of the micro-batches of this rank."""
    fills: list[float]
    step_scales: list[float]
    """What the learning rate of each step was multiplied by."""

    @classmethod
    def zeros(cls, num_tokens: int, *, device: torch.device) -> TokenOutputs:
        """Before the first micro-batch."""
        blank_T = torch.zeros(num_tokens, device=device)
        return cls(blank_T, blank_T.clone(), blank_T.clone(), [], [], [])

    def reset(self, at: Tensor) -> None:
        """Clear these tokens before a step over them."""
        for values_T in (self.current_T, self.proximal_T, self.entropy_T):
            values_T[at] = 0.0

    def gather(self, at: Tensor, ranks: RankGroup) -> None:
        """Collect the outputs of other ranks for these tokens; each is on one rank."""
        for values_T in (self.current_T, self.proximal_T, self.entropy_T):
            values_T[at] = ranks.all_reduce(values_T[at])

    def token_losses(self, ranks: RankGroup) -> TokenLosses:
        """Those of all micro-batches of all ranks."""
        own = TokenLosses.joined(self.losses)
        return TokenLosses(
            loss_T=ranks.all_gather(own.loss_T),
            is_clipped_low_T=ranks.all_gather(own.is_clipped_low_T),
            is_clipped_high_T=ranks.all_gather(own.is_clipped_high_T),
            is_dual_clipped_T=ranks.all_gather(own.is_dual_clipped_T),
        )


_PERCENTS = (1, 50, 99)
_STALE_FROM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """The outputs of an update: one entry per token, in the order of the answers."""

    answers: Answers
    advantages_T: Tensor
    proximal_T: Tensor
    """Log-probabilities under the weights at the start of the update."""
    current_T: Tensor
    """Log-probabilities under the weights being trained, when the token was last trained on."""
    correction: Correction
    tokens: TokenLosses
    """Of all micro-batches, in any order."""
    kl_T: Tensor | None = None
    """Estimated divergence from the reference, if there is one."""
    entropy_T: Tensor | None = None
    """The policy's entropy, if it was computed."""
    has_answer_ratios: bool = False
    """Whether the ratio that the loss clips is that of a whole answer."""


def update_metrics(record: UpdateRecord) -> dict[str, float]:
    """The metrics by name."""
    answers = record.answers
    behaviour_T, proximal_T = _numbers(answers.behaviour_T), _numbers(record.proximal_T)
    anchor_T = proximal_T if record.correction.ratio == "proximal" else behaviour_T
    ratios_T = bounded_ratios(proximal_T, behaviour_T)
    current_T = _numbers(record.current_T)
    if record.has_answer_ratios:
        moves_T = answer_ratios(current_T, anchor_T, lengths_N=answers.lengths_N)
    else:
        moves_T = bounded_ratios(current_T, anchor_T)
    is_held_back_T = is_held_back(
        behaviour_T,
        proximal_T,
        lengths_N=answers.lengths_N,
        correction=record.correction,
    )
    numbers = {
        "reward/mean": _mean(answers.rewards_N),
        "reward/std": _spread(answers.rewards_N),
        "length/mean": _mean(answers.lengths_N),
        "length/truncated": _mean(answers.is_truncated_N),
        "advantage/std": _spread(record.advantages_T),
        "correction/ess": effective_share(ratios_T),
        "correction/held_back": _mean(is_held_back_T),
        **_quantiles(ratios_T, name="correction/ratio"),
        **_quantiles(moves_T, name="policy/ratio"),
        "policy/clipped_low": _mean(record.tokens.is_clipped_low_T),
        "policy/clipped_high": _mean(record.tokens.is_clipped_high_T),
        "policy/clipped_dual": _mean(record.tokens.is_dual_clipped_T),
    }
    if record.correction.mask != "none":
        is_masked_T = is_masked(
            behaviour_T, proximal_T, lengths_N=answers.lengths_N, correction=record.correction
        )
        numbers["correction/masked"] = _mean(is_masked_T)
    if record.kl_T is not None:
        numbers["kl/mean"] = _mean(record.kl_T)
    if record.entropy_T is not None:
        numbers["entropy/mean"] = _mean(record.entropy_T)
    return numbers | _gap(answers, proximal_T) | _by_staleness(answers, ratios_T)


def _quantiles(ratios_T: Tensor, *, name: str) -> dict[str, float]:
    """For each percent, the least ratio that so many percent of the tokens do not exceed.

    By kthvalue, because torch.quantile refuses more than 16 million numbers.
    """
    numbers = {}
    for percent in _PERCENTS:
        rank = -(-percent * len(ratios_T) // 100)
        numbers[f"{name}_p{percent}"] = float(ratios_T.kthvalue(rank).values)
    return numbers | {f"{name}_max": float(ratios_T.max())}


def _gap(answers: Answers, proximal_T: Tensor) -> dict[str, float]:
    """The difference of engine and trainer on tokens that both computed with the same weights."""
    is_fresh_T = answers.staleness_T == 0
    if not is_fresh_T.any():
        return {}
    gaps_T = (proximal_T - _numbers(answers.behaviour_T))[is_fresh_T].abs()
    return {"gap/max": float(gaps_T.max()), "gap/mean": float(gaps_T.mean())}


def _by_staleness(answers: Answers, ratios_T: Tensor) -> dict[str, float]:
    """Share, mean ratio and effective share of the tokens of each age."""
    numbers = {}
    ages_T = answers.staleness_T.clamp(max=_STALE_FROM)
    for age in range(_STALE_FROM + 1):
        name = f"stale_{age}" if age < _STALE_FROM else f"stale_{age}_up"
        own_T = ratios_T[ages_T == age]
        numbers[f"{name}/share"] = len(own_T) / len(ratios_T)
        if len(own_T):
            numbers[f"{name}/ratio"] = _mean(own_T)
            numbers[f"{name}/ess"] = effective_share(own_T)
    return numbers


def _numbers(values: Tensor) -> Tensor:
    """In float64 on the host, where the answers are."""
    return values.detach().double().cpu()


def _mean(values: Tensor) -> float:
    return float(_numbers(values).mean())


def _spread(values: Tensor) -> float:
    """The standard deviation (n): 0 for a single value."""
    return float(_numbers(values).std(correction=0))
