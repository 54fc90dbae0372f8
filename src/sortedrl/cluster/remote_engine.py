"""The controller's side of one rollout worker: an engine of a pool.

Unfinished work of the worker is not kept here: if its process dies, the pool that assigned the work
reassigns it. A worker that is lost stays lost. New weights are pushed to all workers together
(`WeightSync`); `load_weights` pushes to this one alone only if it was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)

from sortedrl.cluster.weight_sync import WeightLoad, WeightSync
from sortedrl.cluster.weight_transport import Delivery
from sortedrl.cluster.worker import LogFolder, WorkerInfo
from sortedrl.engines.generation import TokenScores
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Step, Trajectory, Weights

if TYPE_CHECKING:
    from ray import ObjectRef

Actor = Any
"""A handle of an actor: its methods are those of `RolloutWorker`, called in Ray's way."""
CONCURRENT = "concurrent"
"""The concurrency group of methods that answer while another call runs."""
POLL_SECONDS = 0.5
_CLOSE_SECONDS = 20.0
_KILL_CHILDREN_SECONDS = 5.0
# Ray's own threads in a process that hangs use far less of the CPU.
_PROGRESS_SHARE = 0.02


class RemoteEngine:
    """An `Engine` in an actor."""

    def __init__(
        self,
        actor: Actor,
        info: WorkerInfo,
        *,
        number: int,
        weight_sync: WeightSync,
        timeout_seconds: float,
        logs: LogFolder | None,
    ) -> None:
        """The engine of a worker that is open; `number` identifies it among the workers."""
        self.name = f"rollout worker {number}, {info.engine} at {info.host}"
        self.slots = info.slots
        self.version = info.version
        self.info = info
        self.number = number
        self.is_closed = False
        self._actor = actor
        self._weight_sync = weight_sync
        self._timeout = timeout_seconds
        self._logs = logs
        self._lost: EngineLost | None = None
        self._loaded: Weights | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it stopped answering."""
        return self._lost is not None

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """Those of the worker's engine."""
        return self.info.request_limits

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work in order of priority: all of it, or none if one is refused."""
        self._result(
            lambda: self._actor.submit.remote(
                list(trajectories), tolerance=tolerance, sampling=sampling
            )
        )

    def step(self) -> Step:
        """The tokens and answers since the last step; waits for an answer or the next report."""
        step: Step = self._result(lambda: self._actor.step.remote())
        return step

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory.

        An answer that was completed since the last step comes back as unfinished too. A worker
        whose engine is lost gives back what that was writing; one that is lost itself cannot.
        """
        given_back: Sequence[Trajectory] = self._result(lambda: self._actor.interrupt.remote())
        return given_back

    def load_weights(self, weights: Weights) -> None:
        """Push these weights to the worker, unless it has them already."""
        if self._loaded is not weights:
            self._weight_sync.push(weights, [self], is_joining=True)
            if self._lost is not None:
                raise self._lost

    def take_weights(self, weights: Weights, delivery: Delivery | None) -> WeightLoad:
        """Have the worker receive the weights, and wait for it; called by the weight sync alone."""
        load: WeightLoad = self._result(
            lambda: self._actor.load_weights.remote(weights.version, delivery)
        )
        self.version, self._loaded = load.version, weights
        return load

    def score(self, trajectories: Sequence[Trajectory]) -> Sequence[TokenScores] | None:
        """The tokens of answers under the worker's weights; `None` if its engine cannot score."""
        scores: Sequence[TokenScores] | None = self._result(
            lambda: self._actor.score.remote(list(trajectories))
        )
        return scores

    def sleep(self) -> bool:
        """Free the worker's memory that only generation needs; whether it dropped its weights."""
        has_dropped: bool = self._result(lambda: self._actor.sleep.remote())
        return has_dropped

    def close(self) -> None:
        """End the worker's process; a log that this machine does not see is fetched first."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._lost is None:
            # Its process ends even if this fails.
            with suppress(RayError):
                self._save_log(ray.get(self._actor.close.remote(), timeout=_CLOSE_SECONDS))
        kill_worker(self._actor)

    def _result(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401  the result of the method
        """The result of a call, or its exception; without an answer the worker is lost."""
        if self._lost is not None:
            raise self._lost
        try:
            return ray.get(call(), timeout=self._timeout)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):
                raise EngineError(f"{self.name} failed: {error}") from error
            raise error.cause from error
        except RayError as error:
            self._lost = EngineLost(f"{self.name}: {_reason(error, self._timeout)}{self._log_hint}")
            raise self._lost from error

    def _save_log(self, text: str | None) -> None:
        if self._logs is not None and self.info.log is not None and text is not None:
            (self._logs.folder / self.info.log.name).write_text(text)

    @property
    def _log_hint(self) -> str:
        log: Path | None = self.info.log
        return "" if log is None else f"; its log is {log} on {self.info.host}"


def wait_until_ready(
    results: Sequence[ObjectRef[Any]], actors: Sequence[Actor], *, quiet_seconds: float
) -> list[Any]:
    """The results of these calls to actors, regardless of how long the actors make progress.

    Raises the first exception of them, and `GetTimeoutError` if all of them and their children
    have hardly used the CPU for `quiet_seconds`: on a busy machine, loading a model takes many
    times as long as on an idle one, and an actor may have to wait for another.
    """
    until, used = monotonic() + quiet_seconds, 0.0
    waiting = list(results)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_SECONDS)
        ray.get(ready)
        if ready:
            continue
        with suppress(GetTimeoutError):
            calls = [a.cpu_seconds.options(concurrency_group=CONCURRENT).remote() for a in actors]
            now = sum(ray.get(calls, timeout=POLL_SECONDS))
            if now - used >= _PROGRESS_SHARE * quiet_seconds:
                until, used = monotonic() + quiet_seconds, now
        if monotonic() >= until:
            raise GetTimeoutError(f"timed out, no progress for {quiet_seconds:g} s")
    return list(ray.get(list(results)))


def kill_worker(actor: Actor) -> None:
    """End a worker's process, and those of its engine, which would live on without it."""
    with suppress(RayError):
        call = actor.kill_children.options(concurrency_group=CONCURRENT).remote()
        ray.get(call, timeout=_KILL_CHILDREN_SECONDS)
    ray.kill(actor)


def _reason(error: RayError, timeout_seconds: float) -> str:
    match error:
        case GetTimeoutError():
            return f"it has not answered for {timeout_seconds:g} s"
        case ActorDiedError(preempted=True):
            return "its node was preempted"
        case ActorDiedError() if "its node has died" in str(error):
            return "its machine is gone, or cannot be reached"
        case ActorDiedError():
            return "its process has died (killed, out of memory, or crashed)"
        case ActorUnavailableError():
            return "its node cannot be reached"
    return str(error).partition("\n")[0]
