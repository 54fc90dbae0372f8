"""One policy update from one batch of answers, in packed passes without padding.

    answers -> (log-probabilities before, reference, values) -> advantages
            -> for each mini-batch: passes forward and backward, then one optimiser step

An answer is passed over whole in one pass, and each token has its weight in the loss before the
first pass begins, so how answers are packed into passes changes nothing but rounding. The reference
is the policy that the run began with, a copy or the model without its adapters.

Axes: N answers, T answer tokens of all of them together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.config.train import TrainSettings
from sortedrl.core.randomness import mix
from sortedrl.errors import TrainingError
from sortedrl.training.advantages import RunningMoments, estimate, informative
from sortedrl.training.batch import (
    ALONE,
    Answers,
    Pass,
    Team,
    TokenSequence,
    mini_batches,
    of_all,
    passes_over,
    sound,
    trainable,
)
from sortedrl.training.critic import CriticTrainer
from sortedrl.training.forward import PackedModel
from sortedrl.training.losses import (
    LossInputs,
    aggregation_weights,
    correction_weights,
    kl_estimates,
    loss,
)
from sortedrl.training.optimiser import Optimiser, StepOutcome
from sortedrl.training.statistics import Seen, UpdateRecord, update_statistics
from sortedrl.types import TrainBatch, Trajectory, Weights


class CopiedReference:
    """A second model that never changes."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        """Freeze the model, which must not be the one that is trained."""
        model.requires_grad_(False)
        self._packed = PackedModel(model, temperature=temperature)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""
        return self._packed.logprobs(sequences).logprobs_T


class AdapterReference:
    """The trained model without its adapters: a reference that takes no memory."""

    def __init__(self, policy: PackedModel) -> None:
        """The policy whose adapters are trained."""
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""
        with self._without_adapters():
            return self._policy.logprobs(sequences).logprobs_T

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        self._policy.model.disable_adapters()
        try:
            yield
        finally:
            self._policy.model.enable_adapters()


_LOG = logging.getLogger(__name__)


class Reference(Protocol):
    """The policy that the run began with."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What is known of the answers before they are trained on; tensors on the model's device."""

    answers: Answers
    sequences: Sequence[TokenSequence]
    behaviour_T: Tensor
    advantages_T: Tensor
    proximal_T: Tensor | None
    """`None` where the first pass of the only step finds it by the way."""
    reference_T: Tensor | None
    values_T: Tensor | None
    returns_T: Tensor | None


class _NotFiniteError(Exception):
    """The numbers of an update that is to be skipped, and where they came from."""


class PolicyTrainer:
    """A `Trainer` of one model.

    Its weights are the engine's own, and handing them over copies nothing; or, where `tensors` is
    given, the engine has a copy, and they are handed over by name.
    """

    def __init__(
        self,
        policy: PackedModel,
        optimiser: Optimiser,
        *,
        settings: TrainSettings,
        reference: Reference | None = None,
        critic: CriticTrainer | None = None,
        tensors: Callable[[], Mapping[str, Tensor]] | None = None,
        version: int = 0,
        team: Team = ALONE,
    ) -> None:
        """Train the policy's model as the settings say, alone or as one process of a team."""
        self.version = version
        self.held: tuple[Trajectory, ...] = ()
        self._num_unusable = 0
        self.num_bad = 0
        self.last: Mapping[str, float] = {}
        self.optimiser = optimiser
        self.critic = critic
        self.moments: RunningMoments | None = None
        if settings.algorithm.whiten == "group":
            self.moments = RunningMoments(settings.schedule.updates_per_group)
        self._policy = policy
        self._settings = settings
        self._reference = reference
        self._tensors = tensors
        self._team = team
        self._kind = settings.correction.effective_kind(is_needed=settings.needs_correction)

    def weights(self) -> Weights:
        """The present weights: only their version where the engine has the tensors."""
        return Weights(self.version, None if self._tensors is None else self._tensors())

    def update(self, batch: TrainBatch) -> None:
        """Make one policy update, unless too few answers have something to teach.

        Where prompts without variance are left out, the others are held back until an update
        batch of them is there; the weights have not changed meanwhile, so they are not staler.
        """
        given = trainable(batch)
        fit = sound(given, is_telling=self._team.rank == 0)
        self._num_unusable = len(given) - len(fit)
        trajectories = (*self.held, *fit)
        self.held = ()
        if self._settings.algorithm.filters_zero_variance and trajectories:
            chosen = informative(Answers.of(trajectories, version=self.version)).tolist()
            pairs = zip(trajectories, chosen, strict=True)
            trajectories = tuple(trajectory for trajectory, teaches in pairs if teaches)
            if len(trajectories) < self._settings.schedule.update_batch:
                self.held = trajectories
                self.last = {"held": float(len(trajectories)), **self._unusable()}
                return
        self._train(trajectories)

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""
        held, self.held = self.held, ()
        self._num_unusable = 0
        if held:
            self._train(held)
        return bool(held)

    def _train(self, trajectories: Sequence[Trajectory]) -> None:
        if not trajectories:
            self.last = self._unusable()
            if self._num_unusable:
                self._skip("no answer of the update can be trained on")
            return
        began = time.perf_counter()
        try:
            prepared = self._prepare(trajectories)
        except _NotFiniteError as error:
            self.last = {"skipped_steps": 1.0, **self._unusable()}
            self._skip(str(error))
            return
        seen = Seen.nothing(prepared.answers.num_tokens, device=self._policy.model.device)
        settings, seed = self._settings.optimiser, mix(self._settings.seed, self.version)
        outcomes = [
            self._step(prepared, chosen, seen)
            for chosen in mini_batches(
                len(trajectories), parts=settings.mini_batches, epochs=settings.epochs, seed=seed
            )
        ]
        value_loss = self._train_critic(prepared, seed=seed)
        applied = [outcome for _, outcome in outcomes if outcome.is_applied]
        self.version += bool(applied)
        self.last = {
            **self._statistics(prepared, seen),
            **value_loss,
            "loss": sum(value for value, _ in outcomes) / len(outcomes),
            "grad_norm": max(outcome.grad_norm for _, outcome in outcomes),
            "learning_rate": outcomes[-1][1].learning_rate,
            "skipped_steps": float(len(outcomes) - len(applied)),
            **self._unusable(),
            **self._loss_scale(),
            "fill": sum(seen.fills) / len(seen.fills),
            "update_seconds": time.perf_counter() - began,
        }
        if applied:
            self.num_bad = 0
        else:
            self._skip(_why_skipped(trajectories, prepared.answers, seen))

    def _skip(self, reason: str) -> None:
        """Count an update that changed nothing, and stop where there were too many in a row."""
        self.num_bad += 1
        if self._team.rank == 0:
            _LOG.warning("the update is skipped, and the weights stay: %s", reason)
        most = self._settings.optimiser.max_bad_updates
        if self.num_bad >= most:
            raise TrainingError(
                f"{most} updates in a row had a loss or a gradient that is not finite; they were "
                "skipped, and the weights are those before them. The last of them: "
                f"{reason}. Lower optimiser.learning_rate or look at the rewards, then go on from "
                "the last checkpoint (--resume)"
            )

    def _unusable(self) -> dict[str, float]:
        return {"unusable_answers": float(self._num_unusable)} if self._num_unusable else {}

    def _loss_scale(self) -> dict[str, float]:
        scale = self.optimiser.loss_scale
        return {} if scale is None else {"loss_scale": scale}

    def _prepare(self, trajectories: Sequence[Trajectory]) -> _Prepared:
        algorithm, optimisation = self._settings.algorithm, self._settings.optimiser
        device, budget = self._policy.model.device, self._settings.passes.micro_batch_tokens
        answers = Answers.of(trajectories, version=self.version)
        sequences = [TokenSequence(t.prompt.tokens, t.tokens) for t in trajectories]
        over_all = partial(of_all, answers, sequences, budget=budget, team=self._team)
        in_reward = algorithm.kl_coef > 0 and algorithm.effective_kl_place == "reward"
        reference_T = kl_T = proximal_T = values_T = None
        if in_reward or optimisation.mini_batches * optimisation.epochs > 1:
            proximal_T = over_all(self._policy_logprobs)
        if self._reference is not None:
            reference_T = over_all(self._reference.logprobs)
        if in_reward:
            assert proximal_T is not None
            assert reference_T is not None, "a divergence needs the reference"
            kl_T = kl_estimates(proximal_T, reference_T, algorithm.effective_kl_estimator).cpu()
        if self.critic is not None:
            values_T = over_all(self.critic.critic.values)
        for what, numbers_T in (
            ("the trained model", proximal_T),
            ("the reference", reference_T),
            ("the critic", values_T),
        ):
            if numbers_T is not None:
                _refuse_not_finite(numbers_T, trajectories, answers, what=what)
        found = estimate(
            answers,
            algorithm,
            max_tokens=self._settings.engine.max_tokens,
            kl_T=kl_T,
            values_T=None if values_T is None else values_T.cpu(),
            moments=self.moments,
        )
        for what, numbers_T in (
            ("the advantages", found.advantages_T),
            ("the returns", found.returns_T),
        ):
            if numbers_T is not None:
                _refuse_not_finite(numbers_T, trajectories, answers, what=what)
        return _Prepared(
            answers=answers,
            sequences=sequences,
            behaviour_T=answers.behaviour_T.to(device),
            advantages_T=found.advantages_T.to(device),
            proximal_T=proximal_T,
            reference_T=reference_T,
            values_T=values_T,
            returns_T=None if found.returns_T is None else found.returns_T.to(device),
        )

    def _step(
        self, prepared: _Prepared, chosen: Sequence[int], seen: Seen
    ) -> tuple[float, StepOutcome]:
        """One optimiser step over the chosen answers; gives its loss and what came of it."""
        settings, answers = self._settings, prepared.answers
        weights_T = torch.zeros_like(prepared.behaviour_T)
        at = answers.places(chosen).to(weights_T.device)
        weights_T[at] = aggregation_weights(
            answers.lengths_N[torch.tensor(list(chosen))],
            settings.algorithm.effective_aggregation,
            max_tokens=settings.engine.max_tokens,
        ).to(weights_T.device)
        going = passes_over(
            chosen,
            answers,
            prepared.sequences,
            budget=settings.passes.micro_batch_tokens,
            team=self._team,
        )
        seen.fills.append(going.fill)
        num_seen = len(seen.losses)
        while True:
            seen.forget(at)
            del seen.losses[num_seen:]
            total = torch.zeros((), device=weights_T.device)
            for one in going.passes:
                total += self._pass(prepared, one, weights_T, seen)
            value = float(self._team.summed(total))
            outcome = self.optimiser.step(loss=value)
            if not outcome.is_to_repeat:
                break
        seen.share(at, self._team)
        return value, outcome

    def _pass(
        self,
        prepared: _Prepared,
        one: Pass,
        weights_T: Tensor,
        seen: Seen,
    ) -> Tensor:
        """Forward and backward over some answers; gives their part of the step's loss."""
        correction = self._settings.correction
        at = one.places.to(weights_T.device)
        scored = self._policy.logprobs(one.read(prepared.sequences), with_entropy=True)
        assert scored.entropies_T is not None
        current_T, entropy_T = scored.logprobs_T[: len(at)], scored.entropies_T[: len(at)]
        before = prepared.proximal_T
        proximal_T = current_T.detach() if before is None else before[at]
        behaviour_T = prepared.behaviour_T[at]
        reference_T = prepared.reference_T
        inputs = LossInputs(
            advantages_T=prepared.advantages_T[at],
            anchor_T=proximal_T if correction.ratio == "proximal" else behaviour_T,
            corrections_T=correction_weights(
                behaviour_T,
                proximal_T,
                lengths_N=prepared.answers.lengths_N[torch.tensor(one.answers, dtype=torch.long)],
                correction=correction,
                kind=self._kind,
            ),
            weights_T=weights_T[at],
            reference_T=None if reference_T is None else reference_T[at],
        )
        found = loss(current_T, inputs, algorithm=self._settings.algorithm, entropy_T=entropy_T)
        self.optimiser.backward(found.total)
        seen.current_T[at] = current_T.detach()
        seen.proximal_T[at] = proximal_T
        seen.entropy_T[at] = entropy_T.detach()
        seen.losses.append(found.tokens)
        return found.total.detach()

    def _train_critic(self, prepared: _Prepared, *, seed: int) -> Mapping[str, float]:
        if self.critic is None:
            return {}
        assert prepared.values_T is not None
        assert prepared.returns_T is not None, "the critic learns from returns"
        value_loss = self.critic.train(
            prepared.answers,
            prepared.sequences,
            old_values_T=prepared.values_T,
            returns_T=prepared.returns_T,
            clip=self._settings.algorithm.value_clip,
            seed=seed,
        )
        return {"value_loss": value_loss}

    def _statistics(self, prepared: _Prepared, seen: Seen) -> Mapping[str, float]:
        reference_T, kl_T = prepared.reference_T, None
        if reference_T is not None:
            kind = self._settings.algorithm.effective_kl_estimator
            kl_T = kl_estimates(seen.proximal_T, reference_T, kind)
        return update_statistics(
            UpdateRecord(
                answers=prepared.answers,
                advantages_T=prepared.advantages_T,
                proximal_T=seen.proximal_T,
                current_T=seen.current_T,
                correction=self._settings.correction,
                kind=self._kind,
                tokens=seen.token_losses(self._team),
                kl_T=kl_T,
                entropy_T=seen.entropy_T,
            )
        )

    def _policy_logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        return self._policy.logprobs(sequences).logprobs_T


def _refuse_not_finite(
    numbers_T: Tensor, trajectories: Sequence[Trajectory], answers: Answers, *, what: str
) -> None:
    """Raise where a number of a token is not finite, naming the answers it belongs to."""
    is_broken_T = ~numbers_T.isfinite().cpu()
    if bool(is_broken_T.any()):
        raise _NotFiniteError(
            f"{what} gave numbers that are not finite for "
            + _named(trajectories, answers, is_broken_T)
        )


def _why_skipped(trajectories: Sequence[Trajectory], answers: Answers, seen: Seen) -> str:
    """Where a loss or a gradient came from that is not finite."""
    is_broken_T = ~(seen.current_T.isfinite() & seen.entropy_T.isfinite()).cpu()
    if not bool(is_broken_T.any()):
        return "every log-probability is finite, but the loss or the gradient is not"
    return "the trained model gave log-probabilities that are not finite for " + _named(
        trajectories, answers, is_broken_T
    )


def _named(trajectories: Sequence[Trajectory], answers: Answers, is_broken_T: Tensor) -> str:
    """The answers that these tokens belong to, in words."""
    broken = answers.owners_T[is_broken_T].unique().tolist()
    prompt, sample = trajectories[broken[0]].key
    return (
        f"{len(broken)} of {len(trajectories)} answers, first of all for prompt {prompt}, "
        f"sample {sample}"
    )
