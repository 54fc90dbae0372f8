"""The actor of a rollout worker: one engine, driven by a thread of its own.

The engine goes on from token to token while the controller is busy elsewhere; a call to `step`
takes what was done since the last one. So the controller is never asked between two tokens, and
the slower it is, the more it is told at once. The thread is that of a pool with one member.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter

from sortedrl.cluster.hand_over import Loading
from sortedrl.cluster.offer import Fetcher, Offer
from sortedrl.cluster.recipe import Recipe
from sortedrl.cluster.worker_log import LogFolder, WorkerLog
from sortedrl.engines.guest import Releasable
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.pool.member import Terms, submit_to
from sortedrl.errors import EngineLost
from sortedrl.types import Step, Trajectory, Weights

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
    host: str
    process: int
    log: Path | None


class RolloutWorker:
    """One engine in a process of its own. Only `check` may be called beside another call."""

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
            [member], warn=self._warn, spare=_ALL_THAT_COMES, patience_seconds=_FOR_EVER_SECONDS
        )
        return Facts(
            engine=member.name,
            slots=member.slots,
            version=member.version,
            host=socket.gethostname(),
            process=os.getpid(),
            log=self._log.path,
        )

    def check(self, trajectories: Sequence[Trajectory], terms: Terms) -> None:
        """Raise the `RequestError` that submitting these would raise."""
        self._engine.check(
            trajectories,
            tolerance=terms.tolerance,
            sampling=terms.sampling,
            max_tokens=terms.max_tokens,
        )

    def submit(self, trajectories: Sequence[Trajectory], terms: Terms) -> None:
        """Take on work; all of it or, if one is impossible, none."""
        self._require_engine()
        submit_to(self._engine, trajectories, terms)

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
