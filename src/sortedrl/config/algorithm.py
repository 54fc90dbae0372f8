"""The settings of an update: algorithm, off-policy correction and optimiser.

The algorithm is one name and the few numbers it leaves open. A field left at `None` takes the value
that belongs to the name; the properties `used_*` give the value that holds in the end.

The correction deals with tokens of older weights. A token has three log-probabilities: under the
weights that sampled it (behaviour), under the weights at the start of the update (proximal), and
under the weights being trained (current). Formulas: docs/algorithms.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from sortedrl.config.checks import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    above,
    check_values,
    require,
    within,
)

AlgorithmName = Literal[
    "reinforce_pp", "reinforce_pp_baseline", "grpo", "dr_grpo", "rloo", "dapo", "ppo"
]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["reward", "loss"]
Whitening = Literal["batch", "group"]


@dataclass(frozen=True, slots=True)
class _Nature:
    """What belongs to the name of an algorithm."""

    aggregation: Aggregation
    kl_place: KlPlace
    kl_in_loss: KlEstimator
    """The estimator where the divergence enters the loss; in the reward it is always k1."""
    needs_siblings: bool


_NATURES = MappingProxyType(
    {
        "reinforce_pp": _Nature("token_mean", "reward", "k3", False),
        "reinforce_pp_baseline": _Nature("token_mean", "loss", "k2", True),
        "grpo": _Nature("sequence_mean", "loss", "k3", True),
        "dr_grpo": _Nature("constant", "loss", "k3", True),
        "rloo": _Nature("constant", "reward", "k3", True),
        "dapo": _Nature("token_mean", "loss", "k3", True),
        "ppo": _Nature("token_mean", "reward", "k3", False),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How rewards become advantages, and advantages a loss."""

    name: AlgorithmName = "reinforce_pp"
    """reinforce_pp: rewards normalised over the batch (REINFORCE++).
    reinforce_pp_baseline: less the mean of the prompt's answers, then normalised over the batch.
    grpo: less the mean of the prompt's answers, over their standard deviation.
    dr_grpo: less the mean only, summed over tokens and divided by a constant.
    rloo: less the mean of the prompt's other answers, summed as in dr_grpo.
    dapo: grpo with a higher upper clip, prompts without variance left out, token mean.
    ppo: a critic and generalised advantage estimation."""
    clip: Annotated[float, within(0, 1, ends="()")] = 0.2
    """How far the probability ratio of a token may fall or rise before its gradient stops."""
    clip_high: PositiveFloat | None = None
    """How far it may rise, if not as far as it may fall; dapo has 0.28."""
    dual_clip: float | None = None
    """For a negative advantage, the ratio at which the loss stops to grow, such as 3."""
    aggregation: Aggregation | None = None
    """How token losses are joined. token_mean: all tokens alike. sequence_mean: the mean of each
    answer, then the mean of the answers. constant: the sum over answers times engine.max_tokens.
    By default what belongs to the algorithm."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the model the run began with; 0 keeps no reference model."""
    kl_estimator: KlEstimator | None = None
    """How the divergence is estimated. In the reward it is k1, the log ratio. In the loss it is
    k2, half its square, or k3, ratio - 1 - log ratio. By default what belongs to its place."""
    kl_place: KlPlace | None = None
    """Where the divergence enters: into the reward of every token, or into the loss. By default
    what belongs to the algorithm."""
    whiten: Whitening = "batch"
    """reinforce_pp: whose rewards an answer is measured by. batch: those of its update. group:
    those of as many updates as a group has; update batches are sorted by length, so one batch
    alone does not show whether long answers do better than short ones."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy in the loss; positive keeps it curious."""
    discount: Fraction = 1.0
    """ppo: what a reward one token later is worth."""
    gae_lambda: Fraction = 1.0
    """ppo: 1 trusts rewards only, 0 trusts the critic only."""
    value_clip: Annotated[float, above(0, "leave it out for none")] | None = 0.2
    """ppo: how far the critic's estimate may move from the old one before its gradient stops."""
    filter_zero_variance: bool | None = None
    """Leave out prompts whose answers all have the same reward, and hold the others until an
    update batch is full (dynamic sampling); dapo does."""
    overlong_tokens: PositiveInt | None = None
    """Answers that come this close to engine.max_tokens lose reward, linearly, up to
    overlong_penalty at the limit (DAPO's overlong shaping)."""
    overlong_penalty: NonNegativeFloat = 1.0
    """What an answer at the limit loses."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_values(self, "algorithm.")
        self._check_loss()
        self._check_rewards()

    def _check_loss(self) -> None:
        require(
            self.dual_clip is None or self.dual_clip > 1 + self.effective_clip_high,
            f"algorithm.dual_clip must be above 1 + clip_high = {1 + self.effective_clip_high}, "
            f"got {self.dual_clip}",
        )
        require(
            self.effective_kl_place == "loss" or self.effective_kl_estimator == "k1",
            f"algorithm.kl_estimator must be 'k1' where the divergence enters the reward, got "
            f"{self.kl_estimator!r}: it punishes a token that became less likely as much as one "
            "that became more likely, so it hardly pulls back; leave it out, or set kl_place to "
            "'loss'",
        )
        require(
            self.effective_kl_place == "reward" or self.effective_kl_estimator != "k1",
            "algorithm.kl_estimator must be 'k2' or 'k3' where the divergence enters the loss, got "
            "'k1', whose gradient is 0 on average; leave it out, or set kl_place to 'reward'",
        )

    def _check_rewards(self) -> None:
        for field, given, default in (
            ("discount", self.discount, 1.0),
            ("gae_lambda", self.gae_lambda, 1.0),
            ("value_clip", self.value_clip, 0.2),
        ):
            require(
                given == default or self.has_critic,
                f"algorithm.{field} belongs to 'ppo', got {given} with {self.name!r}; leave it out",
            )
        require(
            self.whiten == "batch" or self.name == "reinforce_pp",
            f"algorithm.whiten {self.whiten!r} belongs to 'reinforce_pp', got it with "
            f"{self.name!r}; leave it out",
        )
        require(
            not self.filter_zero_variance or self.needs_siblings,
            f"algorithm.filter_zero_variance compares the answers to a prompt, got it with "
            f"{self.name!r}; take grpo, dr_grpo, rloo, dapo or reinforce_pp_baseline",
        )
        require(
            self.overlong_penalty == 1.0 or self.overlong_tokens is not None,
            f"algorithm.overlong_penalty needs overlong_tokens, got {self.overlong_penalty} "
            "without; set overlong_tokens or leave it out",
        )

    @property
    def needs_siblings(self) -> bool:
        """Whether an answer is compared with the other answers to its prompt."""
        return _NATURES[self.name].needs_siblings

    @property
    def has_critic(self) -> bool:
        """Whether values are estimated by a second model."""
        return self.name == "ppo"

    @property
    def effective_clip_high(self) -> float:
        """How far a ratio may rise."""
        if self.clip_high is not None:
            return self.clip_high
        return 0.28 if self.name == "dapo" else self.clip

    @property
    def effective_aggregation(self) -> Aggregation:
        """How token losses are joined."""
        return self.aggregation or _NATURES[self.name].aggregation

    @property
    def effective_kl_estimator(self) -> KlEstimator:
        """How the divergence is estimated."""
        if self.kl_estimator is not None:
            return self.kl_estimator
        return "k1" if self.effective_kl_place == "reward" else _NATURES[self.name].kl_in_loss

    @property
    def effective_kl_place(self) -> KlPlace:
        """Where the divergence enters."""
        return self.kl_place or _NATURES[self.name].kl_place

    @property
    def filters_zero_variance(self) -> bool:
        """Whether prompts without variance are left out."""
        return (
            self.name == "dapo" if self.filter_zero_variance is None else self.filter_zero_variance
        )


CorrectionName = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"]
Ratio = Literal["proximal", "behaviour"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How a token counts that other weights than the present ones have sampled."""

    kind: CorrectionName | None = None
    """none: like any other.
    token_tis: weighted by proximal over behaviour probability, at most `max_ratio`.
    sequence_tis: the same with the ratio of the whole answer.
    token_mis, sequence_mis: weighted by the same ratio, and left out where it lies outside of
    min_ratio..max_ratio.
    By default token_tis where stale tokens are trained on (partial mode, posthoc) or the engine is
    not the native one, else none."""
    max_ratio: PositiveFloat = 2.0
    """The largest weight, or the largest ratio that is not left out."""
    min_ratio: NonNegativeFloat = 0.0
    """Masking only: the smallest ratio that is not left out."""
    ratio: Ratio = "proximal"
    """What the clipped ratio of the loss is taken against. proximal: the weights at the start of
    the update (decoupled PPO). behaviour: the weights that sampled the token, which makes the
    clip itself the correction; it takes kind none."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_values(self, "correction.")
        require(
            self.min_ratio < self.max_ratio,
            "correction.min_ratio must be below correction.max_ratio, got "
            f"{self.min_ratio} and {self.max_ratio}",
        )
        require(
            self.min_ratio == 0 or self.kind in ("token_mis", "sequence_mis"),
            f"correction.min_ratio needs a kind that masks, got {self.min_ratio} with kind "
            f"{self.kind!r}; leave it out or set kind to 'token_mis' or 'sequence_mis'",
        )
        require(
            self.ratio == "proximal" or self.kind in (None, "none"),
            f"correction.ratio 'behaviour' corrects by itself, got kind {self.kind!r} with it; "
            "set ratio to 'proximal' or kind to 'none'",
        )

    def effective_kind(self, *, is_needed: bool) -> CorrectionName:
        """The correction that holds in the end."""
        if self.kind is not None:
            return self.kind
        return "token_tis" if is_needed and self.ratio == "proximal" else "none"


RateSchedule = Literal["constant", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """AdamW, the course of its learning rate, and how an update batch is gone through."""

    learning_rate: NonNegativeFloat = 1e-6
    """The learning rate after the warm-up; 0 leaves the weights as they are."""
    schedule: RateSchedule = "constant"
    """The learning rate after the warm-up.
    constant: stays.
    cosine: falls along half a cosine until the last step of the run."""
    warmup_steps: NonNegativeInt = 0
    """Steps during which the learning rate rises linearly before it is reached."""
    min_lr_ratio: Fraction = 0.1
    """Schedule cosine only: the share of the learning rate that the last step has."""
    weight_decay: NonNegativeFloat = 0.0
    """Pull towards zero, on matrices only: biases and norms are left alone."""
    beta1: Annotated[float, within(0, 1, ends="[)")] = 0.9
    """How much of the mean gradient is kept from step to step."""
    beta2: Annotated[float, within(0, 1, ends="[)")] = 0.999
    """How much of the mean squared gradient is kept from step to step. Update batches come
    sorted by length, so it should remember longer than a group has updates."""
    epsilon: PositiveFloat = 1e-8
    """Keeps steps small where gradients are tiny."""
    max_grad_norm: Annotated[float, above(0, "None never scales gradients")] | None = 1.0
    """Gradients whose norm over all weights is larger are scaled down to it."""
    mini_batches: PositiveInt = 1
    """Optimiser steps per update batch: it is cut into that many mini-batches."""
    epochs: PositiveInt = 1
    """How often an update batch is gone through."""
    max_bad_updates: PositiveInt = 5
    """Stop after so many updates in a row whose loss or gradient is not finite."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_values(self, "optimiser.")
        require(
            self.min_lr_ratio == 0.1 or self.schedule == "cosine",
            f"optimiser.min_lr_ratio belongs to the schedule 'cosine', got {self.min_lr_ratio} "
            f"with {self.schedule!r}; set schedule to 'cosine' or leave it out",
        )


def learning_rate_at(step: int, *, settings: Optimisation, total_steps: int | None) -> float:
    """The learning rate of a step, counted from 0; `total_steps` are those of the whole run.

    Step `warmup_steps` is the first at the full rate; the last step of a cosine has its share.

    >>> rises = Optimisation(learning_rate=1.0, warmup_steps=3)
    >>> [learning_rate_at(step, settings=rises, total_steps=None) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    require(
        total_steps is not None,
        "optimiser.schedule 'cosine' needs to know the number of steps of the run, got none; "
        "limit the run or set the schedule to 'constant'",
    )
    assert total_steps is not None
    way = max(1, total_steps - 1 - settings.warmup_steps)
    passed = min(1.0, (step - settings.warmup_steps) / way)
    height = (1 + math.cos(math.pi * passed)) / 2
    return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * height)
