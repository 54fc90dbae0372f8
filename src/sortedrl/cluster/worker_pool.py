"""All rollout workers of a run as one engine: lost workers are replaced, new ones join.

A worker that dies is left out at once, and another one continues its answers. At a weight sync,
when nothing runs, a new worker is started in the bundle of a lost one, which Ray moves if the node
is lost, and more join up to `cluster.max_rollout_workers`. A new worker has the present weights
before it joins. If the cluster has no room the run continues with the workers it has, and tries
again at the next sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from sortedrl.cluster.placement import (
    BundlePlacement,
    BundleShare,
    free_resources,
    plan_of_one_worker,
)
from sortedrl.cluster.remote_engine import (
    CONCURRENT,
    POLL_SECONDS,
    Actor,
    RemoteEngine,
    kill_worker,
    wait_until_ready,
)
from sortedrl.cluster.weight_sync import SyncReport, WeightSync, transports_from
from sortedrl.cluster.weight_transport import WeightSource
from sortedrl.cluster.worker import EngineFactory, LogFolder, Merge, RolloutWorker, WorkerInfo
from sortedrl.config.cluster import Cluster
from sortedrl.engines.generation import TokenScores
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Step, Trajectory, Weights

if TYPE_CHECKING:
    from ray import ObjectRef


# A remote engine times out itself, before the pool does.
_POOL_TIMEOUT_FACTOR = 1.25
# The run waits meanwhile.
_JOIN_SECONDS = 60.0
# What is free may be in pieces on several machines, none of which has room for a worker.
_GROW_SECONDS = 10.0
_MOST_SKIPPED_SYNCS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerPlacement:
    claim: BundleShare
    placement: BundlePlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartingWorker:
    number: int
    actor: Actor
    info: ObjectRef[WorkerInfo]


class _NodeLostError(EngineError):
    """A bundle has no node: a worker need not be tried in it."""


@dataclass(slots=True)
class _Backoff:
    """Exponential backoff: a worker that does not start is tried less and less often."""

    num_failures: int = 0
    syncs_to_skip: int = 0

    def is_due(self) -> bool:
        """Whether to try at this sync."""
        if self.syncs_to_skip:
            self.syncs_to_skip -= 1
            return False
        return True

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Count whether a worker starts inside the block."""
        try:
            yield
        except _NodeLostError:
            raise
        except EngineError:
            self.num_failures += 1
            self.syncs_to_skip = min(_MOST_SKIPPED_SYNCS, 2**self.num_failures)
            raise
        self.num_failures = 0


class WorkerPool:
    """The engine of a run over its rollout workers."""

    def __init__(
        self,
        cluster: Cluster,
        factory: EngineFactory,
        *,
        placement: BundlePlacement,
        source: WeightSource | None,
        tell: Callable[[str], None],
        report: Callable[[SyncReport], None],
        log_folder: Path | None = None,
        weight_sync_folder: Path | None = None,
        spare: int = 0,
        gpus_of_bundle: Mapping[int, Sequence[str]] | None = None,
        merge: Merge | None = None,
    ) -> None:
        """Start the workers in their bundles, and wait until each has its engine.

        Colocated workers use the GPUs of the ranks in their bundles, `gpus_of_bundle`.

        New weights come from `source`; engines without weights have none. Weights on disk go to
        `weight_sync_folder`, which all machines must see; without one, disk is not used. `report`
        gets each weight sync. `spare` is that of the pool. Where the source sends adapters, each
        worker has `merge` make whole weights of them.
        """
        self._cluster = cluster
        self._factory = factory
        self._merge = merge
        self._tell = tell
        self._logs = None if log_folder is None else LogFolder.opened(log_folder)
        self._weight_sync = WeightSync(
            source,
            report,
            warn=tell,
            transports=transports_from(cluster.weight_sync),
            folder=weight_sync_folder,
            timeout_seconds=cluster.worker_timeout_seconds,
        )
        self._places: list[_WorkerPlacement] = []
        """By the number of a worker."""
        self._replaced: set[int] = set()
        """Workers that were lost, and replaced."""
        self._own_placements: list[BundlePlacement] = []
        self._last_warning: str | None = None
        self._replace_backoff, self._grow_backoff = _Backoff(), _Backoff()
        self._needs_weights = False
        self._gpus_of_bundle = gpus_of_bundle or {}
        with ExitStack() as opened:
            starting = []
            for claim in placement.plan.workers:
                starting.append(self._start(_WorkerPlacement(claim=claim, placement=placement)))
                opened.callback(kill_worker, starting[-1].actor)
            self.workers = [self._engine(worker) for worker in starting]
            opened.pop_all()
        self._pool = EnginePool(
            self.workers,
            warn=tell,
            names=[_name(worker.number) for worker in self.workers],
            queue_depth=spare,
            timeout_seconds=_POOL_TIMEOUT_FACTOR * cluster.worker_timeout_seconds,
        )

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self._pool.name

    @property
    def slots(self) -> int:
        """Answers that all living workers write at the same time."""
        return self._pool.slots

    @property
    def version(self) -> int:
        """Version of the weights it writes with."""
        return self._pool.version

    @property
    def lost(self) -> list[RemoteEngine]:
        """Workers that stopped answering and were not replaced yet."""
        return [w for w in self.workers if w.is_lost and w.number not in self._replaced]

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """Those of all live workers."""
        return self._pool.request_limits

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work, in order of priority."""
        self.wake()
        self._pool.submit(trajectories, tolerance=tolerance, sampling=sampling)

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""
        return self._pool.step()

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory with its tokens so far."""
        return self._pool.interrupt()

    def load_weights(self, weights: Weights) -> None:
        """Push these weights to all workers, and replace or add workers as far as there is room."""
        self._needs_weights = False
        self._weight_sync.push(weights, [w for w in self.workers if not w.is_lost])
        # Workers that were lost in the push are left out of the pool here.
        self._pool.load_weights(weights)
        known = len(self.workers)
        try:
            self._replace_lost(weights)
            if self._grow_backoff.is_due():
                self._grow(weights)
                self._last_warning = None
        except EngineError as error:
            self._warn_once(str(error))
        for worker in self.workers[known:]:
            self._tell(f"{worker.name} has joined: {self.slots} slots now")

    def scores(
        self, trajectories: Sequence[Trajectory]
    ) -> Mapping[str, Sequence[TokenScores] | None]:
        """The scores of answers by every living worker; nothing is running."""
        return {
            worker.name: worker.score(trajectories) for worker in self.workers if not worker.is_lost
        }

    def sleep(self) -> bool:
        """Have all workers free the memory that only generation needs; nothing is running.

        Returns whether some of them have dropped their weights.
        """
        for worker in self.workers:
            if not worker.is_lost:
                # A worker that is lost now is left out when work is submitted.
                with suppress(EngineLost):
                    self._needs_weights |= worker.sleep()
        return self._needs_weights

    def wake(self) -> None:
        """Push the weights again to workers that dropped them, if there are no newer ones."""
        if self._needs_weights:
            self.load_weights(Weights(self.version))

    def close(self) -> None:
        """End all workers; the placement that was given stays."""
        try:
            self._pool.close()
        finally:
            self._weight_sync.close()
            while self._own_placements:
                self._own_placements.pop().remove()

    def _replace_lost(self, weights: Weights) -> None:
        """Start a worker in the bundle of each that was lost."""
        is_due = not self.lost or self._replace_backoff.is_due()
        for worker in self.lost:
            place = self._places[worker.number]
            _require_node(place.placement)
            if is_due:
                with self._replace_backoff.tried():
                    self._join(place, weights)
                self._replaced.add(worker.number)

    def _grow(self, weights: Weights) -> None:
        """Add workers while there is room."""
        while self._may_grow:
            with self._grow_backoff.tried():
                self._add(weights)

    @property
    def _may_grow(self) -> bool:
        living = sum(not worker.is_lost for worker in self.workers)
        if living >= self._cluster.max_workers:
            return False
        free, wanted = free_resources(), plan_of_one_worker(self._cluster).total
        return all(free.get(name, 0.0) >= amount for name, amount in wanted.items())

    def _add(self, weights: Weights) -> None:
        """Start one more worker, in a bundle of its own."""
        placement = BundlePlacement(plan_of_one_worker(self._cluster), seconds=_GROW_SECONDS)
        with ExitStack() as opened:
            opened.callback(placement.remove)
            self._join(
                _WorkerPlacement(claim=placement.plan.workers[0], placement=placement), weights
            )
            opened.pop_all()
        self._own_placements.append(placement)

    def _join(self, place: _WorkerPlacement, weights: Weights) -> None:
        """Start a worker there, and have it join the others with the present weights."""
        starting = self._start(place)
        with ExitStack() as opened:
            opened.callback(kill_worker, starting.actor)
            _wait_until_placed(starting, place.placement)
            worker = self._engine(starting)
            if worker.version != weights.version:
                worker.load_weights(weights)
            self._pool.add(worker, name=_name(worker.number))
            opened.pop_all()
        self.workers.append(worker)

    def _warn_once(self, message: str) -> None:
        """Warn once, not at every sync."""
        if message != self._last_warning:
            self._tell(message)
        self._last_warning = message

    def _start(self, place: _WorkerPlacement) -> _StartingWorker:
        number = len(self._places)
        self._places.append(place)
        # Ray's types know the bare decorator only.
        remote: Any = ray.remote
        actor: Actor = (
            remote(concurrency_groups={CONCURRENT: 1})(RolloutWorker)
            .options(
                num_cpus=place.claim.cpus,
                num_gpus=place.claim.gpus,
                max_restarts=0,
                scheduling_strategy=place.placement.strategy(place.claim),
            )
            .remote(
                _name(number),
                gpus=self._visible_gpus(place.claim),
                poll_seconds=self._cluster.poll_seconds,
                logs=self._logs,
            )
        )
        info = actor.open.remote(self._factory, self._merge)
        return _StartingWorker(number=number, actor=actor, info=info)

    def _visible_gpus(self, claim: BundleShare) -> Sequence[str] | None:
        """The GPUs that a worker is shown; `None` for those that Ray gives it."""
        if claim.gpus:
            return None
        return self._gpus_of_bundle[claim.bundle] if claim.shared_gpus else ()

    def _engine(self, starting: _StartingWorker) -> RemoteEngine:
        quiet_seconds = self._cluster.start_seconds
        try:
            (info,) = wait_until_ready(
                [starting.info], [starting.actor], quiet_seconds=quiet_seconds
            )
        except RayTaskError as error:
            raise EngineError(
                f"rollout worker {starting.number} could not create its engine: {error.cause}"
                f"{self._log_hint(starting.number)}"
            ) from error
        except RayError as error:
            raise EngineError(
                f"rollout worker {starting.number} did not start: {error}; see sortedrl cluster "
                "check, or raise cluster.start_seconds"
            ) from error
        return RemoteEngine(
            starting.actor,
            info,
            number=starting.number,
            weight_sync=self._weight_sync,
            timeout_seconds=self._cluster.worker_timeout_seconds,
            logs=self._logs,
        )

    def _log_hint(self, number: int) -> str:
        """Where the log of a worker is; vLLM and SGLang name the cause of an error there only."""
        if self._logs is None:
            return ""
        return f"; its log is {_name(number)}.log in {self._logs.folder}"


def _require_node(placement: BundlePlacement) -> None:
    """Refuse to wait for a bundle whose node is lost."""
    if not placement.is_whole:
        raise _NodeLostError(
            "a rollout worker that was lost cannot be replaced now: its machine is gone, and no "
            "other has room; the run continues with the workers it has, and a machine that joins "
            "the cluster is used from the next weight sync on"
        )


def _wait_until_placed(starting: _StartingWorker, placement: BundlePlacement) -> None:
    """Wait until a worker has its process; Ray notices a lost node after some seconds."""
    ready = starting.actor.__ray_ready__.remote()
    until = monotonic() + _JOIN_SECONDS
    reason = "it does not start"
    while monotonic() < until:
        try:
            ray.get(ready, timeout=POLL_SECONDS)
        except GetTimeoutError:
            _require_node(placement)
        except RayError as error:
            reason, until = str(error).strip().rpartition("\n")[2], 0.0
        else:
            return
    raise EngineError(
        f"rollout worker {starting.number} must be placed within {_JOIN_SECONDS:g} s, but the "
        f"cluster has no room for it now ({reason}); the run continues without it"
    )


def _name(number: int) -> str:
    """The name of a worker in messages, and of its log."""
    return f"rollout-{number}"
