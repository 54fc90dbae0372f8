"""The controller's side of the trainer ranks: the trainer of a run.

All ranks are called together. If one of them is lost, none can continue: the trainer is lost, and
the run restarts from its last checkpoint with new ranks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from torch import OutOfMemoryError

from sortedrl.cluster.placement import BundlePlacement, Claim
from sortedrl.cluster.trainer_rank import Outcome, RankInfo, TrainerFactory, TrainerRank
from sortedrl.cluster.worker import LogFolder
from sortedrl.config.cluster import Cluster
from sortedrl.errors import (
    CheckpointError,
    EngineError,
    SortedRLError,
    TrainerLost,
    TrainingError,
)
from sortedrl.training.trainer import Snapshot
from sortedrl.types import TrainBatch, Trajectory, Weights

if TYPE_CHECKING:
    from ray import ObjectRef

    from sortedrl.cluster.broadcast import Bucket
    from sortedrl.cluster.weight_transport import Rendezvous

Actor = Any
"""A handle of an actor: its methods are those of `TrainerRank`, called in Ray's way."""
_CLOSE_SECONDS = 20.0
# While one rank writes a checkpoint the others wait. That a rank is gone Ray says much sooner.
_COLLECTIVE_SECONDS = 1800.0
# Time for the others to say what they died of, when one has failed.
_OTHERS_SECONDS = 10.0


class RankSource:
    """The weights of a trainer over ranks: the first rank sends them straight to the workers."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        """Nothing is moved yet."""
        self._trainer = trainer

    def put(self, weights: Weights) -> Sequence[ObjectRef[Bucket]]:
        """Put into the object store by the first rank."""
        return self._trainer.ask(lambda rank: rank.put.remote())[0]  # type: ignore[no-any-return]

    def send(self, weights: Weights, rendezvous: Rendezvous) -> None:
        """Broadcast to the workers by the first rank."""
        self._trainer.ask(lambda rank: rank.send.remote(rendezvous))

    def write(self, weights: Weights, path: Path) -> None:
        """Written into a file by the first rank."""
        self._trainer.ask(lambda rank: rank.write.remote(path))

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
        self._claims = placement.blueprint.ranks
        self._ranks: list[Actor] = [
            _started(claim, placement, name=f"rank-{number}", logs=self._logs)
            for number, claim in enumerate(self._claims)
        ]
        self._make_room: Callable[[], object] = _nothing
        try:
            self.info = self._opened(factory)
            self._refuse_blind()
        except BaseException:
            self.close()
            raise
        self.version = self.info[0].version

    @property
    def device(self) -> str:
        """What the ranks compute on."""
        return f"{len(self.info)} x {self.info[0].device}"

    def update(self, batch: TrainBatch) -> None:
        """Make one policy update on all ranks."""
        self._make_room()
        # Once into the object store, not once for each rank.
        reference = ray.put(batch)
        self._take(self.ask(lambda rank: rank.update.remote(reference)))

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The log-probabilities of the tokens of a few answers at temperature 1."""
        found: list[list[float]] = self.ask(lambda rank: rank.logprobs.remote(trajectories))[0]
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
        self._make_room()
        return self._take(self.ask(lambda rank: rank.flush.remote())).is_changed

    def share_memory_with(self, sleep: Callable[[], object]) -> None:
        """From now on call `sleep` of the engine before the ranks need their memory."""
        self._make_room = sleep

    def weights(self) -> Weights:
        """The present version; the tensors stay with the ranks, and `RankSource` sends them."""
        return Weights(self.version)

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""
        self._make_room()
        kind = self._cluster.checkpoint
        counters: dict[str, Any] = self.ask(
            lambda rank: rank.save.remote(folder.absolute(), kind=kind, tokenizer=tokenizer)
        )[0]
        return counters

    def snapshot(self, *, tokenizer: Any) -> Snapshot | None:  # noqa: ANN401
        """None: the ranks write together, between two updates."""
        return None

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model."""
        self.ask(lambda rank: rank.export.remote(folder.absolute(), tokenizer=tokenizer))

    def close(self) -> None:
        """End the ranks; logs that this machine does not see are fetched first."""
        if self.is_closed:
            return
        self.is_closed = True
        for number, rank in enumerate(self._ranks):
            # Whatever it says, its process ends.
            with suppress(RayError):
                text = ray.get(rank.close.remote(), timeout=_CLOSE_SECONDS)
                if text is not None:
                    (self._logs.folder / f"rank-{number}.log").write_text(text)
        self._end()

    def ask(self, call: Callable[[Actor], ObjectRef[Any]]) -> list[Any]:
        """What all ranks answer, in order.

        If one of them is lost, so is the trainer: the others wait for it in vain.
        """
        if self.is_closed:
            raise TrainerLost("the trainer's ranks have ended")
        asked = [call(rank) for rank in self._ranks]
        try:
            waiting = asked
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                ray.get(done)
            return list(ray.get(asked))
        except RayError as error:
            raise self._failure(asked, error) from error

    def _opened(self, factory: TrainerFactory) -> list[RankInfo]:
        seconds = self._cluster.start_seconds
        try:
            host, port = ray.get(self._ranks[0].place.remote(), timeout=seconds)
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
            return list(ray.get(opening, timeout=seconds))
        except RayTaskError as error:
            if isinstance(error.cause, SortedRLError):
                raise error.cause from error
            raise EngineError(
                f"a trainer rank could not start: {error.cause}{self._see}"
            ) from error
        except RayError as error:
            raise EngineError(
                f"the trainer ranks did not start within {seconds:g} s: "
                f"{str(error).partition(chr(10))[0]}; see sortedrl cluster check, or raise "
                "cluster.start_seconds"
            ) from error

    def _failure(self, asked: Sequence[ObjectRef[Any]], first: RayError) -> Exception:
        """What to raise: that a rank is lost counts more than what the others say of it."""
        ray.wait(list(asked), num_returns=len(asked), timeout=_OTHERS_SECONDS)
        found = [first, *self._errors(asked)]
        is_lost = any(isinstance(error, ActorDiedError | ActorUnavailableError) for error in found)
        own = [
            error.cause
            for error in found
            if isinstance(error, RayTaskError) and isinstance(error.cause, SortedRLError)
        ]
        if own and not is_lost:
            return own[0]
        causes = [error.cause for error in found if isinstance(error, RayTaskError)]
        exhausted = None if is_lost else exhausted_resource(causes)
        if exhausted is not None:
            self._end()
            return TrainingError(f"{exhausted}{self._see}")
        # Whoever still waits for the lost one will not be asked again.
        self._end()
        reason = (
            "its process has died (killed, out of memory, or crashed)"
            if is_lost
            else str(found[-1]).strip().rpartition("\n")[2]
        )
        return TrainerLost(f"a trainer rank is lost: {reason}{self._see}")

    def _errors(self, asked: Sequence[ObjectRef[Any]]) -> list[RayError]:
        found = []
        for reference in asked:
            try:
                ray.get(reference, timeout=0)
            except RayError as error:
                found.append(error)
        return found

    def _take(self, outcomes: Sequence[Outcome]) -> Outcome:
        first = outcomes[0]
        self.version, self.last = first.version, first.last
        return first

    def _refuse_blind(self) -> None:
        """Refuse ranks that cannot write where the run is kept."""
        writers = len(self.info) if self._cluster.checkpoint == "sharded" else 1
        for number, sees in enumerate(
            self.ask(lambda rank: rank.sees.remote(self._logs))[:writers]
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
    def _see(self) -> str:
        return f"; the logs of the ranks are in {self._logs.folder}"


def exhausted_resource(causes: Sequence[BaseException]) -> str | None:
    """What a rank ran out of, in its own words; `None` if that is not why it failed.

    The same update would fail again, so the run is not restarted by itself.
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
    """Nothing is to be let go of."""


def _started(claim: Claim, placement: BundlePlacement, *, name: str, logs: LogFolder) -> Actor:
    # Ray's types know the bare decorator only.
    remote: Any = ray.remote
    return (
        remote(TrainerRank)
        .options(
            num_cpus=claim.cpus,
            num_gpus=claim.gpus,
            max_restarts=0,
            scheduling_strategy=placement.strategy(claim),
        )
        .remote(name, has_gpu=claim.gpus > 0, logs=logs)
    )
