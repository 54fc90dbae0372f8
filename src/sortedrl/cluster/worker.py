"""The actor of a rollout worker: one engine, driven by a thread of its own.

The engine is made inside the worker from a small frozen value. Two workers with equal values have
the same engine with the same weights, so one can continue what the other began.

The engine decodes while the controller is busy elsewhere; a call to `step` returns what was done
since the last one. So the controller is never waited for between two tokens, and the slower it is,
the more one call returns. The thread is that of a pool with one member.

A worker logs to a file in the run folder. Where its machine does not see that folder it logs to a
local file, and the controller fetches the text when it closes the worker.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Protocol

from sortedrl.cluster.weight_sync import Loading
from sortedrl.cluster.weight_transport import Fetcher, Offer
from sortedrl.core.clock import VirtualClock
from sortedrl.engines.generation import Releasable, RolloutEngine
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import EngineLost
from sortedrl.simulate.costs import Costs, ticks
from sortedrl.simulate.engine import SimulatedEngine
from sortedrl.simulate.lengths import Lengths, LengthSettings
from sortedrl.types import Step, Trajectory, Weights


class Recipe(Protocol):
    """Makes an engine in the process where it is called."""

    @property
    def has_weights(self) -> bool:
        """Whether its engine must be given tensors; a simulated one has none."""

    def engine(self) -> RolloutEngine:
        """A new engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRecipe:
    """The simulated engine, for trying out a cluster; it takes no time unless it is told to."""

    slots: int
    max_tokens: int
    lengths: LengthSettings = field(default_factory=LengthSettings)
    samples_per_prompt: int = 1
    costs: Costs = field(default_factory=ticks)
    seed: int = 0
    pause_seconds: float = 0.0
    """Real seconds of every step."""

    @property
    def has_weights(self) -> bool:
        """It writes with a number."""
        return False

    def engine(self) -> RolloutEngine:
        """A new engine with a clock of its own."""
        lengths = Lengths(
            self.lengths,
            seed=self.seed,
            max_tokens=self.max_tokens,
            samples_per_prompt=self.samples_per_prompt,
        )
        engine = SimulatedEngine(
            slots=self.slots, lengths=lengths, costs=self.costs, clock=VirtualClock()
        )
        return PacedEngine(engine, pause_seconds=self.pause_seconds)


class PacedEngine:
    """A simulated engine whose steps take time, for a worker to hold."""

    name = "simulated engine"

    def __init__(self, engine: SimulatedEngine, *, pause_seconds: float) -> None:
        """Each step takes so long."""
        self._engine = engine
        self._pause = pause_seconds

    @property
    def slots(self) -> int:
        """Answers written at the same time."""
        return self._engine.slots

    @property
    def version(self) -> int:
        """Version of the weights it would write with."""
        return self._engine.version

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """None: it accepts everything."""
        return ()

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work; lengths are drawn regardless of the sampling."""
        self._engine.submit(trajectories, tolerance=tolerance)

    def step(self) -> Step:
        """Work until the next answer is complete."""
        if self._pause:
            time.sleep(self._pause)
        return self._engine.step()

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back everything that is not complete."""
        return self._engine.interrupt()

    def load_weights(self, weights: Weights) -> None:
        """Take over the version."""
        self._engine.load_weights(weights)

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFolder:
    """The folder of the logs, and the name of a file in it that proves it is the same one."""

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


class WorkerLog:
    """All that a process says from now on, in a file."""

    def __init__(self, name: str, folder: LogFolder | None) -> None:
        """Begin; without a folder the words stay with Ray."""
        self.path: Path | None = None
        self.is_away = False
        """Whether the file is not in the folder of the run."""
        if folder is None:
            return
        self.is_away = not folder.is_here
        place = Path(tempfile.mkdtemp(prefix="sortedrl-")) if self.is_away else folder.folder
        self.path = place / f"{name}.log"
        file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def text_away(self) -> str | None:
        """The text of a file that the controller cannot see; `None` if it can, or there is none."""
        if self.path is None or not self.is_away:
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        return self.path.read_text(errors="replace")


# The engine has a queue of its own, and the controller's pool decides who gets how much.
_ALL_THAT_COMES = 1 << 40
# Whether a worker is silent for too long is for the controller to say.
_FOR_EVER_SECONDS = 1e8


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the controller knows of a worker without asking again."""

    engine: str
    slots: int
    version: int
    request_limits: Sequence[RequestLimits]
    host: str
    process: int
    log: Path | None


class RolloutWorker:
    """One engine in a process of its own."""

    def __init__(self, name: str, *, beat_seconds: float, logs: LogFolder | None) -> None:
        """A worker without an engine yet, so that what goes wrong in making one can be told."""
        self._log = WorkerLog(name, logs)
        self._beat = beat_seconds
        self._lost: str | None = None
        self._fetcher = Fetcher()
        self._finished: list[Trajectory] = []
        self._decoded = self._prefilled = 0

    def open(self, recipe: Recipe) -> Facts:
        """Make the engine."""
        member = recipe.engine()
        self._member = member
        self._engine = EnginePool(
            [member],
            warn=self._warn,
            queue_depth=_ALL_THAT_COMES,
            timeout_seconds=_FOR_EVER_SECONDS,
        )
        return Facts(
            engine=member.name,
            slots=member.slots,
            version=member.version,
            request_limits=member.request_limits,
            host=socket.gethostname(),
            process=os.getpid(),
            log=self._log.path,
        )

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
    ) -> None:
        """Queue work: all of it, or none if one is refused."""
        self._require_engine()
        self._engine.submit(trajectories, tolerance=tolerance, sampling=sampling)

    def step(self) -> Step:
        """What was done since the last step.

        It waits for a complete answer, but no longer than a beat if tokens were written.
        """
        until = monotonic() + self._beat
        is_idle = False
        # What was taken in before an exception is told by the next step.
        while not (self._finished or is_idle or (self._decoded and monotonic() >= until)):
            self._require_engine()
            step = self._engine.step()
            self._finished += step.finished
            self._decoded += step.decoded_tokens
            self._prefilled += step.prefilled_tokens
            is_idle = not (step.finished or step.decoded_tokens)
        step = Step(
            finished=tuple(self._finished),
            decoded_tokens=self._decoded,
            prefilled_tokens=self._prefilled,
        )
        self._finished.clear()
        self._decoded = self._prefilled = 0
        return step

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory, even if the engine is lost."""
        complete = [replace(answer, finish_reason=None) for answer in self._finished]
        self._finished.clear()
        return [*complete, *self._engine.interrupt()]

    def load_weights(self, version: int, offer: Offer | None) -> Loading:
        """Take the weights and write with them from now on; without an offer only the version.

        Raises `WayFailed` if they did not come; the engine has its old weights then.
        """
        self._require_engine()
        start = perf_counter()
        fetched = None if offer is None else self._fetcher.fetched(offer)
        here = perf_counter()
        self._engine.load_weights(Weights(version, None if fetched is None else fetched.tensors))
        return Loading(
            version=self._engine.version,
            bytes=0 if fetched is None else fetched.bytes,
            buckets=0 if fetched is None else fetched.buckets,
            fetch_seconds=here - start,
            load_seconds=perf_counter() - here,
        )

    def release(self) -> None:
        """Let go of what only writing needs, if the engine can; nothing is being written."""
        if isinstance(self._member, Releasable):
            self._member.release()

    def close(self) -> str | None:
        """Close the engine; gives the text of a log that the controller cannot see."""
        self._fetcher.close()
        self._engine.close()
        return self._log.text_away()

    def _require_engine(self) -> None:
        if self._lost is not None and not self._engine.slots:
            raise EngineLost(self._lost)

    def _warn(self, words: str) -> None:
        self._lost = words
        os.write(2, f"{words}\n".encode())
