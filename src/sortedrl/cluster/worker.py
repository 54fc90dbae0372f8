"""The actor of a rollout worker: one engine, driven by a thread of its own.

The engine is made inside the worker by a small frozen factory. Two workers with equal factories
have the same engine with the same weights, so one can continue the answers of the other.

The engine decodes while the controller is busy; a call to `step` returns the tokens and answers
since the last one. So decoding never waits for the controller, and the slower that is, the more one
call returns.

A worker logs to a file in the run folder. Where its machine does not see that folder it logs to a
local file, and the controller fetches the text when it closes the worker.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Protocol, TypeVar

from sortedrl.cluster.weight_sync import WeightLoad
from sortedrl.cluster.weight_transport import Delivery, WeightReceiver
from sortedrl.engines.generation import RolloutEngine, ScoringEngine, SleepableEngine, TokenScores
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import EngineLost
from sortedrl.rewards.pool.process import children_of, kill_descendants
from sortedrl.types import Step, Trajectory, Weights

if TYPE_CHECKING:
    from torch import Tensor

Merge = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]
"""Makes the weights of an engine, by name, of adapters."""

_Result = TypeVar("_Result")


class EngineFactory(Protocol):
    """Makes an engine in the process where it is called."""

    def engine(self) -> RolloutEngine:
        """A new engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFolder:
    """The folder of the logs, and the name of a file in it that identifies the folder."""

    folder: Path
    mark: str

    @classmethod
    def opened(cls, folder: Path) -> LogFolder:
        """Make the folder, with its mark."""
        folder.mkdir(parents=True, exist_ok=True)
        marks = sorted(folder.glob(".controller-*"))
        mark = marks[0].name if marks else f".controller-{uuid.uuid4().hex}"
        (folder / mark).touch()
        return cls(folder=folder.absolute(), mark=mark)

    @property
    def is_here(self) -> bool:
        """Whether this machine sees the folder."""
        return (self.folder / self.mark).exists()


def show_gpus(names: Sequence[str]) -> None:
    """Make only these GPUs visible: Ray shows all of them to an actor that reserves none.

    It must be called before CUDA is used.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def cpu_seconds_of(process: int) -> float:
    """Seconds of CPU of a process and of all below it: vLLM and SGLang load models in children."""
    own = 0.0
    # The process may have ended.
    with suppress(OSError):
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        # User and system time, its own and that of the children that it has waited for.
        own = sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_seconds_of, children_of(process)))


class WorkerLog:
    """Standard output and standard error of a process from now on, in a file."""

    def __init__(self, name: str, folder: LogFolder | None) -> None:
        """Redirect the output; without a folder Ray keeps it."""
        self.path: Path | None = None
        self.is_remote = False
        """Whether the file is outside the run folder."""
        if folder is None:
            return
        self.is_remote = not folder.is_here
        place = Path(tempfile.mkdtemp(prefix="sortedrl-")) if self.is_remote else folder.folder
        self.path = place / f"{name}.log"
        file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def remote_text(self) -> str | None:
        """The text of a log that the controller cannot read; `None` if it can, or has none."""
        if self.path is None or not self.is_remote:
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        return self.path.read_text(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The facts about a worker that the controller keeps."""

    engine: str
    slots: int
    version: int
    request_limits: Sequence[RequestLimits]
    host: str
    process: int
    log: Path | None


class EngineDriver:
    """The thread that makes all calls to an engine: submitted functions, and steps in between.

    An error of a step stops the stepping until `take_step` has raised it. An engine that is lost is
    not stepped again.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        """Start the thread."""
        self.engine = engine
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._finished: list[Trajectory] = []
        self._decoded = self._prefilled = 0
        self._running = 0
        self._error: Exception | None = None
        self._lost: EngineLost | None = None
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run this between two steps; returns its result, or raises its exception."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  raised where it was called
                future.set_exception(error)

        self._calls.put(run)
        return future.result()

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
    ) -> None:
        """Queue work: all of it, or none if one is refused."""
        self.require_engine()

        def submit() -> None:
            self.engine.submit(trajectories, tolerance=tolerance, sampling=sampling)
            self._running += len(trajectories)

        self.call(submit)

    def take_step(self, *, poll_seconds: float) -> Step:
        """The tokens and answers since the last one; waits for an answer, or `poll_seconds`."""
        until = monotonic() + poll_seconds
        with self._changed:
            while not (self._finished or (self._decoded and monotonic() >= until)):
                if self._error is not None:
                    error, self._error = self._error, None
                    self._wake()
                    raise error
                self.require_engine()
                if not self._running:
                    break
                self._changed.wait(max(0.0, until - monotonic()) if self._decoded else None)
            step = Step(
                finished=tuple(self._finished),
                decoded_tokens=self._decoded,
                prefilled_tokens=self._prefilled,
            )
            self._finished.clear()
            self._decoded = self._prefilled = 0
        return step

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory, even if the engine is lost.

        Answers that were completed since the last step come back as unfinished too.
        """

        def interrupt() -> Sequence[Trajectory]:
            stopped = self.engine.interrupt()
            with self._changed:
                complete = [replace(answer, finish_reason=None) for answer in self._finished]
                self._finished.clear()
                self._running = 0
            return [*complete, *stopped]

        return self.call(interrupt)

    def close(self) -> None:
        """Close the engine and end the thread."""
        try:
            self.call(self.engine.close)
        finally:
            self._calls.put(None)
            self._thread.join()

    def require_engine(self) -> None:
        """Raise `EngineLost` if the engine is lost."""
        if self._lost is not None:
            raise self._lost

    def _wake(self) -> None:
        """Make the thread check again whether it can step."""
        self._calls.put(lambda: None)

    def _drive(self) -> None:
        while True:
            can_step = self._running and self._error is None and self._lost is None
            try:
                call = self._calls.get(block=not can_step)
            except Empty:
                self._step()
                continue
            if call is None:
                return
            call()

    def _step(self) -> None:
        try:
            step = self.engine.step()
        except EngineLost as error:
            os.write(2, f"{error}\n".encode())
            with self._changed:
                self._lost = error
                self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  raised by the next step of the controller
            with self._changed:
                self._error = error
                self._changed.notify_all()
        else:
            with self._changed:
                self._finished += step.finished
                self._decoded += step.decoded_tokens
                self._prefilled += step.prefilled_tokens
                self._running -= len(step.finished)
                self._changed.notify_all()


class RolloutWorker:
    """One engine in a process of its own.

    Only `cpu_seconds` and `kill_children` may be called during another call.
    """

    def __init__(
        self,
        name: str,
        *,
        gpus: Sequence[str] | None,
        poll_seconds: float,
        logs: LogFolder | None,
    ) -> None:
        """A worker without an engine yet: an error in making one can then be reported.

        It uses these GPUs, or without `gpus` those that Ray has given it.
        """
        if gpus is not None:
            show_gpus(gpus)
        self._log = WorkerLog(name, logs)
        self._poll_seconds = poll_seconds
        self._receiver = WeightReceiver()

    def open(self, factory: EngineFactory, merge: Merge | None = None) -> WorkerInfo:
        """Make the engine; where adapters are received, `merge` makes its weights of them."""
        engine = factory.engine()
        self._merge = merge
        self._driver = EngineDriver(engine)
        return WorkerInfo(
            engine=engine.name,
            slots=engine.slots,
            version=engine.version,
            request_limits=engine.request_limits,
            host=socket.gethostname(),
            process=os.getpid(),
            log=self._log.path,
        )

    def cpu_seconds(self) -> float:
        """Seconds of CPU that the worker has used, which show whether it makes progress."""
        return cpu_seconds_of(os.getpid())

    def kill_children(self) -> None:
        """Kill the processes of the engine, if it has any, before the worker itself is killed."""
        kill_descendants(os.getpid())

    def score(self, trajectories: Sequence[Trajectory]) -> Sequence[TokenScores] | None:
        """The tokens of answers under the present weights; `None` if the engine cannot score."""
        engine = self._driver.engine
        if not isinstance(engine, ScoringEngine):
            return None
        return self._driver.call(lambda: engine.score(trajectories, sampling=Sampling()))

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
    ) -> None:
        """Queue work: all of it, or none if one is refused."""
        self._driver.submit(trajectories, tolerance=tolerance, sampling=sampling)

    def step(self) -> Step:
        """The tokens and answers since the last step; waits for an answer or the next report."""
        return self._driver.take_step(poll_seconds=self._poll_seconds)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory, even if the engine is lost."""
        return self._driver.interrupt()

    def load_weights(self, version: int, delivery: Delivery | None) -> WeightLoad:
        """Receive the weights and decode with them from now on; or only set the version.

        An engine that loads weights bucket by bucket gets each as it arrives. Raises
        `TransportFailed` if they did not arrive: the engine may have some of them, and must get all
        of them before it decodes.
        """
        self._driver.require_engine()
        start = perf_counter()
        received = None if delivery is None else self._receiver.receive(delivery)
        engine = self._driver.engine
        tensors: Mapping[str, Tensor] | None = received
        if received is not None and self._merge is not None:
            tensors = self._merge(dict(received.items()))
        weights = Weights(version, tensors, is_streamed=True)
        self._driver.call(lambda: engine.load_weights(weights))
        seconds = perf_counter() - start
        fetched = 0.0 if received is None else received.seconds
        return WeightLoad(
            version=engine.version,
            bytes=0 if received is None else received.bytes,
            buckets=0 if received is None else received.num_buckets,
            fetch_seconds=fetched,
            load_seconds=seconds - fetched,
        )

    def sleep(self) -> bool:
        """Free the memory that only generation needs, if the engine can; nothing is running.

        Returns whether the engine has dropped its weights.
        """
        engine = self._driver.engine
        return isinstance(engine, SleepableEngine) and self._driver.call(engine.sleep)

    def close(self) -> str | None:
        """Close the engine; returns the text of a log that the controller cannot read."""
        self._receiver.close()
        self._driver.close()
        return self._log.remote_text()
