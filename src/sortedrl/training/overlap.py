"""A trainer whose updates run during the rollout, in a thread, one at a time.

    submit -> accepted -> begin -> in progress -> result -> finished

While an update is only accepted, the inner trainer is idle, and its weights are those before the
update: this is when the engine gets them. While it is in progress, nothing else uses that
trainer; version and numbers stay those before it until it has finished. So nothing depends on which
of the two is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.recorder import FinishedUpdate
from sortedrl.training.trainer import RunTrainer, Snapshot
from sortedrl.types import TrainBatch, Trajectory, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """An update in progress, and the state of the trainer before it."""

    batch: TrainBatch
    began: float
    ended: Future[float]
    version: int
    last: Mapping[str, float]


class OverlappedTrainer:
    """A `RunTrainer` around another one, and the loop's `Overlap`."""

    def __init__(self, trainer: RunTrainer, *, seconds: Callable[[], float]) -> None:
        """`seconds` is the clock; it is read in the thread of the update too."""
        self._trainer = trainer
        self._seconds = seconds
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="update")
        self._accepted: TrainBatch | None = None
        self._running: _Running | None = None
        self._finished: FinishedUpdate | None = None

    @property
    def version(self) -> int:
        """Number of updates behind the weights, that of an update in progress left out."""
        return self._trainer.version if self._running is None else self._running.version

    @property
    def last(self) -> Mapping[str, float]:
        """The numbers of the last update that has finished."""
        if self._running is not None:
            return self._running.last
        return {**self._trainer.last, **_numbers(self._finished)}

    @property
    def device(self) -> str:
        """The device it computes on, for display."""
        return self._trainer.device

    def update(self, batch: TrainBatch) -> None:
        """Train on the batch, and wait for it."""
        self._require_idle()
        self._finished = None
        self._trainer.update(batch)

    def submit(self, batch: TrainBatch) -> None:
        """Accept the batch of the next update."""
        self._require_idle()
        self._accepted = batch

    def begin(self) -> None:
        """Start the update that was submitted, in the background; without one, do nothing."""
        batch, self._accepted = self._accepted, None
        if batch is None:
            return
        version, last = self.version, self.last
        self._running = _Running(
            batch=batch,
            began=self._seconds(),
            ended=self._executor.submit(self._train, batch),
            version=version,
            last=last,
        )

    def result(self) -> FinishedUpdate | None:
        """Wait for the update that was submitted or begun; `None` if there is none.

        An exception of the update is raised here, on every call.
        """
        self.begin()
        running = self._running
        if running is None:
            return None
        waited_from = self._seconds()
        ended = running.ended.result()
        self._running = None
        self._finished = FinishedUpdate(
            batch=running.batch,
            version=self._trainer.version,
            took_seconds=ended - running.began,
            beside_seconds=min(waited_from, ended) - running.began,
        )
        return self._finished

    def weights(self) -> Weights:
        """The present weights: those before an update that is only accepted."""
        assert self._running is None, "weights are given while no update is in progress"
        return self._trainer.weights()

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The log-probabilities of the tokens of a few answers at temperature 1."""
        self._require_idle()
        return self._trainer.logprobs(trajectories)

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""
        self._require_idle()
        self._finished = None
        return self._trainer.flush()

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""
        self._require_idle()
        return self._trainer.save(folder, tokenizer=tokenizer)

    def snapshot(self, *, tokenizer: Any) -> Snapshot | None:  # noqa: ANN401
        """What `save` would write now, to be written later."""
        self._require_idle()
        return self._trainer.snapshot(tokenizer=tokenizer)

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model as a folder that transformers reads."""
        self._require_idle()
        self._trainer.export(folder, tokenizer=tokenizer)

    def close(self) -> None:
        """Close the trainer; an update that is still in progress is dropped."""
        # First, as this may be what ends it.
        self._trainer.close()
        self._executor.shutdown()

    def _train(self, batch: TrainBatch) -> float:
        self._trainer.update(batch)
        return self._seconds()

    def _require_idle(self) -> None:
        is_idle = self._accepted is None and self._running is None
        assert is_idle, "the update before must be finished first"


def _numbers(finished: FinishedUpdate | None) -> dict[str, float]:
    if finished is None:
        return {}
    return {
        "overlap/update_seconds": finished.took_seconds,
        "overlap/beside_seconds": finished.beside_seconds,
        "overlap/waited_seconds": finished.waited_seconds,
    }
