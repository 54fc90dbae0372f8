"""Weights on their way to many workers: put into the object store once, fetched by each of them.

They stay there until every worker that is alive has taken them, and no longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from sortedrl.types import Weights

if TYPE_CHECKING:
    from ray import ObjectRef

    from sortedrl.cluster.buckets import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What taking over the weights was for one worker."""

    version: int
    bytes: int
    fetch_seconds: float
    load_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What one hand-over moved, and how long it took; of the workers, the slowest counts."""

    version: int
    workers: int
    buckets: int
    bytes: int
    """Of one copy of the weights; each machine fetches them once, however many workers it has."""
    put_seconds: float
    fetch_seconds: float
    load_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class Shipment:
    """Weights that lie in the object store."""

    weights: Weights
    buckets: Sequence[ObjectRef[Bucket]]
    bytes: int
    put_seconds: float
    taken: dict[int, Loading] = field(default_factory=dict)


class HandOvers:
    """All hand-overs of a run to its workers, which call it from threads of their own."""

    def __init__(self, report: Callable[[HandOver], None]) -> None:
        """`report` hears of each hand-over once it is complete."""
        self._report = report
        self._lock = threading.Lock()
        self._workers: set[int] = set()
        self._shipment: Shipment | None = None

    def join(self, worker: int) -> None:
        """From now on hand-overs wait for this worker too."""
        with self._lock:
            self._workers.add(worker)

    def leave(self, worker: int) -> None:
        """A worker is gone: nothing waits for it."""
        with self._lock:
            self._workers.discard(worker)
            complete = self._completed()
        self._tell(complete)

    def put(self, weights: Weights) -> Shipment:
        """The weights in the object store; the same object is put there once."""
        with self._lock:
            if self._shipment is None or self._shipment.weights is not weights:
                self._shipment = _shipped(weights)
            return self._shipment

    def taken(self, shipment: Shipment, loading: Loading, *, worker: int) -> None:
        """A worker has these weights now."""
        with self._lock:
            shipment.taken[worker] = loading
            complete = self._completed()
        self._tell(complete)

    def _completed(self) -> Shipment | None:
        """The shipment, let go of, if nobody has to take it any more."""
        shipment = self._shipment
        if shipment is None or not shipment.taken or not self._workers <= shipment.taken.keys():
            return None
        self._shipment = None
        return shipment

    def _tell(self, shipment: Shipment | None) -> None:
        if shipment is not None:
            taken = shipment.taken.values()
            self._report(
                HandOver(
                    version=shipment.weights.version,
                    workers=len(taken),
                    buckets=len(shipment.buckets),
                    bytes=shipment.bytes,
                    put_seconds=shipment.put_seconds,
                    fetch_seconds=max(loading.fetch_seconds for loading in taken),
                    load_seconds=max(loading.load_seconds for loading in taken),
                )
            )


def _shipped(weights: Weights) -> Shipment:
    start = perf_counter()
    references: list[ObjectRef[Bucket]] = []
    size = 0
    if weights.tensors is not None:
        import ray

        from sortedrl.cluster.buckets import buckets, num_bytes

        for part in buckets(weights.tensors):
            references.append(ray.put(part))
            size += num_bytes(part)
    return Shipment(
        weights=weights, buckets=references, bytes=size, put_seconds=perf_counter() - start
    )
