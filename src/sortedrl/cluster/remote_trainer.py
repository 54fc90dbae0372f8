"""The trainer of a run over ranks: the actor of one rank, and the controller's side of all of them.

A rank has a shard of every weight and its share of every update. All ranks are called together,
with the same arguments. If one of them is lost, none can continue: the trainer is lost, and the run
restarts from its last checkpoint with new ranks.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.exceptions import OutOfMemoryError as KilledForMemory
from torch import OutOfMemoryError

from sortedrl.cluster.broadcast import BroadcastSender
from sortedrl.cluster.placement import BundlePlacement, BundleShare, free_address
from sortedrl.cluster.remote_engine import CONCURRENT, Actor, wait_until_ready
from sortedrl.cluster.weight_transport import (
    BROADCAST_BYTES,
    OBJECT_BYTES,
    Rendezvous,
    put_objects,
    write_weights,
)
from sortedrl.cluster.worker import LogFolder, WorkerLog, cpu_seconds_of, show_gpus
from sortedrl.config.cluster import CheckpointKind, Cluster
from sortedrl.errors import (
    CheckpointError,
    EngineError,
    SortedRLError,
    TrainerLost,
    TrainingError,
)
from sortedrl.training.fsdp.checkpoint import export_whole, write_full, write_sharded
from sortedrl.training.fsdp.ranks import Ranks, open_ranks
from sortedrl.training.fsdp.trainer import ShardedTrainer
from sortedrl.training.trainer import Snapshot
from sortedrl.types import TrainBatch, Trajectory, Weights

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch import Tensor

    from sortedrl.cluster.buckets import Bucket
    from sortedrl.cluster.weight_transport import Rendezvous


class TrainerFactory(Protocol):
    """Makes the trainer of a rank in the process where it is called."""

    def trainer(self, ranks: Ranks) -> ShardedTrainer:
        """A new trainer, as the run begins it or as its checkpoint has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The facts about a rank that the controller keeps."""

    device: str
    host: str
    process: int
    version: int
    log: Path | None
    gpus: tuple[str, ...] = ()
    """The GPUs that Ray gave it, by their names on its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The state of the trainer after an update."""

    version: int
    last: Mapping[str, float]
    is_changed: bool = True
    """Whether anything was trained on."""


class TrainerRank:
    """One rank, in a process of its own. Only `cpu_seconds` may be called during another call."""

    def __init__(self, name: str, *, has_gpu: bool, logs: LogFolder | None) -> None:
        """A rank without a process group yet: an error in forming it can then be reported."""
        if not has_gpu:
            show_gpus(())
        self._log = WorkerLog(name, logs)

    def address(self) -> tuple[str, int]:
        """An address of this machine that others reach, and a port that is free now."""
        return free_address()

    def cpu_seconds(self) -> float:
        """Seconds of CPU that the rank has used, which show whether it makes progress."""
        return cpu_seconds_of(os.getpid())

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

        A colocated rank has memory for its optimisers during updates only.
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
        self._sender = BroadcastSender(ranks.device, number=ranks.rank, count=ranks.world)
        self._offload()
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
        found = self._trainer.logprobs(trajectories)
        self._offload()
        return found

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Make one policy update."""
        with self._onloaded():
            self._trainer.update(batch)
        return self._result()

    def flush(self) -> UpdateResult:
        """Train on what is held back, as there will be no more."""
        with self._onloaded():
            is_changed = self._trainer.flush()
        return self._result(is_changed=is_changed)

    def save(self, folder: Path, *, kind: CheckpointKind, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""
        write = write_full if kind == "full" else write_sharded
        with self._onloaded():
            return write(self._trainer, folder, tokenizer=tokenizer)

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model; the first rank does."""
        export_whole(self._trainer, folder, tokenizer=tokenizer)

    def sees_folder(self, logs: LogFolder) -> bool:
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
        """Send the weights to the workers on this rank's GPU; the first rank to all others too."""
        self._sender.send(rendezvous, self._parts(BROADCAST_BYTES))

    def write(self, path: Path) -> None:
        """Write the weights into a file; the first rank does."""
        parts = self._parts(BROADCAST_BYTES)
        try:
            if self._trainer.ranks.is_first:
                write_weights(chain.from_iterable(parts), path, like=self._trainer.tensors())
        finally:
            deque(parts, maxlen=0)

    def close(self) -> str | None:
        """The text of a log that the controller cannot read."""
        return self._log.remote_text()

    @contextmanager
    def _onloaded(self) -> Iterator[None]:
        """Inside, the optimisers have their memory."""
        self._trainer.onload()
        yield
        self._offload()

    def _offload(self) -> None:
        """Free the GPU for the engines that share it."""
        if self._is_colocated:
            self._trainer.offload()

    def _parts(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return self._trainer.buckets(max_bytes=max_bytes)

    def _result(self, *, is_changed: bool = True) -> UpdateResult:
        trainer = self._trainer
        return UpdateResult(version=trainer.version, last=dict(trainer.last), is_changed=is_changed)


_CLOSE_SECONDS = 20.0
# While one rank writes a checkpoint the others wait. Ray reports a lost rank much sooner.
_COLLECTIVE_SECONDS = 1800.0
# Ray kills processes when a machine has little memory left.
_LOST = (ActorDiedError, ActorUnavailableError, KilledForMemory)
# Time for the others to report their errors, when one has failed.
_OTHERS_SECONDS = 10.0


class RankSource:
    """The weights of a trainer over ranks, which send them to the workers themselves."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        """Nothing is sent yet."""
        self._trainer = trainer

    def put(self, weights: Weights) -> Sequence[ObjectRef[Bucket]]:
        """Put into the object store by the first rank."""
        return self._trainer.call(lambda rank: rank.put.remote())[0]  # type: ignore[no-any-return]

    def send(self, weights: Weights, rendezvous: Rendezvous) -> None:
        """Sent to the workers by the ranks."""
        self._trainer.call(lambda rank: rank.send.remote(rendezvous))

    def write(self, weights: Weights, path: Path) -> None:
        """Written into a file by the first rank."""
        self._trainer.call(lambda rank: rank.write.remote(path))

    def close(self) -> None:
        """The process group ends with the ranks."""


class RemoteTrainer:
    """A `RunTrainer` over the ranks of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        factory: TrainerFactory,
        *,
        placement: BundlePlacement,
        folder: Path,
    ) -> None:
        """Start the ranks in their bundles, and wait until each has its trainer.

        Their logs go to `folder`.
        """
        self.last: Mapping[str, float] = {}
        self.is_closed = False
        self._cluster = cluster
        self._logs = LogFolder.opened(folder)
        self._claims = placement.plan.ranks
        self._ranks: list[Actor] = [
            _started(claim, placement, name=f"rank-{number}", logs=self._logs)
            for number, claim in enumerate(self._claims)
        ]
        self._sleep_engine: Callable[[], object] = _nothing
        try:
            self.info = self._opened(factory)
            self._require_shared_folder()
        except BaseException:
            self.close()
            raise
        self.version = self.info[0].version

    @property
    def device(self) -> str:
        """The devices of the ranks."""
        return f"{len(self.info)} x {self.info[0].device}"

    def update(self, batch: TrainBatch) -> None:
        """Make one policy update on all ranks."""
        self._sleep_engine()
        # Once into the object store, not once for each rank.
        reference = ray.put(batch)
        self._record(self.call(lambda rank: rank.update.remote(reference)))

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The log-probabilities of the tokens of a few answers at temperature 1."""
        found: list[list[float]] = self.call(lambda rank: rank.logprobs.remote(trajectories))[0]
        return found

    @property
    def gpus_of_bundle(self) -> Mapping[int, Sequence[str]]:
        """The GPUs of all ranks in a bundle, by its number."""
        found: dict[int, list[str]] = {}
        for claim, info in zip(self._claims, self.info, strict=True):
            found.setdefault(claim.bundle, []).extend(info.gpus)
        return found

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""
        self._sleep_engine()
        return self._record(self.call(lambda rank: rank.flush.remote())).is_changed

    def sleep_engine_with(self, sleep: Callable[[], object]) -> None:
        """Call `sleep` of the engine whenever the ranks need their memory."""
        self._sleep_engine = sleep

    def weights(self) -> Weights:
        """The present version; the tensors stay with the ranks, and `RankSource` sends them."""
        return Weights(self.version)

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""
        self._sleep_engine()
        kind = self._cluster.checkpoint
        counters: dict[str, Any] = self.call(
            lambda rank: rank.save.remote(folder.absolute(), kind=kind, tokenizer=tokenizer)
        )[0]
        return counters

    def snapshot(self, *, tokenizer: Any) -> Snapshot | None:  # noqa: ANN401
        """None: the ranks write together, between two updates."""
        return None

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model."""
        self.call(lambda rank: rank.export.remote(folder.absolute(), tokenizer=tokenizer))

    def close(self) -> None:
        """End the ranks; logs that this machine does not see are fetched first."""
        if self.is_closed:
            return
        self.is_closed = True
        texts = [rank.close.remote() for rank in self._ranks]
        # One that waits for another rank does not answer, and all have the same time.
        ray.wait(texts, num_returns=len(texts), timeout=_CLOSE_SECONDS)
        for number, text_of in enumerate(texts):
            # Its process ends even if this fails.
            with suppress(RayError):
                text = ray.get(text_of, timeout=0)
                if text is not None:
                    (self._logs.folder / f"rank-{number}.log").write_text(text)
        self._end()

    def call(self, method: Callable[[Actor], ObjectRef[Any]]) -> list[Any]:
        """The results of a call to every rank, in order.

        If one of them is lost, so is the trainer: the others would wait for it forever.
        """
        if self.is_closed:
            raise TrainerLost("the trainer's ranks have ended")
        results = [method(rank) for rank in self._ranks]
        try:
            waiting = results
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                ray.get(done)
            return list(ray.get(results))
        except RayError as error:
            raise self._failure(results, error) from error

    def _opened(self, factory: TrainerFactory) -> list[RankInfo]:
        seconds = self._cluster.start_seconds
        try:
            placed = [self._ranks[0].address.remote()]
            ((host, port),) = wait_until_ready(placed, self._ranks, quiet_seconds=seconds)
            opening = [
                rank.open.remote(
                    factory,
                    address=f"tcp://{host}:{port}",
                    rank=number,
                    world=len(self._ranks),
                    timeout_seconds=max(_COLLECTIVE_SECONDS, self._cluster.worker_timeout_seconds),
                    is_colocated=self._cluster.kind == "colocated",
                )
                for number, rank in enumerate(self._ranks)
            ]
            return wait_until_ready(opening, self._ranks, quiet_seconds=seconds)
        except RayTaskError as error:
            if isinstance(error.cause, SortedRLError):
                raise error.cause from error
            raise EngineError(
                f"a trainer rank could not start: {error.cause}{self._log_hint}"
            ) from error
        except RayError as error:
            raise EngineError(
                f"the trainer ranks did not start: {str(error).partition(chr(10))[0]}; see "
                "sortedrl cluster check, or raise cluster.start_seconds"
            ) from error

    def _failure(self, results: Sequence[ObjectRef[Any]], first: RayError) -> Exception:
        """The error to raise: that a rank is lost comes before the errors of the others."""
        ray.wait(list(results), num_returns=len(results), timeout=_OTHERS_SECONDS)
        found = [first, *self._errors(results)]
        is_lost = any(isinstance(error, _LOST) for error in found)
        own = [
            error.cause
            for error in found
            if isinstance(error, RayTaskError) and isinstance(error.cause, SortedRLError)
        ]
        raised = [error for error in found if isinstance(error, RayTaskError)]
        exhausted = None if is_lost else exhausted_resource([error.cause for error in raised])
        # Before the errors of the ranks that only know that another one failed.
        if exhausted is not None:
            self._end()
            return TrainingError(f"{exhausted}{self._log_hint}")
        if own and not is_lost:
            return own[0]
        # The other ranks still wait for the lost one.
        self._end()
        reason = (
            "its process has died (killed, out of memory, or crashed)"
            if is_lost
            # Ranks that wait for the one that failed have not answered.
            else str((raised or found)[0]).strip().rpartition("\n")[2]
        )
        return TrainerLost(f"a trainer rank is lost: {reason}{self._log_hint}")

    def _errors(self, results: Sequence[ObjectRef[Any]]) -> list[RayError]:
        found = []
        for result in results:
            try:
                ray.get(result, timeout=0)
            except RayError as error:
                found.append(error)
        return found

    def _record(self, results: Sequence[UpdateResult]) -> UpdateResult:
        first = results[0]
        self.version, self.last = first.version, first.last
        return first

    def _require_shared_folder(self) -> None:
        """Refuse ranks that cannot write where the run is kept."""
        writers = len(self.info) if self._cluster.checkpoint == "sharded" else 1
        for number, sees in enumerate(
            self.call(lambda rank: rank.sees_folder.remote(self._logs))[:writers]
        ):
            if not sees:
                raise CheckpointError(
                    f"{self._logs.folder.parent} must be visible to trainer rank {number} on "
                    f"{self.info[number].host}, but is not; put the run's folder (out) on a disk "
                    "that all machines share"
                )

    def _end(self) -> None:
        self.is_closed = True
        for rank in self._ranks:
            ray.kill(rank)

    @property
    def _log_hint(self) -> str:
        return f"; the logs of the ranks are in {self._logs.folder}"


def exhausted_resource(causes: Sequence[BaseException]) -> str | None:
    """The resource that a rank ran out of, as a message; `None` if it failed otherwise.

    The same update would fail again, so the run is not restarted automatically.
    """
    for cause in causes:
        text = str(cause).strip().partition("\n")[0] or type(cause).__name__
        if isinstance(cause, MemoryError | OutOfMemoryError):
            return (
                f"a trainer rank ran out of memory: {text}; resume with smaller passes "
                "(passes.micro_batch_tokens, passes.gradient_checkpointing), fewer engine.slots "
                "or more cluster.trainer_ranks"
            )
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"a trainer rank ran out of disk space: {text}; free some, and resume"
    return None


def _nothing() -> None:
    """There is no engine that shares the memory of the ranks."""


def _started(
    claim: BundleShare, placement: BundlePlacement, *, name: str, logs: LogFolder
) -> Actor:
    # Ray's types know the bare decorator only.
    remote: Any = ray.remote
    return (
        remote(concurrency_groups={CONCURRENT: 1})(TrainerRank)
        .options(
            num_cpus=claim.cpus,
            num_gpus=claim.gpus,
            max_restarts=0,
            scheduling_strategy=placement.strategy(claim),
        )
        .remote(name, has_gpu=claim.gpus > 0, logs=logs)
    )
