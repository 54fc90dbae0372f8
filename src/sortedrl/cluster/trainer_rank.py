"""The actor of one trainer rank: a shard of every weight, and its share of every update.

Every call goes to all ranks at the same time, with the same arguments.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sortedrl.cluster.broadcast import BroadcastSender
from sortedrl.cluster.placement import own_place
from sortedrl.cluster.weight_transport import (
    BROADCAST_BYTES,
    OBJECT_BYTES,
    Rendezvous,
    put_objects,
    write_weights,
)
from sortedrl.cluster.worker import LogFolder, WorkerLog, show_gpus
from sortedrl.config.cluster import CheckpointKind
from sortedrl.training.fsdp.checkpoint import export_whole, write_full, write_sharded
from sortedrl.training.fsdp.ranks import Ranks, open_ranks
from sortedrl.training.fsdp.trainer import ShardedTrainer
from sortedrl.types import TrainBatch, Trajectory

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch import Tensor

    from sortedrl.cluster.broadcast import Bucket


class TrainerFactory(Protocol):
    """Makes the trainer of a rank in the process where it is called."""

    def trainer(self, ranks: Ranks) -> ShardedTrainer:
        """A new trainer, as the run begins it or as its checkpoint has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What the controller knows of a rank."""

    device: str
    host: str
    process: int
    version: int
    log: Path | None
    gpus: tuple[str, ...] = ()
    """The GPUs that Ray gave it, by their names on its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where the trainer stands after an update."""

    version: int
    last: Mapping[str, float]
    is_changed: bool = True
    """Whether anything was trained on."""


class TrainerRank:
    """One rank, in a process of its own."""

    def __init__(self, name: str, *, has_gpu: bool, logs: LogFolder | None) -> None:
        """A rank without a process group yet, so that an error in forming it can be reported."""
        if not has_gpu:
            show_gpus(())
        self._log = WorkerLog(name, logs)

    def place(self) -> tuple[str, int]:
        """An address of this machine that others reach, and a port that is free now."""
        return own_place()

    def open(
        self,
        factory: TrainerFactory,
        *,
        address: str,
        rank: int,
        world: int,
        timeout_seconds: float,
        is_colocated: bool,
    ) -> RankInfo:
        """Form the process group at this address, and make the trainer.

        A colocated rank releases the memory of its optimisers between two updates.
        """
        import ray
        import torch

        has_gpu = torch.cuda.is_available()
        ranks = open_ranks(
            address,
            rank=rank,
            world=world,
            # Ray shows a rank its own GPU only.
            device="cuda:0" if has_gpu else "cpu",
            timeout_seconds=timeout_seconds,
        )
        self._trainer = factory.trainer(ranks)
        self._is_colocated = is_colocated
        self._sender = BroadcastSender(str(ranks.device))
        return RankInfo(
            device=torch.cuda.get_device_name(0) if has_gpu else "cpu",
            host=socket.gethostname(),
            process=os.getpid(),
            version=self._trainer.version,
            log=self._log.path,
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
        )

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The log-probabilities of the tokens of answers at temperature 1."""
        return self._trainer.logprobs(trajectories)

    def update(self, batch: TrainBatch) -> Outcome:
        """Make one policy update."""
        with self._awake():
            self._trainer.update(batch)
        return self._outcome()

    def flush(self) -> Outcome:
        """Train on what is held back, as there will be no more."""
        with self._awake():
            is_changed = self._trainer.flush()
        return self._outcome(is_changed=is_changed)

    def save(self, folder: Path, *, kind: CheckpointKind, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""
        write = write_full if kind == "full" else write_sharded
        with self._awake():
            return write(self._trainer, folder, tokenizer=tokenizer)

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model; the first rank does."""
        export_whole(self._trainer, folder, tokenizer=tokenizer)

    def sees(self, logs: LogFolder) -> bool:
        """Whether this machine sees the folder of the run."""
        return logs.is_here

    def put(self) -> Sequence[ObjectRef[Bucket]]:
        """Put the weights into the object store; the first rank does, the others give nothing."""
        parts = self._parts(OBJECT_BYTES)
        if self._trainer.ranks.is_first:
            return put_objects(parts)
        deque(parts, maxlen=0)
        return []

    def send(self, rendezvous: Rendezvous) -> None:
        """Broadcast the weights to the workers; the first rank does."""
        parts = self._parts(BROADCAST_BYTES)
        try:
            if self._trainer.ranks.is_first:
                self._sender.send(rendezvous, parts)
        finally:
            # What one rank gathers all do, to the end, even if nobody is there to take it.
            deque(parts, maxlen=0)

    def write(self, path: Path) -> None:
        """Write the weights into a file; the first rank does."""
        parts = self._parts(BROADCAST_BYTES)
        try:
            if self._trainer.ranks.is_first:
                write_weights(chain.from_iterable(parts), path, like=self._trainer.tensors())
        finally:
            deque(parts, maxlen=0)

    def close(self) -> str | None:
        """Gives the text of a log that the controller cannot see."""
        return self._log.text_away()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The optimisers have their memory meanwhile."""
        self._trainer.onload()
        yield
        if self._is_colocated:
            self._trainer.offload()

    def _parts(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return self._trainer.buckets(max_bytes=max_bytes)

    def _outcome(self, *, is_changed: bool = True) -> Outcome:
        trainer = self._trainer
        return Outcome(version=trainer.version, last=dict(trainer.last), is_changed=is_changed)
