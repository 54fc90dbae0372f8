"""All rollout workers of a run behind one engine: lost workers are replaced, new ones join.

The engine of the run is `Fleet.pool`. A worker that dies is left out by the pool; `refill` starts
another in its bundle, which Ray moves if the node is gone. A new worker has the present weights
before it joins. Workers are replaced and added at a weight sync, because nothing runs then. If the
cluster has no room the run continues with the workers it has, and asks again at the next sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from sortedrl.cluster.placement import Claim, Placement, free_resources, joining
from sortedrl.cluster.remote_engine import Actor, RemoteEngine
from sortedrl.cluster.weight_sync import HandOver, HandOvers, ways_from
from sortedrl.cluster.worker import Facts, LogFolder, Recipe, RolloutWorker
from sortedrl.config.cluster import Cluster, HandOverWay
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Step, Trajectory, Weights

if TYPE_CHECKING:
    from ray import ObjectRef


# A worker that is silent says so itself, before the pool does.
_POOL_PATIENCE = 1.25
# A run waits meanwhile.
_JOIN_SECONDS = 30.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The bundle of a worker."""

    claim: Claim
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A worker on its way."""

    number: int
    actor: Actor
    facts: ObjectRef[Facts]


class Fleet:
    """The rollout workers, and the engine that they are together."""

    def __init__(
        self,
        cluster: Cluster,
        recipe: Recipe,
        *,
        placement: Placement,
        warn: Callable[[str], None],
        report: Callable[[HandOver], None],
        folder: Path | None = None,
        hand_over_folder: Path | None = None,
        spare: int = 0,
    ) -> None:
        """Start the workers in their bundles, and wait until each has its engine.

        Their logs go to `folder`, weights on disk to `hand_over_folder`, which all machines must
        see; without one they never go there. `report` hears of each hand-over, and `warn` of a
        way that failed, in a thread of a worker. `spare` is that of the pool.
        """
        self._cluster = cluster
        self._recipe = recipe
        self._logs = None if folder is None else LogFolder.opened(folder)
        self._report = report
        self._warn = warn
        self._hand_over_folder = hand_over_folder
        self._hand_overs = self._ways_from(cluster.hand_over)
        self._places: list[_Place] = []
        """By the number of a worker."""
        self._vacated: set[int] = set()
        """Workers that were lost, and replaced."""
        self._own_placements: list[Placement] = []
        with ExitStack() as opened:
            started = []
            for claim in placement.blueprint.workers:
                started.append(self._start(_Place(claim=claim, placement=placement)))
                opened.callback(ray.kill, started[-1].actor)
            self.workers = [self._engine(worker, self._hand_overs) for worker in started]
            opened.pop_all()
        self.pool = EnginePool(
            self.workers,
            warn=warn,
            names=[_name(worker.number) for worker in self.workers],
            queue_depth=spare,
            timeout_seconds=_POOL_PATIENCE * cluster.patience_seconds,
        )

    @property
    def lost(self) -> list[RemoteEngine]:
        """Workers that stopped answering and were not replaced yet."""
        return [w for w in self.workers if w.is_lost and w.number not in self._vacated]

    def add(self, weights: Weights) -> RemoteEngine:
        """Start one more worker, in a bundle of its own, and have it join the others.

        Only while no other call to the pool is under way. The pool has more slots afterwards.
        """
        placement = Placement(joining(self._cluster), seconds=_JOIN_SECONDS)
        self._own_placements.append(placement)
        place = _Place(claim=placement.blueprint.workers[0], placement=placement)
        return self._joined(place, weights)

    def refill(self, weights: Callable[[], Weights]) -> Sequence[RemoteEngine]:
        """Replace the workers that were lost; as `add`, but in the bundles that they leave.

        Raises `EngineError` while such a bundle has no node; it can be tried again later.
        """
        lost = self.lost
        present = weights() if lost else None
        joined = []
        for worker in lost:
            if present is not None:
                _require_node(self._places[worker.number].placement)
                joined.append(self._joined(self._places[worker.number], present))
                self._vacated.add(worker.number)
        return joined

    def close(self) -> None:
        """End all workers; the placement that was given stays."""
        try:
            self.pool.close()
        finally:
            self._hand_overs.close()
            while self._own_placements:
                self._own_placements.pop().remove()

    def _joined(self, place: _Place, weights: Weights) -> RemoteEngine:
        started = self._start(place)
        # The others do not take these weights again, and a group is not worth it for one.
        way = self._cluster.hand_over
        alone = self._ways_from("objects" if way == "group" else way)
        with closing(alone), ExitStack() as opened:
            opened.callback(ray.kill, started.actor)
            _require_placed(started, place.placement)
            worker = self._engine(started, alone)
            if worker.version != weights.version:
                worker.load_weights(weights)
            worker.share(self._hand_overs)
            self.pool.add(worker, name=_name(worker.number))
            opened.pop_all()
        self.workers.append(worker)
        return worker

    def _ways_from(self, first: HandOverWay) -> HandOvers:
        return HandOvers(
            self._report,
            warn=self._warn,
            ways=ways_from(first),
            folder=self._hand_over_folder,
            patience_seconds=self._cluster.patience_seconds,
        )

    def _start(self, place: _Place) -> _Started:
        number = len(self._places)
        self._places.append(place)
        actor: Actor = (
            ray.remote(RolloutWorker)
            .options(
                num_cpus=place.claim.cpus,
                num_gpus=place.claim.gpus,
                max_restarts=0,
                scheduling_strategy=place.placement.strategy(place.claim),
            )
            .remote(_name(number), beat_seconds=self._cluster.beat_seconds, logs=self._logs)
        )
        return _Started(number=number, actor=actor, facts=actor.open.remote(self._recipe))

    def _engine(self, started: _Started, hand_overs: HandOvers) -> RemoteEngine:
        try:
            facts = ray.get(started.facts, timeout=self._cluster.start_seconds)
        except RayTaskError as error:
            raise EngineError(
                f"rollout worker {started.number} could not make its engine: {error.cause}"
            ) from error
        except RayError as error:
            raise EngineError(
                f"rollout worker {started.number} did not start: {error}; see sortedrl cluster "
                "check"
            ) from error
        return RemoteEngine(
            started.actor,
            facts,
            number=started.number,
            hand_overs=hand_overs,
            has_weights=self._recipe.has_weights,
            patience_seconds=self._cluster.patience_seconds,
            logs=self._logs,
        )


def _require_node(placement: Placement) -> None:
    """Refuse to wait for a bundle that has no node any more."""
    if not placement.is_whole:
        raise EngineError(
            "a rollout worker that was lost cannot be replaced now: its machine is gone, and no "
            "other has room; the run goes on with the workers it has, and a machine that joins "
            "the cluster is used from the next hand-over on"
        )


def _require_placed(started: _Started, placement: Placement) -> None:
    """Wait until a worker has its process; it takes Ray some seconds to miss a node."""
    ready = started.actor.__ray_ready__.remote()
    until = monotonic() + _JOIN_SECONDS
    reason = "it does not start"
    while monotonic() < until:
        try:
            ray.get(ready, timeout=_LOOK_SECONDS)
        except GetTimeoutError:
            _require_node(placement)
        except RayError as error:
            reason, until = str(error).strip().rpartition("\n")[2], 0.0
        else:
            return
    raise EngineError(
        f"rollout worker {started.number} must be placed within {_JOIN_SECONDS:g} s, but the "
        f"cluster has no room for it now ({reason}); the run goes on without it"
    )


def _name(number: int) -> str:
    """What a worker is called in messages, and its log."""
    return f"rollout-{number}"


class ElasticEngine:
    """The pool of a fleet that is mended and grows between two rounds."""

    def __init__(self, fleet: Fleet, cluster: Cluster, *, tell: Callable[[str], None]) -> None:
        """The workers are there."""
        self.fleet = fleet
        self._cluster = cluster
        self._tell = tell
        self._complaint: str | None = None

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self.fleet.pool.name

    @property
    def slots(self) -> int:
        """Answers that all living workers write at the same time."""
        return self.fleet.pool.slots

    @property
    def version(self) -> int:
        """Version of the weights it writes with."""
        return self.fleet.pool.version

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """Those of all live workers."""
        return self.fleet.pool.request_limits

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work, in order of priority."""
        self.fleet.pool.submit(trajectories, tolerance=tolerance, sampling=sampling)

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""
        return self.fleet.pool.step()

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory with its tokens so far."""
        return self.fleet.pool.interrupt()

    def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on, with as many workers as there can be."""
        self.fleet.pool.load_weights(weights)
        known = len(self.fleet.workers)
        try:
            self.fleet.refill(lambda: weights)
            while self._may_grow:
                self.fleet.add(weights)
            self._complaint = None
        except EngineError as error:
            self._complain(str(error))
        for worker in self.fleet.workers[known:]:
            self._tell(f"{worker.name} has joined: {self.slots} slots now")

    def release(self) -> None:
        """Have all workers let go of what only writing needs; nothing is being written."""
        for worker in self.fleet.workers:
            if not worker.is_lost:
                # Whoever is lost now is left out when work comes.
                with suppress(EngineLost):
                    worker.release()

    def close(self) -> None:
        """End all workers."""
        self.fleet.close()

    @property
    def _may_grow(self) -> bool:
        living = sum(not worker.is_lost for worker in self.fleet.workers)
        if living >= self._cluster.most_workers:
            return False
        free, wanted = free_resources(), joining(self._cluster).total
        return all(free.get(name, 0.0) >= amount for name, amount in wanted.items())

    def _complain(self, words: str) -> None:
        """Say it once, not at every hand-over."""
        if words != self._complaint:
            self._tell(words)
        self._complaint = words
