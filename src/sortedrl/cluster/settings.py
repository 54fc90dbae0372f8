"""The settings of the cluster: where Ray runs, and what is placed on it.

separated   every rollout worker and every rank of the trainer has resources of its own
colocated   worker and rank share a bundle, one pair in each, and take turns
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sortedrl.config import require
from sortedrl.errors import unknown_name

Kind = Literal["colocated", "separated"]
_CALLS_PER_SECOND = 1000
_SHORTEST_BEAT_SECONDS = 0.02


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
    rollout_workers: int = 2
    """Engines, each in a process of its own with a copy of the weights."""
    cpus_per_worker: int = 1
    """CPUs of a rollout worker."""
    gpus_per_worker: int = 0
    """GPUs of a rollout worker; 0 writes on the CPU."""
    trainer_ranks: int = 1
    """Processes over which the trainer is spread, with a CPU and, where workers have GPUs, a GPU
    each. 0: it stays in the process of the controller."""
    patience_seconds: float = 300.0
    """A worker that does not answer for so long counts as lost, and others take its answers."""
    start_seconds: float = 600.0
    """How long placing and starting the workers may take, loading the model included."""
    dashboard: bool = True
    """Whether a Ray of our own offers its dashboard, where that is installed: ray[default]."""
    object_store_gib: float | None = None
    """Shared memory of a Ray of our own, through which weights travel; they must fit. By default
    what Ray takes."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        names = get_args(Kind)
        require(self.kind in names, unknown_name("cluster kind", self.kind, names))
        for name, value, least in (
            ("rollout_workers", self.rollout_workers, 1),
            ("cpus_per_worker", self.cpus_per_worker, 0),
            ("gpus_per_worker", self.gpus_per_worker, 0),
            ("trainer_ranks", self.trainer_ranks, 0),
        ):
            require(value >= least, f"cluster.{name} must be at least {least}, got {value}")
        for name, seconds in (
            ("patience_seconds", self.patience_seconds),
            ("start_seconds", self.start_seconds),
        ):
            require(seconds > 0, f"cluster.{name} must be above 0, got {seconds}")
        require(
            self.cpus_per_worker + self.gpus_per_worker > 0,
            "a rollout worker must have a CPU or a GPU, got neither; raise cluster.cpus_per_worker",
        )
        require(
            self.object_store_gib is None or self.object_store_gib > 0,
            f"cluster.object_store_gib must be above 0, got {self.object_store_gib}",
        )
        require(self.address != "", "cluster.address must not be empty; leave it out, or give auto")
        require(
            self.address is None or self.object_store_gib is None,
            f"cluster.object_store_gib is for a Ray of our own, got it with address "
            f"{self.address!r}; leave it out",
        )
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.kind == "separated":
            return
        require(
            self.trainer_ranks == self.rollout_workers,
            "cluster.kind colocated puts one rank of the trainer beside each rollout worker, got "
            f"{self.trainer_ranks} trainer_ranks and {self.rollout_workers} rollout_workers; make "
            "them equal, or take separated",
        )
        require(
            self.gpus_per_worker <= 1,
            "cluster.kind colocated shares one GPU between a worker and a rank, got "
            f"gpus_per_worker {self.gpus_per_worker}; set it to 1 or 0, or take separated",
        )

    @property
    def gpus_per_rank(self) -> int:
        """GPUs of a rank of the trainer."""
        return 1 if self.gpus_per_worker else 0

    @property
    def beat_seconds(self) -> float:
        """How long a worker writes before it says so, if no answer is complete before.

        All workers together call the controller a thousand times a second at most.
        """
        return max(_SHORTEST_BEAT_SECONDS, self.rollout_workers / _CALLS_PER_SECOND)
