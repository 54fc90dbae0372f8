"""Builds a run on a cluster: the engine over rollout workers, and the trainer over ranks.

Factories travel to the processes of workers and ranks and are called there, so that weights are
read where they are needed and never pass through the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sortedrl.cluster.connection import connected
from sortedrl.cluster.placement import BundlePlacement, blueprint
from sortedrl.cluster.remote_trainer import RankSource, RemoteTrainer
from sortedrl.cluster.weight_sync import SyncReport
from sortedrl.cluster.weight_transport import LocalSource
from sortedrl.cluster.worker_pool import WorkerPool
from sortedrl.config.cluster import Cluster
from sortedrl.config.train import Lora, TrainSettings
from sortedrl.engines.generation import RolloutEngine
from sortedrl.models.loading import load_tokenizer
from sortedrl.runs.build_engine import RolloutWorld, rollout_engine
from sortedrl.runs.build_training import PRECISIONS, first_model, total_steps, trained_model
from sortedrl.training.fsdp.checkpoint import is_sharded, read_full, read_sharded
from sortedrl.training.fsdp.ranks import Ranks
from sortedrl.training.fsdp.trainer import ShardedTrainer, sharded_trainer

Tell = Callable[[str], None]
_LOGS = "logs"
_WEIGHT_SYNC = "weight_sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineFactory:
    """The engine of one rollout worker, as the settings of the run want it."""

    settings: TrainSettings
    """With the slots of this worker alone, and no cluster."""
    longest_prompt: int
    prompts: tuple[tuple[int, ...], ...]
    """Some prompts on which an engine from outside is tried out."""

    def engine(self) -> RolloutEngine:
        """A new engine; its model is read here."""
        settings = self.settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        world = RolloutWorld(
            model=first_model(settings),
            tokenizer=load_tokenizer(settings.model),
            prompts=self.prompts,
            longest_prompt=self.longest_prompt,
            version=0,
        )
        # No weight sync before the first update: all begin with the same model.
        return rollout_engine(settings, world, weights=_no_weights, tell=print)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTrainerFactory:
    """The trainer of one rank."""

    settings: TrainSettings
    num_rows: int
    saved: tuple[Path, Mapping[str, Any]] | None
    """The checkpoint to go on from, and the trainer's counters in it."""

    def trainer(self, ranks: Ranks) -> ShardedTrainer:
        """A new trainer, as the run begins it or as its checkpoint has it."""
        settings = self.settings
        folder, counters = self.saved or (None, {})
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        # Whole models are read into main memory; a GPU only ever has its part.
        on_gpu = ranks.device.type == "cuda"
        dtype = PRECISIONS[settings.precision] or (torch.bfloat16 if on_gpu else torch.float32)
        is_spread = folder is not None and is_sharded(folder)
        source = None if folder is None or is_spread else folder / "model"
        algorithm = settings.algorithm
        trainer = sharded_trainer(
            trained_model(settings, source=source, dtype=dtype, device="cpu"),
            ranks,
            settings=settings.update,
            temperature=settings.rollout.temperature,
            first=first_model(settings, dtype=dtype, device="cpu")
            if algorithm.kl_coef > 0
            else None,
            critic=first_model(settings, dtype=dtype, device="cpu")
            if algorithm.has_critic
            else None,
            total_steps=total_steps(settings, num_rows=self.num_rows),
            # Layers that are spread have not been tried compiled on GPUs, so only if asked for.
            is_compiled=settings.passes.compiled is True,
        )
        if folder is not None:
            read = read_sharded if is_spread else read_full
            read(trainer, folder, counters=counters)
        return trainer


@dataclass(slots=True, kw_only=True)
class SyncMetrics:
    """The newest weight sync as numbers, for the row of every update."""

    last: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, done: SyncReport) -> None:
        """Keep the newest."""
        self.last = {
            "hand_over/seconds": done.seconds,
            "hand_over/bytes": float(done.bytes),
            "hand_over/buckets": float(done.buckets),
            "hand_over/workers": float(done.workers),
            "hand_over/put_seconds": done.put_seconds,
            "hand_over/fetch_seconds": done.fetch_seconds,
            "hand_over/load_seconds": done.load_seconds,
        }


class RunningCluster:
    """A Ray with the bundles of a run, in which its engine and its trainer are started."""

    def __init__(self, settings: TrainSettings, placement: BundlePlacement, *, tell: Tell) -> None:
        """Nothing is started yet."""
        self._sync_metrics = SyncMetrics()
        self._settings = _from_anywhere(settings)
        self._placement = placement
        self._tell = tell
        self._trainer: RemoteTrainer | None = None

    @property
    def _cluster(self) -> Cluster:
        return self._settings.cluster

    def numbers(self) -> Mapping[str, float]:
        """Those of the last weight sync."""
        return self._sync_metrics.last

    def trainer(
        self, *, num_rows: int, saved: tuple[Path, Mapping[str, Any]] | None
    ) -> RemoteTrainer:
        """The trainer over its ranks."""
        self._tell(f"starting the trainer, ranks: {self._cluster.trainer_ranks}")
        self._trainer = RemoteTrainer(
            self._cluster,
            ShardedTrainerFactory(
                settings=self._settings,
                num_rows=num_rows,
                saved=None if saved is None else (saved[0].absolute(), saved[1]),
            ),
            placement=self._placement,
            folder=self._settings.out / _LOGS,
        )
        return self._trainer

    def engine(self, *, longest_prompt: int, prompts: Sequence[Sequence[int]]) -> WorkerPool:
        """The engine over the rollout workers."""
        settings, cluster = self._settings, self._cluster
        self._tell(f"starting the engines, rollout workers: {cluster.num_workers}")
        share = replace(settings.engine, slots=settings.engine.slots // cluster.num_workers)
        factory = RolloutEngineFactory(
            settings=replace(settings, engine=share, lora=Lora(), cluster=Cluster()),
            longest_prompt=longest_prompt,
            prompts=tuple(tuple(prompt) for prompt in prompts),
        )
        engine = WorkerPool(
            cluster,
            factory,
            placement=self._placement,
            source=LocalSource() if self._trainer is None else RankSource(self._trainer),
            tell=self._tell,
            report=self._sync_metrics,
            log_folder=settings.out / _LOGS,
            weight_sync_folder=settings.out / _WEIGHT_SYNC,
            spare=settings.rollout.queue,
        )
        if cluster.kind == "colocated" and self._trainer is not None:
            self._trainer.share_memory_with(engine.release)
        return engine


@contextmanager
def opened_cluster(settings: TrainSettings, *, tell: Tell) -> Iterator[RunningCluster]:
    """Ray with all bundles of the run; given back afterwards."""
    cluster = settings.cluster
    with ExitStack() as stack:
        stack.enter_context(connected(cluster, tell=tell))
        placement = BundlePlacement(blueprint(cluster), seconds=cluster.start_seconds)
        stack.callback(placement.remove)
        yield RunningCluster(settings, placement, tell=tell)


def _from_anywhere(settings: TrainSettings) -> TrainSettings:
    """The settings with paths that mean the same in a process that was started elsewhere."""
    model = Path(settings.model)
    named = str(model.absolute()) if model.exists() else settings.model
    return replace(settings, model=named, out=settings.out.absolute())


def _no_weights() -> Any:  # noqa: ANN401  never called
    raise AssertionError("a worker's engine begins with the weights of its model")
