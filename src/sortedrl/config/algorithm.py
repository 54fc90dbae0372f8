"""The settings of an update: algorithm, off-policy correction and optimiser.

The algorithm is a name and the few numbers it leaves open. A field left at `None` takes the default
of that name; the properties `effective_*` give the value that is used.

The correction is for tokens sampled by older weights. A token has three log-probabilities: under
the weights that sampled it (behaviour), under the weights at the start of the update (proximal),
and under the weights being trained (current). Formulas: docs/algorithms.md.
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
class _Defaults:
    """The defaults of an algorithm, and what it needs."""

    aggregation: Aggregation
    kl_place: KlPlace
    kl_in_loss: KlEstimator
    """The estimator where the KL divergence is in the loss; in the reward it is always k1."""
    needs_siblings: bool


_DEFAULTS = MappingProxyType(
    {
        "reinforce_pp": _Defaults("token_mean", "reward", "k3", False),
        "reinforce_pp_baseline": _Defaults("token_mean", "loss", "k2", True),
        "grpo": _Defaults("sequence_mean", "loss", "k3", True),
        "dr_grpo": _Defaults("constant", "loss", "k3", True),
        "rloo": _Defaults("constant", "reward", "k3", True),
        "dapo": _Defaults("token_mean", "loss", "k3", True),
        "ppo": _Defaults("token_mean", "reward", "k3", False),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How rewards become advantages, and advantages a loss."""

    name: AlgorithmName = "reinforce_pp"
    """reinforce_pp: rewards normalised over the batch (REINFORCE++).
    reinforce_pp_baseline: minus the mean reward of the prompt, then normalised over the batch.
    grpo: minus the mean reward of the prompt, divided by their standard deviation.
    dr_grpo: minus the mean only; token losses are summed and divided by a constant.
    rloo: minus the mean reward of the prompt's other answers; losses as in dr_grpo.
    dapo: grpo with a higher upper clip, zero-variance prompts filtered, token mean.
    ppo: a critic and generalised advantage estimation."""
    clip: Annotated[float, within(0, 1, ends="()")] = 0.2
    """Clip range: how far a token's importance ratio may fall or rise before its gradient stops."""
    clip_high: PositiveFloat | None = None
    """Upper clip range, where it differs from the lower one; 0.28 for dapo."""
    dual_clip: float | None = None
    """Dual clip: the ratio at which the loss of a negative advantage stops growing, such as 3."""
    aggregation: Aggregation | None = None
    """How token losses are aggregated. token_mean: the mean over all tokens. sequence_mean: the
    mean over each answer, then over answers. constant: the sum, divided by the number of answers
    times engine.max_tokens. By default that of the algorithm."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the initial model; 0 keeps no reference model."""
    kl_estimator: KlEstimator | None = None
    """KL estimator. In the reward it is k1, the log ratio. In the loss it is k2, half its square,
    or k3, ratio - 1 - log ratio. By default that of the algorithm."""
    kl_place: KlPlace | None = None
    """Whether the KL divergence is in the reward of every token or in the loss. By default that
    of the algorithm."""
    whiten: Whitening = "batch"
    """reinforce_pp: what rewards are normalised over. batch: the answers of the update. group: the
    last updates, as many as a group has; update batches are sorted by length, so one batch alone
    does not show whether long answers do better than short ones."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; positive keeps the policy exploring."""
    discount: Fraction = 1.0
    """ppo: discount factor (gamma) per token."""
    gae_lambda: Fraction = 1.0
    """ppo: lambda of GAE; 1 uses rewards only, 0 the critic only."""
    value_clip: Annotated[float, above(0, "leave it out for none")] | None = 0.2
    """ppo: clip range of the critic: how far a value may move before its gradient stops."""
    filter_zero_variance: bool | None = None
    """Filter out prompts whose answers all have the same reward, and hold the others back until
    an update batch is full (dynamic sampling); on for dapo."""
    overlong_tokens: PositiveInt | None = None
    """Overlong shaping (DAPO): answers this close to engine.max_tokens lose reward, linearly, up
    to overlong_penalty at the limit."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Reward that an answer at the limit loses."""

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
            f"algorithm.kl_estimator must be 'k1' where the KL divergence is in the reward, got "
            f"{self.kl_estimator!r}, which penalises a token that became less likely as much as "
            "one that became more likely; leave it out, or set kl_place to 'loss'",
        )
        require(
            self.effective_kl_place == "reward" or self.effective_kl_estimator != "k1",
            "algorithm.kl_estimator must be 'k2' or 'k3' where the KL divergence is in the loss, "
            "got 'k1', whose gradient is 0 on average; leave it out, or set kl_place to 'reward'",
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
        """Whether advantages compare an answer with the other answers to its prompt."""
        return _DEFAULTS[self.name].needs_siblings

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic: a second model that estimates values."""
        return self.name == "ppo"

    @property
    def effective_clip_high(self) -> float:
        """Upper clip range."""
        if self.clip_high is not None:
            return self.clip_high
        return 0.28 if self.name == "dapo" else self.clip

    @property
    def effective_aggregation(self) -> Aggregation:
        """How token losses are aggregated."""
        return self.aggregation or _DEFAULTS[self.name].aggregation

    @property
    def effective_kl_estimator(self) -> KlEstimator:
        """KL estimator."""
        if self.kl_estimator is not None:
            return self.kl_estimator
        return "k1" if self.effective_kl_place == "reward" else _DEFAULTS[self.name].kl_in_loss

    @property
    def effective_kl_place(self) -> KlPlace:
        """Whether the KL divergence is in the reward or in the loss."""
        return self.kl_place or _DEFAULTS[self.name].kl_place

    @property
    def filters_zero_variance(self) -> bool:
        """Whether zero-variance prompts are filtered out."""
        return (
            self.name == "dapo" if self.filter_zero_variance is None else self.filter_zero_variance
        )


CorrectionName = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"]
Ratio = Literal["proximal", "behaviour"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Importance-sampling correction of tokens that other weights have sampled."""

    kind: CorrectionName | None = None
    """none: no correction.
    token_tis: truncated importance sampling: the ratio of proximal to behaviour probability, at
    most max_ratio.
    sequence_tis: the same with the ratio of the whole answer.
    token_mis, sequence_mis: masked importance sampling: the same ratio, and 0 outside of
    min_ratio..max_ratio.
    By default token_tis where stale tokens are trained on (partial mode, posthoc) or the engine is
    not the native one, else none."""
    max_ratio: PositiveFloat = 2.0
    """Truncation: the largest weight. Masking: the largest ratio that is kept."""
    min_ratio: NonNegativeFloat = 0.0
    """Masking only: the smallest ratio that is kept."""
    ratio: Ratio = "proximal"
    """The denominator of the clipped ratio in the loss. proximal: the weights at the start of the
    update (decoupled PPO). behaviour: the weights that sampled the token, which makes the clip
    itself the correction; it needs kind none."""

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
            f"correction.ratio 'behaviour' needs kind 'none', got kind {self.kind!r}; "
            "set ratio to 'proximal' or kind to 'none'",
        )

    def effective_kind(self, *, is_needed: bool) -> CorrectionName:
        """The correction that is used."""
        if self.kind is not None:
            return self.kind
        return "token_tis" if is_needed and self.ratio == "proximal" else "none"


RateSchedule = Literal["constant", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """AdamW, its learning-rate schedule, and the optimiser steps of an update batch."""

    learning_rate: NonNegativeFloat = 1e-6
    """The learning rate after the warm-up; 0 leaves the weights as they are."""
    schedule: RateSchedule = "constant"
    """The learning rate after the warm-up.
    constant: unchanged.
    cosine: falls along half a cosine until the last step of the run."""
    warmup_steps: NonNegativeInt = 0
    """Warm-up steps, in which the learning rate rises linearly."""
    min_lr_ratio: Fraction = 0.1
    """Schedule cosine only: the learning rate of the last step, as a fraction of the full one."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, on matrices only, not on biases and norms."""
    beta1: Annotated[float, within(0, 1, ends="[)")] = 0.9
    """AdamW's beta1: decay of the running mean of gradients."""
    beta2: Annotated[float, within(0, 1, ends="[)")] = 0.999
    """AdamW's beta2: decay of the running mean of squared gradients. Update batches come sorted by
    length, so it should average over more steps than a group has updates."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the denominator."""
    max_grad_norm: Annotated[float, above(0, "None never clips")] | None = 1.0
    """Gradients are clipped to this global norm; None never clips."""
    mini_batches: PositiveInt = 1
    """Mini-batches that an update batch is split into, with one optimiser step each."""
    epochs: PositiveInt = 1
    """Passes over an update batch."""
    max_bad_updates: PositiveInt = 5
    """Stop after this many updates in a row whose loss or gradient is not finite."""

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
