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
from sortedrl.cluster.fleet import ElasticEngine, Fleet
from sortedrl.cluster.placement import Placement, blueprint
from sortedrl.cluster.remote_trainer import RemoteTrainer
from sortedrl.cluster.weight_sync import HandOver
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
_HAND_OVERS = "hand_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecipe:
    """The engine of one rollout worker, as the settings of the run want it."""

    settings: TrainSettings
    """With the slots of this worker alone, and no cluster."""
    longest_prompt: int
    prompts: tuple[tuple[int, ...], ...]
    """Some prompts on which an engine from outside is tried out."""

    @property
    def has_weights(self) -> bool:
        """It has."""
        return True

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
        # Nothing to hand over before the first update: all begin with the same model.
        return rollout_engine(settings, world, weights=_no_weights, tell=print)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecipe:
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
class HandOverLog:
    """The hand-overs of a run as numbers; the newest is asked for with every update."""

    last: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, done: HandOver) -> None:
        """Remember one."""
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

    def __init__(self, settings: TrainSettings, placement: Placement, *, tell: Tell) -> None:
        """Nothing is started yet."""
        self.hand_overs = HandOverLog()
        self._settings = _from_anywhere(settings)
        self._placement = placement
        self._tell = tell
        self._trainer: RemoteTrainer | None = None

    @property
    def _cluster(self) -> Cluster:
        return self._settings.cluster

    def numbers(self) -> Mapping[str, float]:
        """Those of the last hand-over."""
        return self.hand_overs.last

    def trainer(
        self, *, num_rows: int, saved: tuple[Path, Mapping[str, Any]] | None
    ) -> RemoteTrainer:
        """The trainer over its ranks."""
        self._tell(f"starting the trainer, ranks: {self._cluster.trainer_ranks}")
        self._trainer = RemoteTrainer(
            self._cluster,
            TrainerRecipe(
                settings=self._settings,
                num_rows=num_rows,
                saved=None if saved is None else (saved[0].absolute(), saved[1]),
            ),
            placement=self._placement,
            folder=self._settings.out / _LOGS,
        )
        return self._trainer

    def engine(self, *, longest_prompt: int, prompts: Sequence[Sequence[int]]) -> ElasticEngine:
        """The engine over the rollout workers."""
        settings, cluster = self._settings, self._cluster
        self._tell(f"starting the engines, rollout workers: {cluster.num_workers}")
        share = replace(settings.engine, slots=settings.engine.slots // cluster.num_workers)
        recipe = WorkerRecipe(
            settings=replace(settings, engine=share, lora=Lora(), cluster=Cluster()),
            longest_prompt=longest_prompt,
            prompts=tuple(tuple(prompt) for prompt in prompts),
        )
        fleet = Fleet(
            cluster,
            recipe,
            placement=self._placement,
            warn=self._tell,
            report=self.hand_overs,
            folder=settings.out / _LOGS,
            hand_over_folder=settings.out / _HAND_OVERS,
            spare=settings.rollout.queue,
        )
        engine = ElasticEngine(fleet, cluster, tell=self._tell)
        if cluster.kind == "colocated" and self._trainer is not None:
            self._trainer.take_turns(engine.release)
        return engine


@contextmanager
def opened_cluster(settings: TrainSettings, *, tell: Tell) -> Iterator[RunningCluster]:
    """Ray with all bundles of the run; given back afterwards."""
    cluster = settings.cluster
    with ExitStack() as stack:
        stack.enter_context(connected(cluster, tell=tell))
        placement = Placement(blueprint(cluster), seconds=cluster.start_seconds)
        stack.callback(placement.remove)
        yield RunningCluster(settings, placement, tell=tell)


def _from_anywhere(settings: TrainSettings) -> TrainSettings:
    """The settings with paths that mean the same in a process that was started elsewhere."""
    model = Path(settings.model)
    named = str(model.absolute()) if model.exists() else settings.model
    return replace(settings, model=named, out=settings.out.absolute())


def _no_weights() -> Any:  # noqa: ANN401  never called
    raise AssertionError("a worker's engine begins with the weights of its model")
