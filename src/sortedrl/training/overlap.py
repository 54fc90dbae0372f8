"""A trainer whose updates run beside the rollout, in a thread, one at a time.

    update -> accepted -> begin -> in progress -> settle -> finished

While an update is only accepted, the inner trainer is idle, and its weights are those before the
update: this is when the engine gets them. While it is in progress, nobody else touches that
trainer; version and numbers stay those before it until it has finished. So nothing depends on which
of the two is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.recorder import Landing
from sortedrl.training.trainer import RunTrainer
from sortedrl.types import TrainBatch, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """An update under way, and what is to be seen of the trainer meanwhile."""

    batch: TrainBatch
    began: float
    ended: Future[float]
    version: int
    last: Mapping[str, float]


class OverlappedTrainer:
    """A `RunTrainer` around another one, and the loop's `Overlap`."""

    def __init__(self, trainer: RunTrainer, *, seconds: Callable[[], float]) -> None:
        """Time is taken from `seconds`, which is asked in the thread of the update too."""
        self._trainer = trainer
        self._seconds = seconds
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="update")
        self._taken_on: TrainBatch | None = None
        self._flight: _Flight | None = None
        self._landing: Landing | None = None

    @property
    def version(self) -> int:
        """Number of updates behind the weights, that of an update under way left out."""
        return self._trainer.version if self._flight is None else self._flight.version

    @property
    def last(self) -> Mapping[str, float]:
        """The numbers of the last update that has landed."""
        if self._flight is not None:
            return self._flight.last
        return {**self._trainer.last, **_numbers(self._landing)}

    @property
    def device(self) -> str:
        """What it computes on, for a person."""
        return self._trainer.device

    def update(self, batch: TrainBatch) -> None:
        """Take a batch on; `begin` or `settle` trains on it."""
        self._require_idle()
        self._taken_on = batch

    def begin(self) -> None:
        """Train on the batch that was taken on, beside what follows; without one, do nothing."""
        batch, self._taken_on = self._taken_on, None
        if batch is None:
            return
        version, last = self.version, self.last
        self._flight = _Flight(
            batch=batch,
            began=self._seconds(),
            ended=self._executor.submit(self._train, batch),
            version=version,
            last=last,
        )

    def settle(self) -> Landing | None:
        """Wait for the update, begun or only taken on; `None` if there is none.

        What the update raised is raised here, each time it is asked for.
        """
        self.begin()
        flight = self._flight
        if flight is None:
            return None
        asked = self._seconds()
        ended = flight.ended.result()
        self._flight = None
        self._landing = Landing(
            batch=flight.batch,
            version=self._trainer.version,
            took_seconds=ended - flight.began,
            beside_seconds=min(asked, ended) - flight.began,
        )
        return self._landing

    def weights(self) -> Weights:
        """The present weights: those before an update that is only taken on."""
        assert self._flight is None, "weights are given while no update is under way"
        return self._trainer.weights()

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""
        self._require_idle()
        self._landing = None
        return self._trainer.flush()

    def save(self, folder: Path, *, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Write model and trainer into the folder of a checkpoint; gives the counters."""
        self._require_idle()
        return self._trainer.save(folder, tokenizer=tokenizer)

    def export(self, folder: Path, *, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the trained model as a folder that transformers reads."""
        self._require_idle()
        self._trainer.export(folder, tokenizer=tokenizer)

    def close(self) -> None:
        """Let go of the trainer; an update that is still under way is of no use any more."""
        # First, as this may be what ends it.
        self._trainer.close()
        self._executor.shutdown()

    def _train(self, batch: TrainBatch) -> float:
        self._trainer.update(batch)
        return self._seconds()

    def _require_idle(self) -> None:
        is_idle = self._taken_on is None and self._flight is None
        assert is_idle, "the update before must be settled first"


def _numbers(landing: Landing | None) -> dict[str, float]:
    if landing is None:
        return {}
    return {
        "overlap/update_seconds": landing.took_seconds,
        "overlap/beside_seconds": landing.beside_seconds,
        "overlap/waited_seconds": landing.waited_seconds,
    }
