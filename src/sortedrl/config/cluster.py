"""The settings of a run over several processes and GPUs, which Ray places.

    separated   every rollout worker and every trainer rank has GPUs of its own
    colocated   workers and ranks share GPUs, one rank on each, and take turns

The trainer is sharded evenly over its ranks. Every worker has a copy of the weights on its GPUs,
and `engine.slots` are the slots of all workers together. `--dry-run` plans what `train` runs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from sortedrl.config.checks import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_values,
    require,
)

Kind = Literal["colocated", "separated"]
WeightTransport = Literal["broadcast", "objects", "disk"]
CheckpointKind = Literal["full", "sharded"]
_CALLS_PER_SECOND = 1000
_SHORTEST_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Rollout workers and trainer ranks on a Ray cluster."""

    address: str | None = None
    """Where Ray runs. By default one is started on this machine and ends with the run.
    auto: the one that runs on this machine, as `ray start` began it.
    host:port or ray://host:port: that one."""
    kind: Kind = "separated"
    """How rollout workers and trainer share the cluster.
    separated: each has CPUs and GPUs of its own.
    colocated: worker and rank share theirs, one pair in each place, and take turns."""
    rollout_workers: NonNegativeInt | None = None
    """Engines, each in a process of its own with a copy of the weights; they share engine.slots.
    By default, and with 0, there is no cluster, and everything is done in this process."""
    max_rollout_workers: int | None = None
    """Workers to grow to when the cluster gets room for them during the run; by default none."""
    cpus_per_worker: NonNegativeInt = 1
    """CPUs of a rollout worker."""
    gpus_per_worker: NonNegativeInt = 0
    """GPUs of a rollout worker; 0 writes on the CPU."""
    tensor_parallel: PositiveInt = 1
    """GPUs over which the engine of a worker is sharded (vLLM and SGLang); with more than 1,
    gpus_per_worker must be as many."""
    trainer_ranks: NonNegativeInt = 1
    """Processes over which the trainer is spread, with a CPU and, where workers have GPUs, a GPU
    each. 0: it stays in the process of the controller."""
    weight_sync: WeightTransport = "broadcast"
    """How new weights reach the rollout workers; if one transport fails, the next is used.
    broadcast: over a process group (NCCL, or gloo on the CPU), a bucket at a time.
    objects: through Ray's object store, which every machine reads once.
    disk: a file in the folder of the run, which every machine must see."""
    overlap: bool = False
    """Let the workers write on while the trainer updates: rollout and update take turns no more,
    and what is trained on is up to one version older. Needs mode partial and kind separated."""
    checkpoint: CheckpointKind = "full"
    """How ranks save. full: one file, gathered by the first rank, as a run without a cluster
    writes it. sharded: each rank writes its part, into a folder that all of them see."""
    restarts: NonNegativeInt = 3
    """How often the run resumes by itself from its last checkpoint if a trainer rank is lost."""
    worker_timeout_seconds: PositiveFloat = 300.0
    """A worker that does not answer for so long counts as lost, and others continue its answers."""
    start_seconds: PositiveFloat = 600.0
    """How long placing the workers may take, and how long one that starts may make no progress."""
    dashboard: bool = True
    """Whether a Ray of our own offers its dashboard, where that is installed: ray[default]."""
    object_store_gib: PositiveFloat | None = None
    """Shared memory of a Ray of our own, through which weights travel; they must fit. By default
    what Ray takes."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_values(self, "cluster.")
        require(
            self.cpus_per_worker + self.gpus_per_worker > 0,
            "a rollout worker must have a CPU or a GPU, got neither; raise cluster.cpus_per_worker",
        )
        require(
            self.address is None or self.object_store_gib is None,
            f"cluster.object_store_gib is for a Ray of our own, got it with address "
            f"{self.address!r}; leave it out",
        )
        limit = self.max_rollout_workers
        require(
            limit is None or limit >= self.num_workers,
            f"cluster.max_rollout_workers must be at least cluster.rollout_workers "
            f"({self.num_workers}), got {limit}",
        )
        self._check_used()
        self._check_gpus()
        self._check_colocated()
        require(
            not self.overlap or self.kind == "separated",
            "cluster.overlap needs cluster.kind separated, got colocated: what shares a GPU takes "
            "turns on it",
        )
        require(
            not self.overlap or self.trainer_ranks > 0,
            "cluster.overlap needs cluster.trainer_ranks of at least 1, got 0: a trainer in the "
            "process of the controller keeps it from the workers",
        )

    def _check_used(self) -> None:
        known = {field.name: field.default for field in fields(self)}
        given = [name for name, value in known.items() if getattr(self, name) != value]
        require(
            self.rollout_workers is not None or not given,
            f"cluster.{', cluster.'.join(given)} need a cluster; set cluster.rollout_workers to 1 "
            "or more (0 for a run without one), or leave them out",
        )

    def _check_gpus(self) -> None:
        require(
            self.tensor_parallel in (1, self.gpus_per_worker),
            "cluster.tensor_parallel shards the engine of a worker over all of its GPUs, got "
            f"tensor_parallel {self.tensor_parallel} and gpus_per_worker {self.gpus_per_worker}; "
            "make them equal",
        )

    def _check_colocated(self) -> None:
        if self.kind == "separated" or not self.is_used:
            return
        require(
            self.gpus_per_worker in (0, self.tensor_parallel),
            "cluster.kind colocated shares every GPU of a worker with a trainer rank, so "
            f"gpus_per_worker must be tensor_parallel ({self.tensor_parallel}), or 0 for CPUs, got "
            f"{self.gpus_per_worker}; make them equal, or set kind to separated",
        )
        ranks = self.num_workers * max(1, self.gpus_per_worker)
        require(
            self.trainer_ranks == ranks,
            "cluster.kind colocated puts one trainer rank on each GPU of the rollout workers, or "
            f"beside each worker on CPUs, so trainer_ranks must be {ranks}, got "
            f"{self.trainer_ranks} with {self.num_workers} rollout_workers; make them equal, or "
            "set kind to separated",
        )

    @property
    def max_workers(self) -> int:
        """Rollout workers that there may be at the same time."""
        return max(self.num_workers, self.max_rollout_workers or 0)

    @property
    def num_workers(self) -> int:
        """Rollout workers that the run begins with."""
        return self.rollout_workers or 0

    @property
    def num_engines(self) -> int:
        """Engines; a run without a cluster has one."""
        return max(1, self.num_workers)

    @property
    def num_ranks(self) -> int:
        """Processes that hold a share of the trainer; at least the controller's."""
        return max(1, self.trainer_ranks) if self.is_used else 1

    @property
    def engine_devices(self) -> int:
        """GPUs that decode; 1 for a single process, and for all CPUs of a machine."""
        return self.num_workers * self.tensor_parallel if self.gpus_per_worker else 1

    @property
    def trainer_devices(self) -> int:
        """GPUs that train; 1 for a single process, and for all CPUs of a machine."""
        return self.num_ranks if self.gpus_per_worker else 1

    @property
    def num_devices(self) -> int:
        """GPUs that the run uses; 1 for a single process, and for all CPUs of a machine."""
        if not self.gpus_per_worker:
            return 1
        if self.kind == "colocated":
            return self.trainer_devices
        return self.engine_devices + self.trainer_devices

    @property
    def is_used(self) -> bool:
        """Whether there is a cluster at all."""
        return self.num_workers > 0

    @property
    def gpus_per_rank(self) -> int:
        """GPUs of a rank of the trainer."""
        return 1 if self.gpus_per_worker else 0

    @property
    def poll_seconds(self) -> float:
        """How long a worker decodes before it reports, if no answer is complete before.

        All workers together call the controller a thousand times a second at most.
        """
        return max(_SHORTEST_POLL_SECONDS, self.num_workers / _CALLS_PER_SECOND)
