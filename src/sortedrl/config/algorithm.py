"""The settings of an update: algorithm, off-policy correction and optimiser.

The algorithm is a name and a few numbers. A field left at `None` takes the default of that name;
the properties `effective_*` give the resolved value.

The correction is for tokens sampled by older weights. A token has three log-probabilities: under
the weights that sampled it (behaviour), under the weights at the start of the update (proximal),
and under the weights being trained (current). Formulas: docs/explanation/algorithms.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, get_args

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
from sortedrl.errors import unknown_name

AlgorithmName = Literal[
    "reinforce_pp",
    "reinforce_pp_baseline",
    "grpo",
    "dr_grpo",
    "rloo",
    "dapo",
    "ppo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["reward", "loss"]
Whitening = Literal["batch", "group"]
TruncatedAnswers = Literal["train", "mask", "bootstrap"]
AdvantageName = Literal["returns", "group", "group_whitened", "leave_one_out", "gae"]
RewardScale = Literal["group", "batch", "none"]
LossName = Literal["clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """The defaults of an algorithm; a new algorithm needs a row of them and its formulas."""

    advantage: AdvantageName
    aggregation: Aggregation
    loss: LossName = "clip"
    clip_high: float | None = None
    """`None`: that of the loss."""
    kl_place: KlPlace = "loss"
    kl_in_loss: KlEstimator = "k3"
    """The estimator when the KL divergence is in the loss; in the reward it is always k1."""
    scale_rewards: RewardScale = "none"
    filter_zero_variance: bool = False


_DEFAULTS = MappingProxyType(
    {
        "reinforce_pp": _Defaults(advantage="returns", aggregation="token_mean", kl_place="reward"),
        "reinforce_pp_baseline": _Defaults(
            advantage="group_whitened", aggregation="token_mean", kl_in_loss="k2"
        ),
        "grpo": _Defaults(advantage="group", aggregation="sequence_mean", scale_rewards="group"),
        "dr_grpo": _Defaults(advantage="group", aggregation="constant"),
        "rloo": _Defaults(advantage="leave_one_out", aggregation="constant", kl_place="reward"),
        "dapo": _Defaults(
            advantage="group",
            aggregation="token_mean",
            clip_high=0.28,
            scale_rewards="group",
            filter_zero_variance=True,
        ),
        "ppo": _Defaults(advantage="gae", aggregation="token_mean", kl_place="reward"),
        "gspo": _Defaults(
            advantage="group", aggregation="sequence_mean", scale_rewards="group", loss="gspo"
        ),
        "cispo": _Defaults(
            advantage="group", aggregation="token_mean", scale_rewards="group", loss="cispo"
        ),
        "sapo": _Defaults(
            advantage="group", aggregation="sequence_mean", scale_rewards="group", loss="sapo"
        ),
        "gmpo": _Defaults(
            advantage="group", aggregation="sequence_mean", scale_rewards="group", loss="gmpo"
        ),
    }
)
_CLIPS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "clip": (0.2, 0.2),
        "gspo": (3e-4, 4e-4),
        "gspo_token": (3e-4, 4e-4),
        "cispo": (1.0, 4.0),
        "gmpo": (1 - math.exp(-0.4), math.exp(0.4) - 1),
    }
)
"""Lower and upper clip range of a loss, as published; 1 has no lower bound. sapo has none."""
_NO_CLIP = (1.0, math.inf)
_TAKE_DUAL_CLIP: frozenset[str] = frozenset({"clip", "gspo", "gspo_token"})
ANSWER_RATIOS: frozenset[str] = frozenset({"gspo", "gspo_token", "gmpo"})
"""Losses with one ratio per answer."""
_COMPARE_SIBLINGS: frozenset[str] = frozenset({"group", "group_whitened", "leave_one_out"})


def is_function(text: str) -> bool:
    """Whether the text is the address of a user function rather than the name of a built-in.

    >>> is_function("my_file.py:my_loss"), is_function("my_module:my_loss"), is_function("gspo")
    (True, True, False)
    """
    return ":" in text or text.endswith(".py")


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
    ppo: a critic and generalised advantage estimation.
    gspo: grpo with the ratio and the clip of a whole answer.
    cispo: grpo; the clipped ratio weights the log-probability, so clipped tokens keep a gradient.
    sapo: grpo with a soft gate in place of the clip.
    gmpo: grpo with the geometric mean of an answer's clipped ratios."""
    advantage: str | None = None
    """Advantage estimator. returns: sums of rewards to the end, whitened. group: minus the mean of
    the prompt. group_whitened: the same, whitened. leave_one_out: minus the mean of the prompt's
    other answers. gae: with a critic. Or your own function: my_file.py:my_function. By default that
    of the algorithm."""
    loss: str | None = None
    """Policy loss. clip: the ratio of each token, clipped (PPO). gspo: the ratio of the answer, the
    geometric mean of its tokens' ratios, clipped. gspo_token: the same for advantages that differ
    by token. cispo: the log-probability, weighted by the clipped ratio. sapo: a sigmoid of the
    ratio. gmpo: the geometric mean of the clipped ratios. Or your own function:
    my_file.py:my_function. By default that of the algorithm."""
    clip: Annotated[float, within(0, 1, ends="()")] | None = None
    """Clip range: how far an importance ratio may move from 1 before its gradient is cut. By
    default 0.2, 3e-4 for gspo, 0.33 for gmpo; cispo has no lower bound."""
    clip_high: PositiveFloat | None = None
    """Upper clip range, where it differs from the lower one; by default 0.28 for dapo, 4e-4 for
    gspo, 4 for cispo, 0.49 for gmpo."""
    dual_clip: float | None = None
    """Dual clip: upper bound of the ratio in the loss of negative advantages, such as 3."""
    aggregation: Aggregation | None = None
    """How token losses are aggregated. token_mean: the mean over all tokens. sequence_mean: the
    mean over each answer, then over answers. constant: the sum, divided by the number of answers
    times engine.max_tokens. By default that of the algorithm."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the initial model; at 0 there is no reference model."""
    kl_estimator: KlEstimator | None = None
    """KL estimator. In the reward it is k1, the log ratio. In the loss it is k2, half its square,
    or k3, ratio - 1 - log ratio. By default that of the algorithm."""
    kl_place: KlPlace | None = None
    """Whether the KL divergence is in the reward of every token or in the loss. By default that
    of the algorithm."""
    reference_refresh: PositiveInt | None = None
    """Copy the trained model to the reference every this many updates; by default the reference
    stays the initial model."""
    scale_rewards: RewardScale | None = None
    """Advantage group: the divisor of the advantages. group: the standard deviation of the
    prompt's rewards. batch: that of all rewards of the update. none: nothing. By default that of
    the algorithm: none for dr_grpo, else group."""
    whiten: Whitening = "batch"
    """reinforce_pp: what rewards are normalised over. batch: the answers of the update. group: as
    many recent updates as a group has. Update batches are sorted by length, so a single batch
    cannot compare long answers with short ones."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; positive keeps the policy exploring."""
    discount: Fraction = 1.0
    """ppo: discount factor (gamma) per token."""
    gae_lambda: Fraction = 1.0
    """ppo: lambda of GAE; 1 uses rewards only, 0 the critic only."""
    value_clip: Annotated[float, above(0, "leave it out for none")] | None = 0.2
    """ppo: clip range of the critic: how far a value may move before its gradient is cut."""
    critic_learning_rate: NonNegativeFloat | None = None
    """ppo: learning rate of the critic; by default optimiser.learning_rate."""
    critic_warmup_steps: NonNegativeInt | None = None
    """ppo: warm-up steps of the critic's learning rate; by default optimiser.warmup_steps."""
    filter_zero_variance: bool | None = None
    """Filter out prompts whose answers all have the same reward, and hold the remaining answers
    back until an update batch is full (dynamic sampling); on for dapo."""
    truncated: TruncatedAnswers = "train"
    """Answers cut off at engine.max_tokens. train: like any other. mask: no loss, but their rewards
    count in the advantages of others. bootstrap (ppo): the critic's value at the cut replaces the
    missing return."""
    overlong_tokens: PositiveInt | None = None
    """Overlong shaping (DAPO): answers within this many tokens of engine.max_tokens lose reward,
    linearly, up to overlong_penalty at the limit."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Reward lost by an answer at the limit."""

    def __post_init__(self) -> None:
        check_values(self, "algorithm.")
        self._check_functions()
        self._check_loss()
        self._check_rewards()

    def _check_functions(self) -> None:
        for field, given, known in (
            ("advantage", self.advantage, get_args(AdvantageName)),
            ("loss", self.loss, get_args(LossName)),
        ):
            require(
                given is None or given in known or is_function(given),
                unknown_name(f"algorithm.{field}", str(given), known)
                + ", or a function as my_file.py:my_function",
            )

    def _check_loss(self) -> None:
        require(
            self.dual_clip is None or self.effective_loss in _TAKE_DUAL_CLIP,
            f"algorithm.dual_clip belongs to the losses {', '.join(sorted(_TAKE_DUAL_CLIP))}, got "
            f"it with {self.effective_loss!r}; leave it out",
        )
        require(
            (self.clip is None and self.clip_high is None) or self.effective_loss in _CLIPS,
            f"algorithm.clip and clip_high belong to the losses {', '.join(_CLIPS)}, got them with "
            f"{self.effective_loss!r}, which has no clip range; leave them out",
        )
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

        require(
            self.reference_refresh is None or self.kl_coef > 0,
            f"algorithm.reference_refresh needs a reference, got {self.reference_refresh} with "
            "kl_coef 0; set kl_coef or leave it out",
        )

    def _check_rewards(self) -> None:
        for field, given, default in (
            ("discount", self.discount, 1.0),
            ("gae_lambda", self.gae_lambda, 1.0),
            ("value_clip", self.value_clip, 0.2),
            ("critic_learning_rate", self.critic_learning_rate, None),
            ("critic_warmup_steps", self.critic_warmup_steps, None),
        ):
            require(
                given == default or self.has_critic,
                f"algorithm.{field} belongs to 'ppo', got {given} with {self.name!r}; leave it out",
            )
        require(
            self.whiten == "batch" or self.effective_advantage == "returns",
            f"algorithm.whiten {self.whiten!r} belongs to 'reinforce_pp', got it with "
            f"{self.name!r}; leave it out",
        )
        require(
            self.scale_rewards is None or self.effective_advantage == "group",
            f"algorithm.scale_rewards belongs to the advantage 'group', got it with "
            f"{self.effective_advantage!r}; leave it out, or use grpo or dr_grpo",
        )
        require(
            not self.filter_zero_variance or self.needs_siblings,
            f"algorithm.filter_zero_variance compares the answers to a prompt, got it with "
            f"{self.name!r}; use grpo, dr_grpo, rloo, dapo or reinforce_pp_baseline",
        )
        require(
            self.truncated != "bootstrap" or self.has_critic,
            f"algorithm.truncated 'bootstrap' takes a value of the critic, got it with "
            f"{self.name!r}, which has none; set it to 'mask', or name to 'ppo'",
        )
        require(
            self.overlong_penalty == 1.0 or self.overlong_tokens is not None,
            f"algorithm.overlong_penalty needs overlong_tokens, got {self.overlong_penalty} "
            "without; set overlong_tokens or leave it out",
        )

    @property
    def needs_siblings(self) -> bool:
        """Whether advantages compare an answer with the other answers to its prompt."""
        own = self.effective_advantage
        # A user function may compare answers wherever the algorithm it replaces does.
        own = _DEFAULTS[self.name].advantage if is_function(own) else own
        return own in _COMPARE_SIBLINGS

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.effective_advantage == "gae"

    @property
    def effective_advantage(self) -> str:
        """The name of an advantage estimator, or a user function."""
        return self.advantage or _DEFAULTS[self.name].advantage

    @property
    def effective_scale_rewards(self) -> RewardScale:
        """What the advantages of the estimator 'group' are divided by."""
        return self.scale_rewards or _DEFAULTS[self.name].scale_rewards

    @property
    def effective_loss(self) -> str:
        """The name of a policy loss, or a user function."""
        return self.loss or _DEFAULTS[self.name].loss

    @property
    def effective_clip(self) -> float:
        """Lower clip range."""
        return self._clips[0] if self.clip is None else self.clip

    @property
    def effective_clip_high(self) -> float:
        """Upper clip range."""
        if self.clip_high is not None:
            return self.clip_high
        row = _DEFAULTS[self.name]
        if row.clip_high is not None and self.effective_loss == row.loss:
            return row.clip_high
        return self._clips[1] if self.clip is None else self.clip

    @property
    def _clips(self) -> tuple[float, float]:
        return _CLIPS.get(self.effective_loss, _NO_CLIP)

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
        if self.filter_zero_variance is not None:
            return self.filter_zero_variance
        return _DEFAULTS[self.name].filter_zero_variance


CorrectionName = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"]
CorrectionMask = Literal["none", "token", "sequence", "geometric"]
StepScale = Literal["none", "token", "sequence"]
Ratio = Literal["proximal", "behaviour"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Importance-sampling correction of tokens sampled by other weights."""

    kind: CorrectionName | None = None
    """none: no correction.
    token_tis: truncated importance sampling: the ratio of proximal to behaviour probability, at
    most max_ratio.
    sequence_tis: the same with the ratio of the whole answer.
    token_mis, sequence_mis: masked importance sampling: the same ratio, but 0 outside
    min_ratio..max_ratio.
    By default token_tis where stale tokens are trained on (partial mode, posthoc) or the engine is
    not the native one, else none."""
    max_ratio: PositiveFloat = 2.0
    """Truncation: the largest weight. Masking: the largest ratio that is kept."""
    min_ratio: NonNegativeFloat = 0.0
    """Truncation: the smallest weight. Masking: the smallest ratio that is kept."""
    mask: CorrectionMask = "none"
    """An additional mask: tokens whose ratio lies outside mask_min_ratio..mask_max_ratio have no
    loss. token: the ratio of the token. sequence: that of the whole answer. geometric: the
    geometric mean over the answer, which is independent of its length."""
    mask_min_ratio: NonNegativeFloat = 0.5
    """mask: the smallest ratio that is kept."""
    mask_max_ratio: PositiveFloat = 2.0
    """mask: the largest ratio that is kept."""
    weight_kl: bool = False
    """Apply the importance weights to the KL divergence in the loss too, so that stale tokens do
    not bias it."""
    scale_by_ess: StepScale = "none"
    """Scale the learning rate of a step by the square root of its effective sample size (as a
    share), so that a batch with few usable stale tokens takes a small step. token: from the
    weights of tokens. sequence: from the weights of whole answers, which is stricter."""
    ratio: Ratio = "proximal"
    """The denominator of the clipped ratio in the loss. proximal: the weights at the start of the
    update (decoupled PPO). behaviour: the weights that sampled the token; the clip is then the
    correction, so kind must be none."""

    def __post_init__(self) -> None:
        check_values(self, "correction.")
        require(
            self.min_ratio < self.max_ratio,
            "correction.min_ratio must be below correction.max_ratio, got "
            f"{self.min_ratio} and {self.max_ratio}",
        )
        require(
            self.min_ratio == 0 or self.kind not in (None, "none"),
            f"correction.min_ratio needs a kind that weights tokens, got {self.min_ratio} with "
            f"kind {self.kind!r}; leave it out or set kind, such as to 'token_tis' or 'token_mis'",
        )
        require(
            self.mask_min_ratio < self.mask_max_ratio,
            "correction.mask_min_ratio must be below correction.mask_max_ratio, got "
            f"{self.mask_min_ratio} and {self.mask_max_ratio}",
        )
        require(
            self.mask != "none" or (self.mask_min_ratio, self.mask_max_ratio) == (0.5, 2.0),
            "correction.mask_min_ratio and mask_max_ratio need a mask, got "
            f"{self.mask_min_ratio} and {self.mask_max_ratio} without; set mask or leave them out",
        )
        require(
            self.ratio == "proximal" or self.kind in (None, "none"),
            f"correction.ratio 'behaviour' needs kind 'none', got kind {self.kind!r}; "
            "set ratio to 'proximal' or kind to 'none'",
        )

    def effective_kind(self, *, is_needed: bool) -> CorrectionName:
        """The resolved correction."""
        if self.kind is not None:
            return self.kind
        return "token_tis" if is_needed and self.ratio == "proximal" else "none"


RateSchedule = Literal["constant", "cosine"]
OptimiserState = Literal["fp32", "8bit", "offload"]
GradientPrecision = Literal["fp32", "weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """AdamW, its learning-rate schedule, and the optimiser steps of an update batch."""

    learning_rate: NonNegativeFloat = 1e-6
    """Learning rate after the warm-up; 0 leaves the weights unchanged."""
    schedule: RateSchedule = "constant"
    """The learning rate after the warm-up.
    constant: unchanged.
    cosine: falls along half a cosine until the last step of the run."""
    warmup_steps: NonNegativeInt = 0
    """Warm-up steps, in which the learning rate rises linearly."""
    min_lr_ratio: Fraction = 0.1
    """Schedule cosine only: the final learning rate as a fraction of the full one."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, applied to matrices only, not to biases and norms."""
    beta1: Annotated[float, within(0, 1, ends="[)")] = 0.9
    """AdamW's beta1: decay of the running mean of gradients."""
    beta2: Annotated[float, within(0, 1, ends="[)")] = 0.999
    """AdamW's beta2: decay of the running mean of squared gradients. Update batches are sorted by
    length, so the mean should span more steps than a group has updates."""
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
    state: OptimiserState = "fp32"
    """Where AdamW keeps its moments and the fp32 master weights of 16-bit weights.
    fp32: on the device, 8 bytes per trained weight, and 4 for its master.
    8bit: the moments in 8 bits, 2 bytes per weight; results differ slightly.
    offload: everything in main memory, copied to the device in pieces at each step; the same
    results as fp32."""
    gradients: GradientPrecision = "fp32"
    """Precision in which gradients of 16-bit weights are accumulated. fp32: 4 bytes per weight.
    weights: that of the weights, 2 bytes; sums over many micro-batches lose precision."""

    def __post_init__(self) -> None:
        check_values(self, "optimiser.")
        require(
            self.min_lr_ratio == 0.1 or self.schedule == "cosine",
            f"optimiser.min_lr_ratio belongs to the schedule 'cosine', got {self.min_lr_ratio} "
            f"with {self.schedule!r}; set schedule to 'cosine' or leave it out",
        )


def learning_rate_at(step: int, *, settings: Optimisation, total_steps: int | None) -> float:
    """The learning rate of a step, counted from 0; `total_steps` is the length of the run.

    Step `warmup_steps` is the first at the full rate; a cosine ends at `min_lr_ratio`.

    >>> rises = Optimisation(learning_rate=1.0, warmup_steps=3)
    >>> [learning_rate_at(step, settings=rises, total_steps=None) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    require(
        settings.schedule == "constant" or total_steps is not None,
        f"optimiser.schedule {settings.schedule!r} needs the number of steps of the run, got none; "
        "limit the run or set the schedule to 'constant'",
    )
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    if total_steps is None or settings.schedule == "constant":
        return settings.learning_rate
    way = max(1, total_steps - 1 - settings.warmup_steps)
    passed = min(1.0, (step - settings.warmup_steps) / way)
    height = (1 + math.cos(math.pi * passed)) / 2
    return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * height)
