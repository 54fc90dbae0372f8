"""Builds a run on a cluster: the engine over rollout workers, and the trainer over ranks.

Factories are sent to the processes of workers and ranks and called there, so that weights are read
where they are needed and never pass through the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.cluster.connection import connected
from sortedrl.cluster.placement import (
    BundlePlacement,
    controller_node,
    device_of_gpu,
    placement_plan,
    reserved_gpu,
)
from sortedrl.cluster.remote_trainer import RankSource, RemoteTrainer
from sortedrl.cluster.weight_sync import SyncReport
from sortedrl.cluster.weight_transport import LocalSource
from sortedrl.cluster.worker_pool import WorkerPool
from sortedrl.config.cluster import Cluster
from sortedrl.config.train import TrainSettings, UpdateSettings
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.streaming.weight_files import refuse_other_scores, trial_row
from sortedrl.models.loading import (
    load_tokenizer,
    model_without_weights,
    stop_tokens_of,
    weights_of,
)
from sortedrl.models.shape import shape_of
from sortedrl.runs.build_engine import (
    PRECISIONS,
    EngineBuilder,
    GenerationSettings,
)
from sortedrl.runs.build_training import (
    ModelSettings,
    first_model,
    prepared_critic,
    prepared_for_training,
    total_steps,
)
from sortedrl.runs.plan.dry_run import run_memory
from sortedrl.runs.plan.memory import MemoryPlan
from sortedrl.training.fsdp.checkpoint import is_sharded, read_full, read_sharded
from sortedrl.training.fsdp.ranks import Ranks
from sortedrl.training.fsdp.trainer import ShardedTrainer, sharded_trainer
from sortedrl.training.lora import MergedWeights
from sortedrl.training.trainer import RunTrainer

Tell = Callable[[str], None]
_LOGS = "logs"
_WEIGHT_SYNC = "weight_sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineFactory:
    """Makes the engine of one rollout worker."""

    model: ModelSettings
    generation: GenerationSettings
    """With the slots of this worker alone."""
    plan: MemoryPlan
    """Of the whole run."""

    def engine(self) -> RolloutEngine:
        """A new engine; its model is read here, once: vLLM and SGLang read it themselves."""
        _set_threads(self.model.threads)
        model = None if self.generation.rollout.is_outside else first_model(self.model)
        device = torch.device("cuda" if self.plan.demand.is_gpu else "cpu")
        builder = EngineBuilder(
            settings=self.generation,
            plan=self.plan,
            device=device if model is None else model.device,
            model=model,
            stop_tokens=stop_tokens_of(self.model.model),
            tokenizer=load_tokenizer(self.model.model),
            prompts=(),
            version=0,
        )
        # No weight sync before the first update: all begin with the same model.
        return builder.engine(weights=_no_weights, tell=print)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTrainerFactory:
    """Makes the trainer of one rank."""

    model: ModelSettings
    update: UpdateSettings
    temperature: float
    total_steps: int
    is_compiled: bool
    saved: tuple[Path, Mapping[str, Any]] | None
    """The checkpoint to resume from, and the trainer's counters in it."""

    def trainer(self, ranks: Ranks) -> ShardedTrainer:
        """A new trainer, as the run begins it or as its checkpoint has it."""
        folder, counters = self.saved or (None, {})
        _set_threads(self.model.threads)
        dtype = _dtype(self.model, is_gpu=ranks.device.type == "cuda")
        is_spread = folder is not None and is_sharded(folder)
        has_adapters = self.model.lora.rank is not None
        is_own = folder is None or is_spread or has_adapters
        algorithm = self.update.algorithm

        def empty(source: str | Path) -> PreTrainedModel:
            return model_without_weights(source, dtype=dtype)

        # Only a part of each model is ever in the memory of a rank.
        source = self.model.model if is_own or folder is None else folder / "model"
        trainer = sharded_trainer(
            prepared_for_training(empty(source), self.model),
            ranks,
            settings=self.update,
            temperature=self.temperature,
            first=empty(self.model.model) if algorithm.kl_coef > 0 and not has_adapters else None,
            critic=prepared_critic(empty(self.model.model), self.model)
            if algorithm.has_critic
            else None,
            source=source,
            first_source=self.model.model,
            total_steps=self.total_steps,
            is_compiled=self.is_compiled,
        )
        if folder is not None:
            read = read_sharded if is_spread else read_full
            read(trainer, folder, counters=counters)
        return trainer


@dataclass(slots=True, kw_only=True)
class AdapterMerge:
    """Merges the adapters that ranks send into the weights that a worker began with."""

    model: ModelSettings
    is_gpu: bool
    _base: Mapping[str, Tensor] | None = None

    def __call__(self, adapters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of the engine by name, each merged when it is read."""
        if self._base is None:
            self._base = weights_of(self.model.model, dtype=_dtype(self.model, is_gpu=self.is_gpu))
        lora = self.model.lora
        assert lora.rank is not None, "adapters have a rank"
        return MergedWeights(self._base, adapters, scale=lora.alpha / lora.rank)


class RunningCluster:
    """A Ray with the bundles of a run, in which its engine and its trainer are started."""

    def __init__(
        self,
        settings: TrainSettings,
        placement: BundlePlacement,
        *,
        gpu: str | None = None,
        tell: Tell,
    ) -> None:
        """Nothing is started yet; `gpu` is that of a trainer in the controller's process."""
        self.trainer_device = settings.device
        if gpu is not None and settings.device is None:
            self.trainer_device = device_of_gpu(gpu)
        self._last_sync: SyncReport | None = None
        self._settings = _with_absolute_paths(settings)
        self._placement = placement
        self._tell = tell
        self._trainer: RemoteTrainer | None = None

    @property
    def _cluster(self) -> Cluster:
        return self._settings.cluster

    def numbers(self) -> Mapping[str, float]:
        """The metrics of the last weight sync."""
        return {} if self._last_sync is None else self._last_sync.metrics

    def trainer(
        self, *, num_rows: int, saved: tuple[Path, Mapping[str, Any]] | None
    ) -> RemoteTrainer:
        """The trainer over its ranks."""
        settings = self._settings
        self._tell(f"starting the trainer, ranks: {self._cluster.trainer_ranks}")
        self._trainer = RemoteTrainer(
            self._cluster,
            ShardedTrainerFactory(
                model=ModelSettings.of(settings),
                update=settings.update,
                temperature=settings.rollout.temperature,
                total_steps=total_steps(settings, num_rows=num_rows),
                # Compiled sharded layers are untested on GPUs: only if set.
                is_compiled=settings.passes.compiled is True,
                saved=None if saved is None else (saved[0].absolute(), saved[1]),
            ),
            placement=self._placement,
            folder=self._settings.out / _LOGS,
        )
        return self._trainer

    def engine(
        self, trainer: RunTrainer, *, longest_prompt: int, trial_prompts: Sequence[Sequence[int]]
    ) -> WorkerPool:
        """The engine over the rollout workers, with the weights of the trainer.

        Workers whose vLLM or SGLang computes other log-probabilities of some prompts than the
        trainer are refused.
        """
        rows = [trial_row(prompt, number) for number, prompt in enumerate(trial_prompts)]
        # Before the engines take the free memory of the GPUs that they share with ranks.
        expected = trainer.logprobs(rows) if self._settings.rollout.is_outside else None
        engine = self._started(longest_prompt=longest_prompt)
        with ExitStack() as opened:
            opened.callback(engine.close)
            if engine.version != trainer.version:
                engine.load_weights(trainer.weights())
            if expected is not None:
                refuse_other_scores(engine, rows, expected)
            opened.pop_all()
        return engine

    def _keep_report(self, report: SyncReport) -> None:
        self._last_sync = report

    def _started(self, *, longest_prompt: int) -> WorkerPool:
        settings, cluster = self._settings, self._cluster
        self._tell(f"starting the engines, rollout workers: {cluster.num_workers}")
        share = replace(settings.engine, slots=settings.engine.slots // cluster.num_workers)
        factory = RolloutEngineFactory(
            # A worker sees its own GPUs only.
            model=replace(
                ModelSettings.of(settings), device="cpu" if settings.device == "cpu" else None
            ),
            # A worker begins with the model itself, also where adapters are trained.
            generation=replace(GenerationSettings.of(settings), engine=share, has_adapters=False),
            plan=run_memory(
                settings,
                shape_of(settings.model),
                is_gpu=cluster.gpus_per_worker > 0,
                prompt_tokens=longest_prompt,
            ),
        )
        engine = WorkerPool(
            cluster,
            factory,
            placement=self._placement,
            source=LocalSource() if self._trainer is None else RankSource(self._trainer),
            tell=self._tell,
            report=self._keep_report,
            log_folder=settings.out / _LOGS,
            weight_sync_folder=settings.out / _WEIGHT_SYNC,
            spare=settings.rollout.queue,
            gpus_of_bundle={} if self._trainer is None else self._trainer.gpus_of_bundle,
            # A trainer in this process has merged them already.
            merge=None
            if self._trainer is None or settings.lora.rank is None
            else AdapterMerge(model=ModelSettings.of(settings), is_gpu=cluster.gpus_per_worker > 0),
        )
        if cluster.kind == "colocated" and self._trainer is not None:
            self._trainer.sleep_engine_with(engine.sleep)
        return engine


@contextmanager
def opened_cluster(settings: TrainSettings, *, tell: Tell) -> Iterator[RunningCluster]:
    """Ray with all bundles of the run, which are released afterwards."""
    cluster = settings.cluster
    with ExitStack() as stack:
        stack.enter_context(connected(cluster, tell=tell))
        wanted = placement_plan(cluster, controller=controller_node())
        placement = BundlePlacement(wanted, seconds=cluster.start_seconds)
        stack.callback(placement.remove)
        gpu = stack.enter_context(reserved_gpu(placement))
        yield RunningCluster(settings, placement, gpu=gpu, tell=tell)


def _dtype(model: ModelSettings, *, is_gpu: bool) -> torch.dtype:
    return PRECISIONS[model.precision] or (torch.bfloat16 if is_gpu else torch.float32)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def _with_absolute_paths(settings: TrainSettings) -> TrainSettings:
    """The settings with absolute paths, for processes with another working directory."""
    model = Path(settings.model)
    named = str(model.absolute()) if model.exists() else settings.model
    return replace(settings, model=named, out=settings.out.absolute())


def _no_weights() -> Any:  # noqa: ANN401  never called
    raise AssertionError("a worker's engine begins with the weights of its model")
