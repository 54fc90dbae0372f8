"""A training run from its settings, new or as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sortedrl.buffer import Buffer
from sortedrl.buffer_store import load_buffer
from sortedrl.build.rollout import RolloutWorld, rollout_engine
from sortedrl.clock import WallClock
from sortedrl.controller import Controller
from sortedrl.data.chat import Tokenizer
from sortedrl.data.stream import PromptStream, TokenizedRow
from sortedrl.engines.guest import RolloutEngine
from sortedrl.errors import CheckpointError
from sortedrl.events import Record
from sortedrl.journal import Journal, JournalState
from sortedrl.loop import Loop
from sortedrl.models.loading import load_model
from sortedrl.rewards.pool import RewardPool
from sortedrl.rewards.scorer import PoolScorer
from sortedrl.training.adapters import add_adapters, load_adapters, trained_parameters
from sortedrl.training.checkpoint import read_state
from sortedrl.training.critic import Critic, CriticTrainer
from sortedrl.training.export import plain_tensors
from sortedrl.training.forward import PackedModel
from sortedrl.training.optimiser import Optimiser
from sortedrl.training.reference import AdapterReference, CopiedReference
from sortedrl.training.run_trainer import LocalTrainer, RunTrainer
from sortedrl.training.settings import TrainSettings
from sortedrl.training.supervision import SupervisedSettings
from sortedrl.training.trainer import PolicyTrainer
from sortedrl.training.trainer_files import read_trainer
from sortedrl.types import Trajectory

_TRIED_PROMPTS = 4
_PRECISIONS = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The parts of a training run."""

    loop: Loop
    engine: RolloutEngine
    trainer: RunTrainer
    prompts: PromptStream
    text: Callable[[Trajectory], str]
    """An answer as a person reads it."""
    clock: WallClock

    def close(self) -> None:
        """Let go of engine and trainer."""
        try:
            self.engine.close()
        finally:
            self.trainer.close()


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to go on from."""

    folder: Path
    state: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """The checkpoint in a folder, whose files were verified before."""
        return cls(folder, read_state(folder))


def trained_model(
    settings: TrainSettings | SupervisedSettings, *, saved: Saved | None = None
) -> PreTrainedModel:
    """The model that is trained: as it begins, or as it is in a checkpoint."""
    has_adapters = settings.lora.rank is not None
    name = settings.model if saved is None or has_adapters else saved.folder / "model"
    model = load_model(name, dtype=_PRECISIONS[settings.precision], device=settings.device)
    if has_adapters:
        add_adapters(model, settings.lora, seed=settings.seed)
        if saved is not None:
            load_adapters(model, saved.folder)
    if settings.passes.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def training_parts(
    settings: TrainSettings,
    rows: Sequence[TokenizedRow],
    *,
    tokenizer: Tokenizer,
    pool: RewardPool,
    record: Record,
    saved: Saved | None,
    held_out_tokens: int = 0,
    tell: Callable[[str], None],
) -> TrainingParts:
    """Everything a training run needs; `held_out_tokens` has the longest held-out prompt.

    The engine must be closed in the end.
    """
    prompts = _prompts(settings, rows, saved)
    model = trained_model(settings, saved=saved)
    policy = _trainer(settings, model, num_rows=len(rows))
    if saved is not None:
        read_trainer(policy, saved.folder, saved.state["trainer"])
    trainer = LocalTrainer(policy, model=model)
    # As it stood: weights newer than the engine's version are handed over, and that is logged.
    version = 0 if saved is None else saved.state["engine_version"]
    world = RolloutWorld(
        model=model,
        tokenizer=tokenizer,
        prompts=[row.tokens for row in rows[:_TRIED_PROMPTS]],
        longest_prompt=max(held_out_tokens, *(len(row.tokens) for row in rows)),
        version=trainer.version if settings.rollout.is_outside else version,
    )
    engine = rollout_engine(settings, world, weights=trainer.weights, tell=tell)
    state = None if saved is None else JournalState.from_json(saved.state["journal"])
    clock = WallClock(start=0.0 if state is None else state.seconds)
    buffer = (
        Buffer(unit_size=settings.schedule.unit_size)
        if saved is None
        else Buffer.from_state(load_buffer(saved.folder / "buffer.bin"))
    )

    def text(trajectory: Trajectory) -> str:
        return tokenizer.decode(trajectory.tokens, skip_special_tokens=True)

    loop = Loop(
        prompts=prompts,
        buffer=buffer,
        controller=Controller(settings.schedule),
        engine=engine,
        scorer=PoolScorer(pool, text=text, seconds=clock.seconds),
        trainer=trainer,
        journal=Journal(record, clock=clock, state=state),
        seed=settings.seed,
        queue=settings.rollout.queue,
    )
    return TrainingParts(
        loop=loop,
        engine=engine,
        trainer=trainer,
        prompts=prompts,
        text=text,
        clock=clock,
    )


def _prompts(
    settings: TrainSettings, rows: Sequence[TokenizedRow], saved: Saved | None
) -> PromptStream:
    position = 0 if saved is None else saved.state["position"]
    prompts = PromptStream(rows, epochs=settings.epochs, seed=settings.seed, position=position)
    if saved is not None and prompts.fingerprint != saved.state["fingerprint"]:
        raise CheckpointError(
            f"{saved.folder}: the run was begun on other rows than the {len(rows)} of "
            f"{settings.task}; resume it on the same data, or begin a new run (another --out)"
        )
    return prompts


def _trainer(settings: TrainSettings, model: PreTrainedModel, *, num_rows: int) -> PolicyTrainer:
    algorithm, optimisation = settings.algorithm, settings.optimiser
    updates = settings.updates_expected(num_rows=num_rows)
    total_steps = updates * optimisation.steps * optimisation.epochs
    is_compiled = settings.passes.compiled
    policy = PackedModel(
        model,
        temperature=settings.rollout.temperature,
        is_compiled=model.device.type == "cuda" if is_compiled is None else is_compiled,
    )
    reference: AdapterReference | CopiedReference | None = None
    if algorithm.kl > 0 and settings.lora.rank is not None:
        reference = AdapterReference(policy)
    elif algorithm.kl > 0:
        reference = CopiedReference(_as_begun(settings), temperature=policy.temperature)
    critic = None
    if algorithm.has_critic:
        values = Critic(_as_begun(settings))
        critic = CriticTrainer(
            values,
            Optimiser(values.learned(), optimisation, total_steps=total_steps),
            settings=optimisation,
            budget=settings.passes.tokens,
        )
    optimiser = Optimiser(trained_parameters(model), optimisation, total_steps=total_steps)
    return PolicyTrainer(
        policy,
        optimiser,
        settings=settings,
        reference=reference,
        critic=critic,
        tensors=partial(plain_tensors, model) if settings.rollout.is_outside else None,
    )


def _as_begun(settings: TrainSettings) -> PreTrainedModel:
    """The model that the run began with, once more."""
    return load_model(settings.model, dtype=_PRECISIONS[settings.precision], device=settings.device)
