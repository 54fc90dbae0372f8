"""The settings of a run over several processes and GPUs, which Ray places.

    separated   every rollout worker and every trainer rank has GPUs of its own
    colocated   workers and ranks share GPUs, one rank per GPU; only one of the two is awake

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
    """Where Ray runs. By default one is started on this machine and stopped with the run.
    auto: the running Ray of this machine, as started by `ray start`.
    host:port or ray://host:port: a running Ray at that address."""
    kind: Kind = "separated"
    """How rollout workers and trainer share the cluster.
    separated: each has its own CPUs and GPUs.
    colocated: each worker shares its CPUs and GPUs with trainer ranks, one of them at a time."""
    rollout_workers: NonNegativeInt | None = None
    """Rollout workers: processes with an engine and a copy of the weights; they share engine.slots.
    By default, and with 0, there is no cluster, and the run is a single process."""
    max_rollout_workers: int | None = None
    """Maximum number of workers if the cluster grows during the run; by default it stays fixed."""
    cpus_per_worker: NonNegativeInt = 1
    """CPUs of a rollout worker."""
    gpus_per_worker: NonNegativeInt = 0
    """GPUs of a rollout worker; 0 generates on the CPU."""
    tensor_parallel: PositiveInt = 1
    """GPUs over which the engine of a worker is sharded (vLLM and SGLang); if above 1,
    gpus_per_worker must be equal."""
    trainer_ranks: NonNegativeInt = 1
    """Trainer processes, each with a CPU and, if workers have GPUs, a GPU. 0: the trainer runs in
    the controller's process."""
    weight_sync: WeightTransport = "broadcast"
    """How new weights reach the rollout workers; if one transport fails, the next is used.
    broadcast: over NCCL between GPUs; over gloo on the CPU, and where processes share a GPU.
    objects: through Ray's object store, which each machine reads once.
    disk: a file in the run folder, which must be shared by all machines."""
    overlap: bool = False
    """Let workers keep generating while the trainer updates; tokens trained on are then up to one
    version staler. Needs mode partial and kind separated."""
    checkpoint: CheckpointKind = "full"
    """How ranks save. full: one file, gathered by rank 0, in the format of a run without a cluster.
    sharded: each rank writes its shard to a folder shared by all ranks."""
    restarts: NonNegativeInt = 3
    """How often the run may restart from its last checkpoint after losing a trainer rank."""
    worker_timeout_seconds: PositiveFloat = 300.0
    """A worker that does not respond for this long is lost; other workers continue its answers."""
    start_seconds: PositiveFloat = 600.0
    """Timeout for placing the workers, and for a starting worker without progress."""
    dashboard: bool = True
    """Start Ray's dashboard with a Ray of the run's own, if installed: ray[default]."""
    object_store_gib: PositiveFloat | None = None
    """Shared memory of a Ray of the run's own, for weight sync; the weights must fit. By default
    Ray's own default."""

    def __post_init__(self) -> None:
        check_values(self, "cluster.")
        require(
            self.cpus_per_worker + self.gpus_per_worker > 0,
            "a rollout worker must have a CPU or a GPU, got neither; raise cluster.cpus_per_worker",
        )
        require(
            self.address is None or self.object_store_gib is None,
            f"cluster.object_store_gib is for a Ray that the run starts, got it with address "
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
            "cluster.overlap needs cluster.kind separated, got colocated: worker and rank cannot "
            "use a shared GPU at the same time",
        )
        require(
            not self.overlap or self.trainer_ranks > 0,
            "cluster.overlap needs cluster.trainer_ranks of at least 1, got 0: an update in the "
            "controller's process would block the workers",
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
        """Upper limit of rollout workers."""
        return max(self.num_workers, self.max_rollout_workers or 0)

    @property
    def num_workers(self) -> int:
        """Rollout workers at the start of the run."""
        return self.rollout_workers or 0

    @property
    def num_engines(self) -> int:
        """Engines; a run without a cluster has one."""
        return max(1, self.num_workers)

    @property
    def num_ranks(self) -> int:
        """Trainer processes; at least the controller's own."""
        return max(1, self.trainer_ranks) if self.is_used else 1

    @property
    def engine_devices(self) -> int:
        """GPUs that generate; 1 for a single process, and for all CPUs of a machine."""
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
        """Whether the run uses a cluster."""
        return self.num_workers > 0

    @property
    def gpus_per_rank(self) -> int:
        """GPUs of a rank of the trainer."""
        return 1 if self.gpus_per_worker else 0

    @property
    def poll_seconds(self) -> float:
        """How long a worker decodes before it reports, if no answer is complete before.

        All workers together call the controller at most a thousand times a second.
        """
        return max(_SHORTEST_POLL_SECONDS, self.num_workers / _CALLS_PER_SECOND)
