"""Weights on their way to many workers: over a group, through the object store, or on disk.

    group     the workers meet here, then all of them receive what the source broadcasts
    objects   the source puts the weights into the object store once, each worker fetches them
    disk      the source writes a file once, each worker reads it

Where a way fails for a worker, this worker takes the next. Objects and file stay until every
worker that is alive has the weights, and no longer.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from sortedrl.cluster.meetings import Meetings
from sortedrl.cluster.offer import InGroup, InObjects, Offer, OnDisk
from sortedrl.cluster.sending import Sending
from sortedrl.cluster.shipment import HandOver, Loading, Shipment, ways_from
from sortedrl.cluster.weight_source import LocalSource, WayFailed, WeightSource
from sortedrl.config import require
from sortedrl.errors import EngineError
from sortedrl.training.cluster import HandOverWay
from sortedrl.types import Weights

if TYPE_CHECKING:
    from sortedrl.cluster.bridge import Sender

__all__ = ["HandOver", "HandOvers", "Loading", "ways_from"]

# One way may fail, and the next must still end before the worker counts as lost.
_SHARE_OF_PATIENCE = 1 / 5
_MOST_SECONDS = 60.0
# A way that never works must not cost its timeout at every update.
_TRIES = 3


class HandOvers:
    """All hand-overs of a run to its workers, which call it from threads of their own."""

    def __init__(
        self,
        report: Callable[[HandOver], None],
        *,
        warn: Callable[[str], None],
        ways: Sequence[HandOverWay],
        folder: Path | None,
        patience_seconds: float,
    ) -> None:
        """`report` hears of each hand-over once it is complete, `warn` of a way that failed.

        Files go to `folder`; without one the last way is left out.
        """
        self._ways = [way for way in ways if way != "disk" or folder is not None]
        require(
            bool(self._ways),
            "cluster.hand_over disk needs a folder that all machines see, got none; give one, or "
            "take objects",
        )
        self._report = report
        self._warn = warn
        self._folder = folder
        self._seconds = min(_MOST_SECONDS, patience_seconds * _SHARE_OF_PATIENCE)
        self._meetings = Meetings(seconds=self._seconds)
        self._sender: Sender | None = None
        self._changed = threading.Condition()
        self._warning = threading.Lock()
        self._workers: set[int] = set()
        self._shipment: Shipment | None = None
        self._failures: Counter[HandOverWay] = Counter()

    def join(self, worker: int) -> None:
        """From now on hand-overs wait for this worker too."""
        with self._changed:
            self._workers.add(worker)

    def leave(self, worker: int) -> None:
        """A worker is gone: nothing waits for it."""
        with self._changed:
            self._workers.discard(worker)
            shipment = self._shipment
            if shipment is not None and isinstance(shipment.sending, Sending):
                self._give_up(shipment.sending, worker)
            complete = self._completed()
            self._changed.notify_all()
        self._tell(complete)

    def deliver(
        self, weights: Weights, *, worker: int, take: Callable[[Offer | None], Loading]
    ) -> Loading:
        """Bring the weights to a worker, which is asked to `take` one offer after the other.

        The offer is `None` where there are no tensors. `take` raises `WayFailed` for the next.
        """
        shipment = self._shipped(weights)
        if shipment.source is None:
            loading = take(None)
        else:
            loading = self._brought(shipment, worker=worker, take=take)
        with self._changed:
            shipment.taken[worker] = loading
            complete = self._completed()
        self._tell(complete)
        return loading

    def close(self) -> None:
        """Let go of everything; no hand-over is under way."""
        with self._changed:
            shipment, self._shipment = self._shipment, None
        if shipment is not None:
            shipment.remove_file()
        if self._sender is not None:
            self._sender.close()
        self._meetings.close()

    def _shipped(self, weights: Weights) -> Shipment:
        """The shipment of these weights; the same object travels once."""
        with self._changed:
            old = self._shipment
            if old is not None and old.weights is weights:
                return old
            self._shipment = Shipment(
                weights=weights,
                source=self._source(weights),
                ways=tuple(self._ways),
                start=perf_counter(),
            )
            if old is not None:
                old.remove_file()
            return self._shipment

    def _source(self, weights: Weights) -> WeightSource | None:
        tensors = weights.tensors
        if tensors is None or isinstance(tensors, WeightSource):
            return tensors
        from sortedrl.cluster.bridge import Sender

        if self._sender is None:
            self._sender = Sender.beside(tensors)
        return LocalSource(tensors, sender=self._sender)

    def _brought(
        self, shipment: Shipment, *, worker: int, take: Callable[[Offer | None], Loading]
    ) -> Loading:
        reasons = []
        for way in shipment.ways:
            try:
                if way == "group":
                    loading = self._in_group(shipment, worker=worker, take=take)
                else:
                    loading = take(self._made(shipment, way))
            except WayFailed as error:
                reasons.append(f"{way}: {error}")
                self._fail(shipment, way, words=f"rollout worker {worker}: {error}")
            else:
                return replace(loading, way=way)
        raise EngineError(
            f"rollout worker {worker} must have the weights of version "
            f"{shipment.weights.version}, but no way brought them: {'; '.join(reasons)}"
        )

    def _in_group(
        self, shipment: Shipment, *, worker: int, take: Callable[[Offer | None], Loading]
    ) -> Loading:
        sending = self._met(shipment, worker)
        try:
            loading = take(InGroup(meeting=sending.meeting, rank=sending.rank(worker)))
        except BaseException as error:
            with self._changed:
                self._give_up(sending, worker)
            sending.wait(seconds=self._seconds)
            if isinstance(error, WayFailed):
                sending.raise_reason(error)
            raise
        # The trainer may change the weights as soon as all workers have come back.
        sending.wait(seconds=self._seconds)
        sending.raise_other()
        with self._changed:
            shipment.put_seconds["group"] = sending.seconds
        return loading

    def _met(self, shipment: Shipment, worker: int) -> Sending:
        """The sending that this worker is part of, once all workers are here."""
        with self._changed:
            shipment.arrived.add(worker)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: shipment.sending is not None or self._workers <= shipment.arrived,
                timeout=self._seconds,
            )
            if shipment.sending is None:
                shipment.sending = self._called(shipment)
                self._changed.notify_all()
            sending = shipment.sending
        if isinstance(sending, WayFailed):
            raise sending
        if worker not in sending.members:
            raise WayFailed("it came when the others had met")
        return sending

    def _called(self, shipment: Shipment) -> Sending | WayFailed:
        late = self._workers - shipment.arrived
        if late:
            names = ", ".join(map(str, sorted(late)))
            return WayFailed(
                f"rollout worker {names} did not come to the meeting in {self._seconds:g} s"
            )
        members = tuple(sorted(shipment.arrived & self._workers))
        assert shipment.source is not None, "only tensors are sent"
        try:
            meeting = self._meetings.called(members)
        except WayFailed as error:
            return error
        return Sending(shipment.source, meeting, members=members, failed=self._sender_failed)

    def _sender_failed(self, sending: Sending) -> None:
        with self._changed:
            self._meetings.give_up(sending.meeting, rank=0)

    def _give_up(self, sending: Sending, worker: int) -> None:
        if worker in sending.members:
            self._meetings.give_up(sending.meeting, rank=sending.rank(worker))

    def _made(self, shipment: Shipment, way: HandOverWay) -> Offer:
        """What the source made for all workers, the first of whom waits for it."""
        with shipment.making:
            if way not in shipment.made:
                start = perf_counter()
                try:
                    shipment.made[way] = self._make(shipment, way)
                except WayFailed as error:
                    shipment.made[way] = error
                shipment.put_seconds[way] = perf_counter() - start
            made = shipment.made[way]
        if isinstance(made, WayFailed):
            raise made
        return made

    def _make(self, shipment: Shipment, way: HandOverWay) -> Offer:
        assert shipment.source is not None, "only tensors are put anywhere"
        if way == "objects":
            return InObjects(buckets=list(shipment.source.ship()), seconds=self._seconds)
        assert self._folder is not None, "without a folder this way is left out"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WayFailed(f"{self._folder} could not be made: {error}") from error
        name = f"weights-{shipment.weights.version}-{uuid.uuid4().hex[:8]}.safetensors"
        path = self._folder.absolute() / name
        shipment.source.write(path)
        return OnDisk(path=path)

    def _fail(self, shipment: Shipment, way: HandOverWay, *, words: str) -> None:
        """Say that a way failed, once in a hand-over; if it always does, try it no more."""
        with self._changed:
            is_news = way not in shipment.failed
            shipment.failed.add(way)
            self._failures[way] += is_news
            later = shipment.ways[shipment.ways.index(way) + 1 :]
            is_over = bool(later) and self._failures[way] >= _TRIES and way in self._ways
            if is_over:
                self._ways.remove(way)
        if is_news:
            next_way = f"{later[0]} is taken instead" if later else "no other way is left"
            never = f"; it failed {_TRIES} times in a row and is not tried again" if is_over else ""
            with self._warning:
                self._warn(
                    f"the weights of version {shipment.weights.version} could not be handed over "
                    f"by {way} ({words}); {next_way}{never}"
                )

    def _completed(self) -> Shipment | None:
        """The shipment, let go of, if nobody has to take it any more."""
        shipment = self._shipment
        if shipment is None or not shipment.taken or not self._workers <= shipment.taken.keys():
            return None
        self._shipment = None
        for way in set(self._failures) - shipment.failed:
            self._failures[way] = 0
        return shipment

    def _tell(self, shipment: Shipment | None) -> None:
        if shipment is not None:
            shipment.remove_file()
            self._report(shipment.told())
