"""Builds a training run, new or from a checkpoint: models, trainer, engine, loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from sortedrl.config.train import Lora, PrecisionChoice, SupervisedSettings, TrainSettings
from sortedrl.core.buffer import Buffer
from sortedrl.core.buffer_file import load_buffer
from sortedrl.core.clock import WallClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Record
from sortedrl.core.loop import Loop
from sortedrl.core.protocols import Scorer
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.data.stream import PromptStream, TokenizedRow, Tokenizer
from sortedrl.engines.generation import RolloutEngine
from sortedrl.environments.pool import EnvironmentPool, EnvironmentScorer
from sortedrl.errors import CheckpointError
from sortedrl.models.loading import load_model, stop_tokens
from sortedrl.models.shape import shape_of, shape_of_config
from sortedrl.rewards.pool.pool import PoolScorer, RewardPool
from sortedrl.runs.build_engine import (
    PRECISIONS,
    EngineBuilder,
    GenerationSettings,
    device_memory,
)
from sortedrl.runs.plan.dry_run import run_memory
from sortedrl.runs.plan.page import refuse_too_big
from sortedrl.training.attention import checkpoint_layers
from sortedrl.training.critic import Critic, CriticTrainer
from sortedrl.training.forward import AdapterReference, CopiedReference, PackedModel
from sortedrl.training.fsdp.checkpoint import is_sharded, read_joined
from sortedrl.training.lora import (
    add_adapters,
    load_adapters,
    plain_tensors,
    trained_parameters,
)
from sortedrl.training.optimiser import Optimiser
from sortedrl.training.overlap import OverlappedTrainer
from sortedrl.training.trainer import PolicyTrainer, RunTrainer
from sortedrl.types import Trajectory

if TYPE_CHECKING:
    from sortedrl.runs.build_cluster import RunningCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings for loading the model of a run; workers and ranks are sent these."""

    model: str
    precision: PrecisionChoice
    device: str | None
    threads: int | None
    seed: int
    """Of new adapters."""
    lora: Lora
    gradient_checkpointing: bool

    @classmethod
    def of(cls, settings: TrainSettings | SupervisedSettings) -> ModelSettings:
        """Those of a run."""
        return cls(
            model=settings.model,
            precision=settings.precision,
            device=settings.device,
            threads=settings.threads,
            seed=settings.seed,
            lora=settings.lora,
            gradient_checkpointing=settings.passes.gradient_checkpointing,
        )


def trained_model(settings: ModelSettings, *, source: str | Path | None = None) -> PreTrainedModel:
    """The model that is trained, with new adapters if it has any; `source` may be another one."""
    return prepared_for_training(_loaded(settings, source or settings.model), settings)


def first_model(settings: ModelSettings) -> PreTrainedModel:
    """Another copy of the model that the run started from."""
    return _loaded(settings, settings.model)


def prepared_for_training(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    """The model with new adapters and gradient checkpointing, if the settings have them."""
    if settings.lora.rank is not None:
        add_adapters(model, settings.lora, seed=settings.seed)
    return prepared_critic(model, settings)


def prepared_critic(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    """The initial model of the critic, which is trained like the policy, without adapters."""
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
        model.train()
    return model


def _loaded(settings: ModelSettings, source: str | Path) -> PreTrainedModel:
    return load_model(source, dtype=PRECISIONS[settings.precision], device=settings.device)


def total_steps(settings: TrainSettings, *, num_rows: int) -> int:
    """Steps of the optimiser in the whole run, for the schedule of the learning rate."""
    updates = settings.updates_expected(num_rows=num_rows)
    return updates * settings.optimiser.mini_batches * settings.optimiser.epochs


_TRIAL_PROMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The parts of a training run."""

    loop: Loop
    engine: RolloutEngine
    trainer: RunTrainer
    prompts: PromptStream
    text: Callable[[Trajectory], str]
    """Decodes an answer to text."""
    clock: WallClock
    numbers: Callable[[], Mapping[str, float]]
    """More metrics for the row of every update: those of the weight syncs of a cluster."""

    def close(self) -> None:
        """Close engine and trainer."""
        try:
            self.engine.close()
        finally:
            self.trainer.close()


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to resume from."""

    folder: Path
    state: Mapping[str, Any]


def training_parts(
    settings: TrainSettings,
    rows: Sequence[TokenizedRow],
    *,
    tokenizer: Tokenizer,
    pool: RewardPool | None,
    environments: EnvironmentPool | None = None,
    record: Record,
    saved: Saved | None,
    cluster: RunningCluster | None = None,
    held_out_tokens: int = 0,
    tell: Callable[[str], None],
) -> TrainingParts:
    """The parts of a training run; `held_out_tokens` is the length of the longest held-out prompt.

    Rewards come from the pool, or from the environments without one.
    The parts must be closed in the end.
    """
    prompts = _prompts(settings, rows, saved)
    longest = max(held_out_tokens, *(len(row.tokens) for row in rows))
    trial_prompts = [row.tokens for row in rows[:_TRIAL_PROMPTS]]
    _refuse_long_answers(settings, prompt_tokens=longest)
    # What fails below must leave no process and no memory behind.
    with ExitStack() as opened:
        trainer = _trainer(settings, num_rows=len(rows), saved=saved, cluster=cluster)
        opened.callback(trainer.close)
        if cluster is not None:
            engine: RolloutEngine = cluster.engine(
                trainer, longest_prompt=longest, trial_prompts=trial_prompts
            )
            opened.callback(engine.close)
        else:
            assert isinstance(trainer, PolicyTrainer)
            # As saved: weights newer than the engine's version are synced, and that is logged.
            version = 0 if saved is None else saved.state["engine_version"]
            shape = shape_of_config(trainer.model.config, name=settings.model)
            builder = EngineBuilder(
                settings=GenerationSettings.of(settings),
                plan=run_memory(
                    settings,
                    shape,
                    is_gpu=trainer.model.device.type == "cuda",
                    prompt_tokens=longest,
                ),
                device=trainer.model.device,
                model=trainer.model,
                stop_tokens=stop_tokens(trainer.model),
                tokenizer=tokenizer,
                prompts=trial_prompts,
                version=trainer.version if settings.rollout.is_outside else version,
            )
            engine = builder.engine(weights=trainer.weights, tell=tell)
            opened.callback(engine.close)
        parts = _assembled(
            settings,
            prompts,
            engine=engine,
            trainer=trainer,
            tokenizer=tokenizer,
            pool=pool,
            environments=environments,
            record=record,
            saved=saved,
            numbers=dict if cluster is None else cluster.numbers,
        )
        opened.pop_all()
    return parts


def _refuse_long_answers(settings: TrainSettings, *, prompt_tokens: int) -> None:
    """Refuse answers longer than a pass where a pass that holds one of them does not fit.

    The GPUs of a cluster are assumed to be like that of this process, and unknown without one.
    """
    if prompt_tokens + settings.engine.max_tokens <= settings.passes.micro_batch_tokens:
        return
    cluster, device = settings.cluster, torch.device(settings.device or "cuda")
    is_gpu = cluster.gpus_per_worker > 0 if cluster.is_used else device.type == "cuda"
    if is_gpu and not torch.cuda.is_available():
        if cluster.is_used:
            return
        is_gpu = False
    plan = run_memory(
        settings, shape_of(settings.model), is_gpu=is_gpu, prompt_tokens=prompt_tokens
    )
    total, _ = device_memory(device if is_gpu else torch.device("cpu"))
    if plan.demand.sequence_tokens > settings.passes.micro_batch_tokens:
        refuse_too_big(plan, total, settings=settings)


def _assembled(
    settings: TrainSettings,
    prompts: PromptStream,
    *,
    engine: RolloutEngine,
    trainer: RunTrainer,
    tokenizer: Tokenizer,
    pool: RewardPool | None,
    environments: EnvironmentPool | None,
    record: Record,
    saved: Saved | None,
    numbers: Callable[[], Mapping[str, float]],
) -> TrainingParts:
    """The loop of a run over engine and trainer, in the state of its checkpoint."""
    state = None if saved is None else JournalState.from_json(saved.state["journal"])
    clock = WallClock(start=0.0 if state is None else state.seconds)
    overlap = None
    if settings.is_overlapped:
        trainer = overlap = OverlappedTrainer(trainer, seconds=clock.seconds)
    buffer = (
        Buffer(unit_size=settings.schedule.unit_size)
        if saved is None
        else Buffer.from_state(load_buffer(saved.folder / "buffer.bin"))
    )

    def text(trajectory: Trajectory) -> str:
        return tokenizer.decode(trajectory.response, skip_special_tokens=True)

    loop = Loop(
        prompts=prompts,
        buffer=buffer,
        controller=Controller(settings.schedule),
        engine=engine,
        scorer=_scorer(pool, environments, text=text, seconds=clock.seconds),
        environments=environments,
        trainer=trainer,
        journal=Journal(record, clock=clock, state=state),
        seed=settings.seed,
        queue=settings.rollout.queue,
        overlap=overlap,
    )
    return TrainingParts(
        loop=loop,
        engine=engine,
        trainer=trainer,
        prompts=prompts,
        text=text,
        clock=clock,
        numbers=numbers,
    )


def _scorer(
    pool: RewardPool | None,
    environments: EnvironmentPool | None,
    *,
    text: Callable[[Trajectory], str],
    seconds: Callable[[], float],
) -> Scorer:
    scorer = None if pool is None else PoolScorer(pool, text=text, seconds=seconds)
    if environments is not None:
        return EnvironmentScorer(environments, scorer)
    assert scorer is not None, "answers are scored by a function or by an environment"
    return scorer


def _prompts(
    settings: TrainSettings, rows: Sequence[TokenizedRow], saved: Saved | None
) -> PromptStream:
    position = 0 if saved is None else saved.state["position"]
    prompts = PromptStream(rows, epochs=settings.epochs, seed=settings.seed, position=position)
    if saved is not None and prompts.fingerprint != saved.state["fingerprint"]:
        raise CheckpointError(
            f"{saved.folder}: the run was started on different rows than the {len(rows)} of "
            f"{settings.task}; resume it with the same data, or start a new run (another --out)"
        )
    return prompts


def _trainer(
    settings: TrainSettings,
    *,
    num_rows: int,
    saved: Saved | None,
    cluster: RunningCluster | None,
) -> RunTrainer:
    if cluster is not None and settings.cluster.trainer_ranks:
        return cluster.trainer(
            num_rows=num_rows,
            saved=None if saved is None else (saved.folder, saved.state["trainer"]),
        )
    if cluster is not None:
        settings = replace(settings, device=cluster.trainer_device)
    is_spread = saved is not None and is_sharded(saved.folder)
    has_adapters = settings.lora.rank is not None
    source = None if saved is None or has_adapters or is_spread else saved.folder / "model"
    model = trained_model(ModelSettings.of(settings), source=source)
    if saved is not None and has_adapters and not is_spread:
        load_adapters(model, saved.folder)
    is_shared = cluster is None and not settings.rollout.is_outside
    policy = _policy_trainer(settings, model, num_rows=num_rows, is_shared=is_shared)
    if saved is not None and is_spread:
        read_joined(policy, saved.folder, counters=saved.state["trainer"])
    elif saved is not None:
        policy.load(saved.folder, saved.state["trainer"])
    return policy


def _policy_trainer(
    settings: TrainSettings, model: PreTrainedModel, *, num_rows: int, is_shared: bool
) -> PolicyTrainer:
    """`is_shared`: the engine generates with the same tensors that are trained."""
    algorithm, optimisation = settings.algorithm, settings.optimiser
    steps = total_steps(settings, num_rows=num_rows)
    policy = PackedModel(
        model,
        temperature=settings.rollout.temperature,
        is_compiled=settings.passes.compiles_on(model.device.type),
    )
    reference: AdapterReference | CopiedReference | None = None
    if algorithm.kl_coef > 0 and settings.lora.rank is not None:
        reference = AdapterReference(policy)
    elif algorithm.kl_coef > 0:
        first = first_model(ModelSettings.of(settings))
        reference = CopiedReference(first, temperature=policy.temperature)
    critic = None
    if algorithm.has_critic:
        copied = ModelSettings.of(settings)
        values = Critic(prepared_critic(first_model(copied), copied))
        critic = CriticTrainer(
            values,
            Optimiser(values.learned(), settings.update.critic_optimiser, total_steps=steps),
            settings=optimisation,
            micro_batch_tokens=settings.passes.micro_batch_tokens,
        )
    optimiser = Optimiser(
        trained_parameters(model), optimisation, total_steps=steps, computes_in=model.dtype
    )
    return PolicyTrainer(
        policy,
        optimiser,
        settings=settings.update,
        reference=reference,
        critic=critic,
        engine_weights=None if is_shared else partial(plain_tensors, model),
    )
