"""One policy update from one batch of answers, in packed micro-batches without padding.

    answers -> (log-probabilities before, reference, values) -> advantages
            -> for each mini-batch: its micro-batches forward and backward, then one optimiser step

An answer is whole in one micro-batch, and each token has its weight in the loss before the first
micro-batch, so how answers are packed changes nothing but rounding.

In a checkpoint the trainer's tensors are safetensors files, and its counters JSON; the model is a
folder that transformers reads, with its tokenizer and with adapters merged.

Axes: N answers, T answer tokens of all of them together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.config.algorithm import ANSWER_RATIOS
from sortedrl.config.train import UpdateSettings
from sortedrl.core.buffer import BufferState
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.core.protocols import Trainer
from sortedrl.core.randomness import mix
from sortedrl.errors import TrainingError
from sortedrl.models.offload import copied, free_main_memory
from sortedrl.training.advantages import RunningMoments, estimate, has_reward_variance
from sortedrl.training.batch import (
    SINGLE_RANK,
    Answers,
    MicroBatch,
    RankGroup,
    TokenSequence,
    in_micro_batches,
    micro_batches,
    mini_batches,
    trainable,
    usable,
)
from sortedrl.training.checkpoint import read_tensors, refuse_not_finite, write_tensors
from sortedrl.training.critic import CriticTrainer
from sortedrl.training.forward import CopiedReference, PackedModel, Reference
from sortedrl.training.functions import check_functions
from sortedrl.training.lora import (
    ADAPTER_FILE,
    export_model,
    export_tensors,
    plain_skeleton,
    plain_tensors,
    trained_parameters,
)
from sortedrl.training.losses import (
    LossInputs,
    aggregation_weights,
    correction_weights,
    kl_estimates,
    loss,
    step_scale,
)
from sortedrl.training.optimiser import Optimiser, StepResult
from sortedrl.training.update_metrics import TokenOutputs, UpdateRecord, update_metrics
from sortedrl.types import TrainBatch, Trajectory, Weights

_LOG = logging.getLogger(__name__)
_HELD = "held.bin"
_MODEL = "model"
_SHARE_FOR_COPIES = 0.25


Snapshot = Callable[[Path], dict[str, Any]]
"""Writes a copy of model and trainer into the folder of a checkpoint; gives the counters."""


class RunTrainer(Trainer, Protocol):
    """The trainer of a run: what the loop needs, and checkpoints, export and metrics."""

    @property
    def last(self) -> Mapping[str, float]:
        """The metrics of the last update."""

    @property
    def device(self) -> str:
        """The device it computes on, for display."""

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The log-probabilities of the tokens of a few answers at temperature 1."""

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""

    def snapshot(self, *, tokenizer: Any) -> Snapshot | None:  # noqa: ANN401
        """What `save` would write now, to be written later while training continues.

        `None` where there is no room for a copy, or none can be made.
        """

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model as a folder that transformers reads."""

    def close(self) -> None:
        """Release everything it holds; a second call does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What an update computes before its first step; tensors on the model's device."""

    answers: Answers
    sequences: Sequence[TokenSequence]
    behaviour_T: Tensor
    advantages_T: Tensor
    proximal_T: Tensor | None
    """`None` where the only step computes it with its own micro-batches."""
    reference_T: Tensor | None
    values_T: Tensor | None
    returns_T: Tensor | None
    is_masked_T: Tensor | None
    """Tokens without a loss; `None` where every token has one."""


class _NotFiniteError(Exception):
    """An update is skipped: some values are not finite; names the answers they belong to."""


class PolicyTrainer:
    """A `RunTrainer` of one model, in one process or as one rank of several.

    The engine reads the very weights that are trained; or, where `engine_weights` is given, it has
    a copy and gets new weights by name.
    """

    def __init__(
        self,
        policy: PackedModel,
        optimiser: Optimiser,
        *,
        settings: UpdateSettings,
        reference: Reference | None = None,
        critic: CriticTrainer | None = None,
        engine_weights: Callable[[], Mapping[str, Tensor]] | None = None,
        version: int = 0,
        ranks: RankGroup = SINGLE_RANK,
    ) -> None:
        """A trainer of the policy's model."""
        check_functions(settings.algorithm)
        self.version = version
        self.held: tuple[Trajectory, ...] = ()
        self._num_unusable = 0
        self.num_bad = 0
        self.last: Mapping[str, float] = {}
        self.optimiser = optimiser
        self.critic = critic
        self.moments: RunningMoments | None = None
        if settings.algorithm.whiten == "group":
            self.moments = RunningMoments(settings.updates_per_group)
        self._policy = policy
        self._settings = settings
        self._reference = reference
        self._engine_weights = engine_weights
        self._ranks = ranks

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained."""
        return self._policy.model

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(self.model.device)

    def weights(self) -> Weights:
        """The present weights: only their version where the engine has the tensors."""
        return Weights(
            self.version, None if self._engine_weights is None else self._engine_weights()
        )

    @torch.no_grad()
    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The log-probabilities of the tokens of a few answers at temperature 1, in one pass."""
        sequences = [TokenSequence.of(trajectory) for trajectory in trajectories]
        temperature, self._policy.temperature = self._policy.temperature, 1.0
        try:
            found_T = self._policy.logprobs(sequences).logprobs_T
        finally:
            self._policy.temperature = temperature
        lengths = [len(sequence.scored_places) for sequence in sequences]
        return [part_T.tolist() for part_T in found_T.float().split(lengths)]

    def update(self, batch: TrainBatch) -> None:
        """Make one policy update, unless too few answers are left.

        Where zero-variance prompts are filtered, the others are held back until they fill an
        update batch; the weights have not changed meanwhile, so they are not staler.
        """
        given = trainable(batch)
        fit = usable(given, is_logged=self._ranks.rank == 0)
        self._num_unusable = len(given) - len(fit)
        trajectories = (*self.held, *fit)
        self.held = ()
        if self._settings.algorithm.filters_zero_variance and trajectories:
            chosen = has_reward_variance(Answers.of(trajectories, version=self.version)).tolist()
            pairs = zip(trajectories, chosen, strict=True)
            trajectories = tuple(trajectory for trajectory, is_kept in pairs if is_kept)
            if len(trajectories) < self._settings.update_batch:
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

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model, adapters and trainer; gives the counters."""
        return self._writer(self._saved_tensors(), tokenizer=tokenizer)(folder)

    def snapshot(self, *, tokenizer: Any) -> Snapshot | None:  # noqa: ANN401
        """A copy in main memory, unless that has too little room for one."""
        files = self._saved_tensors()
        num_bytes = sum(t.nbytes for tensors in files.values() for t in tensors.values())
        if num_bytes > _SHARE_FOR_COPIES * free_main_memory():
            return None
        kept = {name: copied(tensors) for name, tensors in files.items()}
        return self._writer(kept, tokenizer=tokenizer)

    def _saved_tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of a checkpoint, by file; those of the model under the name of its folder."""
        files = {_MODEL: plain_tensors(self.model), **self.tensors()}
        if self.model._hf_peft_config_loaded:
            files[ADAPTER_FILE] = dict(trained_parameters(self.model))
        return files

    def _writer(
        self,
        files: Mapping[str, Mapping[str, Tensor]],
        *,
        tokenizer: Any,  # noqa: ANN401
    ) -> Snapshot:
        """Writes these tensors with the present counters, also once training has continued."""
        counters, held = deepcopy(self.counters()), self.held
        # Not while training continues: transformers changes torch's default dtype, which all
        # threads share, while it makes a model.
        plain = plain_skeleton(self.model)

        def write(folder: Path) -> dict[str, Any]:
            for name, tensors in files.items():
                if name == _MODEL:
                    export_tensors(plain, tensors, folder / name, tokenizer=tokenizer)
                    continue
                refuse_not_finite(tensors)
                write_tensors(folder, name, tensors=tensors)
            _write_held(held, folder)
            return counters

        return write

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model, adapters merged."""
        export_model(self.model, tokenizer, folder)

    def close(self) -> None:
        """Nothing to release."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything but the model that a checkpoint has as tensors: the live ones, by file."""
        files = {"optimiser": self.optimiser.state()[0]}
        if self.critic is not None:
            files["critic"] = self.critic.critic.tensors()
            files["critic_optimiser"] = self.critic.optimiser.state()[0]
        if self._refreshed is not None:
            files["reference"] = self._refreshed.tensors()
        return files

    @property
    def _refreshed(self) -> CopiedReference | None:
        """The reference, where it is refreshed."""
        if self._settings.algorithm.reference_refresh is None:
            return None
        assert isinstance(self._reference, CopiedReference), "only a copy can be refreshed"
        return self._reference

    def _refresh_reference(self) -> None:
        """Make the reference a copy of the trained model where it is time to."""
        every, reference = self._settings.algorithm.reference_refresh, self._refreshed
        if every is not None and reference is not None and self.version % every == 0:
            reference.load(dict(self.model.named_parameters()))

    def _reference_age(self) -> dict[str, float]:
        every = self._settings.algorithm.reference_refresh
        return {} if every is None else {"kl/reference_age": float(self.version % every)}

    def counters(self) -> dict[str, Any]:
        """Everything that a checkpoint has as JSON."""
        counters: dict[str, Any] = {
            "version": self.version,
            "num_bad": self.num_bad,
            "optimiser": self.optimiser.state()[1],
        }
        if self.moments is not None:
            counters["moments"] = self.moments.state()
        if self.critic is not None:
            counters["critic_optimiser"] = self.critic.optimiser.state()[1]
        return counters

    def write_held(self, folder: Path) -> None:
        """Write the answers that are held back."""
        _write_held(self.held, folder)

    def load(
        self,
        folder: Path,
        counters: Mapping[str, Any],
        *,
        read: Callable[[Path, str], Mapping[str, Tensor]] = read_tensors,
    ) -> None:
        """Continue from a checkpoint; its model is loaded already.

        `read` gives the tensors of a file, where they are not in one by that name.
        """
        self.version = counters["version"]
        self.num_bad = counters["num_bad"]
        self.optimiser.load_state(read(folder, "optimiser"), counters["optimiser"])
        if self.moments is not None:
            self.moments.load_state(counters["moments"])
        if self.critic is not None:
            self.critic.critic.load(read(folder, "critic"))
            self.critic.optimiser.load_state(
                read(folder, "critic_optimiser"), counters["critic_optimiser"]
            )
        if self._refreshed is not None:
            self._refreshed.load(read(folder, "reference"))
        self.held = load_buffer(folder / _HELD).ready

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
        outputs = TokenOutputs.zeros(prepared.answers.num_tokens, device=self._policy.model.device)
        settings, seed = self._settings.optimiser, mix(self._settings.seed, self.version)
        steps = [
            self._step(prepared, chosen, outputs)
            for chosen in mini_batches(
                len(trajectories), parts=settings.mini_batches, epochs=settings.epochs, seed=seed
            )
        ]
        value_loss = self._train_critic(prepared, seed=seed)
        applied = [result for _, result in steps if result.is_applied]
        reference_age = self._reference_age()
        self.version += bool(applied)
        self.last = {
            **self._metrics(prepared, outputs),
            **value_loss,
            **self._step_scale(outputs),
            **reference_age,
            "loss": sum(value for value, _ in steps) / len(steps),
            "grad_norm": max(result.grad_norm for _, result in steps),
            "learning_rate": steps[-1][1].learning_rate,
            "skipped_steps": float(len(steps) - len(applied)),
            **self._unusable(),
            **self._loss_scale(),
            "fill": sum(outputs.fills) / len(outputs.fills),
            "update_seconds": time.perf_counter() - began,
        }
        if applied:
            self.num_bad = 0
            self._refresh_reference()
        else:
            self._skip(_why_skipped(trajectories, prepared.answers, outputs))

    def _skip(self, reason: str) -> None:
        """Count an update that changed nothing, and stop after too many in a row."""
        self.num_bad += 1
        if self._ranks.rank == 0:
            _LOG.warning("update skipped, weights unchanged: %s", reason)
        most = self._settings.optimiser.max_bad_updates
        if self.num_bad >= most:
            raise TrainingError(
                f"{most} updates in a row had a loss or a gradient that is not finite; they were "
                f"skipped, and the weights are unchanged. The last one: {reason}. Lower "
                "optimiser.learning_rate or check the rewards, then resume from the last "
                "checkpoint (--resume)"
            )

    def _unusable(self) -> dict[str, float]:
        return {"unusable_answers": float(self._num_unusable)} if self._num_unusable else {}

    def _step_scale(self, outputs: TokenOutputs) -> dict[str, float]:
        if self._settings.correction.scale_by_ess == "none":
            return {}
        return {"correction/step_scale": sum(outputs.step_scales) / len(outputs.step_scales)}

    def _loss_scale(self) -> dict[str, float]:
        scale = self.optimiser.loss_scale
        return {} if scale is None else {"loss_scale": scale}

    def _prepare(self, trajectories: Sequence[Trajectory]) -> _Prepared:
        algorithm, optimisation = self._settings.algorithm, self._settings.optimiser
        device = self._policy.model.device
        answers = Answers.of(trajectories, version=self.version)
        sequences = [TokenSequence.of(t) for t in trajectories]
        over_all = partial(
            in_micro_batches,
            answers,
            sequences,
            micro_batch_tokens=self._settings.micro_batch_tokens,
            ranks=self._ranks,
        )
        in_reward = algorithm.kl_coef > 0 and algorithm.effective_kl_place == "reward"
        reference_T = kl_T = proximal_T = values_T = None
        if in_reward or optimisation.mini_batches * optimisation.epochs > 1:
            proximal_T = over_all(self._policy_logprobs)
        if self._reference is not None:
            reference_T = over_all(self._reference.logprobs)
        if in_reward:
            assert proximal_T is not None
            assert reference_T is not None, "a KL divergence needs the reference"
            kl_T = kl_estimates(proximal_T, reference_T, algorithm.effective_kl_estimator).cpu()
        if self.critic is not None:
            values_T = over_all(self.critic.critic.values)
        refuse = partial(_refuse_not_finite, trajectories, answers)
        refuse(proximal_T, what="the trained model")
        refuse(reference_T, what="the reference")
        refuse(values_T, what="the critic")
        found = estimate(
            answers,
            algorithm,
            max_tokens=self._settings.max_tokens,
            kl_T=kl_T,
            values_T=None if values_T is None else values_T.cpu(),
            last_values_N=self._values_at_cut(trajectories, answers),
            moments=self.moments,
        )
        refuse(found.advantages_T, what="the advantages")
        refuse(found.returns_T, what="the returns")
        return _Prepared(
            answers=answers,
            sequences=sequences,
            behaviour_T=answers.behaviour_T.to(device),
            advantages_T=found.advantages_T.to(device),
            proximal_T=proximal_T,
            reference_T=reference_T,
            values_T=values_T,
            returns_T=None if found.returns_T is None else found.returns_T.to(device),
            is_masked_T=answers.is_truncated_N[answers.owners_T].to(device)
            if algorithm.truncated == "mask"
            else None,
        )

    def _values_at_cut(self, trajectories: Sequence[Trajectory], answers: Answers) -> Tensor | None:
        """The critic's value after the last token of truncated answers, 0 for the others."""
        cut = answers.is_truncated_N.nonzero()[:, 0]
        if self.critic is None or self._settings.algorithm.truncated != "bootstrap" or not len(cut):
            return None
        # The state after an answer is the one before a token that would follow it.
        texts = [trajectories[n] for n in cut.tolist()]
        following = [TokenSequence((*t.prompt.tokens, *t.response), (0,)) for t in texts]
        single = Answers(
            lengths_N=torch.ones(len(cut), dtype=torch.long),
            rewards_N=answers.rewards_N[cut],
            prompts_N=answers.prompts_N[cut],
            is_truncated_N=answers.is_truncated_N[cut],
            behaviour_T=torch.zeros(len(cut)),
            staleness_T=torch.zeros(len(cut), dtype=torch.long),
        )
        values_N = torch.zeros(len(answers))
        values_N[cut] = in_micro_batches(
            single,
            following,
            self.critic.critic.values,
            micro_batch_tokens=self._settings.micro_batch_tokens,
            ranks=self._ranks,
        ).cpu()
        return values_N

    def _step(
        self, prepared: _Prepared, chosen: Sequence[int], outputs: TokenOutputs
    ) -> tuple[float, StepResult]:
        """One optimiser step over a mini-batch; gives its loss and its result."""
        settings, answers = self._settings, prepared.answers
        weights_T = torch.zeros_like(prepared.behaviour_T)
        at = answers.token_indices(chosen).to(weights_T.device)
        weights_T[at] = aggregation_weights(
            answers.lengths_N[torch.tensor(list(chosen))],
            settings.algorithm.effective_aggregation,
            max_tokens=settings.max_tokens,
        ).to(weights_T.device)
        if prepared.is_masked_T is not None:
            weights_T.masked_fill_(prepared.is_masked_T, 0.0)
        batches = micro_batches(
            chosen,
            answers,
            prepared.sequences,
            micro_batch_tokens=settings.micro_batch_tokens,
            ranks=self._ranks,
        )
        outputs.fills.append(batches.fill)
        num_before = len(outputs.losses)
        while True:
            outputs.reset(at)
            del outputs.losses[num_before:]
            total = torch.zeros((), device=weights_T.device)
            for batch in batches.parts:
                total += self._micro_batch(prepared, batch, weights_T, outputs)
            value = float(self._ranks.all_reduce(total))
            outputs.gather(at, self._ranks)
            scale = step_scale(
                prepared.behaviour_T[at],
                outputs.proximal_T[at],
                lengths_N=answers.lengths_N[torch.tensor(list(chosen))],
                correction=settings.correction,
            )
            result = self.optimiser.step(loss=value, rate_scale=scale)
            if not result.is_to_repeat:
                break
        outputs.step_scales.append(scale)
        return value, result

    def _micro_batch(
        self, prepared: _Prepared, batch: MicroBatch, weights_T: Tensor, outputs: TokenOutputs
    ) -> Tensor:
        """Forward and backward over a micro-batch; gives its part of the step's loss."""
        correction = self._settings.correction
        at = batch.token_indices.to(weights_T.device)
        found = self._policy.logprobs(batch.read(prepared.sequences), with_entropy=True)
        assert found.entropies_T is not None
        current_T, entropy_T = found.logprobs_T[: len(at)], found.entropies_T[: len(at)]
        before = prepared.proximal_T
        proximal_T = current_T.detach() if before is None else before[at]
        behaviour_T = prepared.behaviour_T[at]
        reference_T = prepared.reference_T
        lengths_N = prepared.answers.lengths_N[torch.tensor(batch.answers, dtype=torch.long)]
        inputs = LossInputs(
            advantages_T=prepared.advantages_T[at],
            anchor_T=proximal_T if correction.ratio == "proximal" else behaviour_T,
            corrections_T=correction_weights(
                behaviour_T,
                proximal_T,
                lengths_N=lengths_N,
                correction=correction,
            ),
            weights_T=weights_T[at],
            reference_T=None if reference_T is None else reference_T[at],
            lengths_N=lengths_N,
        )
        part = loss(
            current_T,
            inputs,
            algorithm=self._settings.algorithm,
            entropy_T=entropy_T,
            weight_kl=correction.weight_kl,
        )
        self.optimiser.backward(part.total)
        outputs.current_T[at] = current_T.detach()
        outputs.proximal_T[at] = proximal_T
        outputs.entropy_T[at] = entropy_T.detach()
        outputs.losses.append(part.tokens)
        return part.total.detach()

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
            is_masked_T=prepared.is_masked_T,
        )
        return {"value_loss": value_loss}

    def _metrics(self, prepared: _Prepared, outputs: TokenOutputs) -> Mapping[str, float]:
        reference_T, kl_T = prepared.reference_T, None
        if reference_T is not None:
            kind = self._settings.algorithm.effective_kl_estimator
            kl_T = kl_estimates(outputs.proximal_T, reference_T, kind)
        return update_metrics(
            UpdateRecord(
                answers=prepared.answers,
                advantages_T=prepared.advantages_T,
                proximal_T=outputs.proximal_T,
                current_T=outputs.current_T,
                correction=self._settings.correction,
                has_answer_ratios=self._settings.algorithm.effective_loss in ANSWER_RATIOS,
                tokens=outputs.token_losses(self._ranks),
                kl_T=kl_T,
                entropy_T=outputs.entropy_T,
            )
        )

    def _policy_logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        return self._policy.logprobs(sequences).logprobs_T


def _write_held(held: tuple[Trajectory, ...], folder: Path) -> None:
    state = BufferState(
        unit_size=1,
        next_group=0,
        next_prompt=0,
        num_trained=0,
        fresh=(),
        returned=(),
        ready=held,
    )
    save_buffer(state, folder / _HELD)


def _refuse_not_finite(
    trajectories: Sequence[Trajectory], answers: Answers, numbers_T: Tensor | None, *, what: str
) -> None:
    """Raise where a number of a token is not finite, naming the answers it belongs to."""
    if numbers_T is not None and not bool(numbers_T.isfinite().all()):
        named = _named(trajectories, answers, ~numbers_T.isfinite().cpu())
        raise _NotFiniteError(f"{what} gave values that are not finite for {named}")


def _why_skipped(
    trajectories: Sequence[Trajectory], answers: Answers, outputs: TokenOutputs
) -> str:
    """Where a loss or a gradient came from that is not finite."""
    is_broken_T = ~(outputs.current_T.isfinite() & outputs.entropy_T.isfinite()).cpu()
    if not bool(is_broken_T.any()):
        return "every log-probability is finite, but the loss or the gradient is not"
    named = _named(trajectories, answers, is_broken_T)
    return f"the trained model gave log-probabilities that are not finite for {named}"


def _named(trajectories: Sequence[Trajectory], answers: Answers, is_broken_T: Tensor) -> str:
    """The answers that these tokens belong to, for a message."""
    broken = answers.owners_T[is_broken_T].unique().tolist()
    prompt, sample = trajectories[broken[0]].key
    return (
        f"{len(broken)} of {len(trajectories)} answers, the first for prompt {prompt}, "
        f"sample {sample}"
    )
