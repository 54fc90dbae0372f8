"""Weight sync from the trainer to all workers: by broadcast, through the object store, or on disk.

    group     sender and workers join a process group, and the source broadcasts
    objects   the source puts the weights into the object store once, each worker fetches them
    disk      the source writes a file once, each worker reads it

Where one transport fails for a worker, that worker uses the next. Objects and file stay until every
living worker has the weights, and no longer. A broadcast runs in a thread of its own, while the
workers receive. The same workers keep their process group from sync to sync; as soon as a worker
changes or anything fails in a group, the next one has a new key.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, get_args

from sortedrl.cluster.weight_transport import (
    InGroup,
    InObjects,
    LocalSource,
    Meeting,
    Offer,
    OnDisk,
    WayFailed,
    WeightSource,
)
from sortedrl.config.checks import require
from sortedrl.config.cluster import HandOverWay
from sortedrl.errors import EngineError
from sortedrl.types import Weights

if TYPE_CHECKING:
    from sortedrl.cluster.broadcast import MeetingPlace, Sender


class Meetings:
    """All meetings of one sender with its workers. Used by one thread at a time."""

    def __init__(self, *, seconds: float) -> None:
        """Members have so long to come, and so long for each bucket."""
        self._seconds = seconds
        self._place: MeetingPlace | None = None
        self._members: tuple[int, ...] | None = None
        self._key = ""

    def called(self, members: tuple[int, ...]) -> Meeting:
        """The meeting of these workers, who are ranks 1, 2, ... in order; rank 0 sends."""
        if self._place is None:
            import ray

            from sortedrl.cluster.broadcast import MeetingPlace

            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._place = MeetingPlace(host, seconds=self._seconds)
        if members != self._members:
            self._members = members
            self._key = uuid.uuid4().hex
        return Meeting(
            host=self._place.host,
            port=self._place.port,
            world=len(members) + 1,
            key=self._key,
            timeout=self._seconds,
        )

    def give_up(self, meeting: Meeting, *, rank: int) -> None:
        """A member failed: nobody waits for it, and the next meeting is of a new group."""
        if meeting.key == self._key:
            self._members = None
        if self._place is not None:
            try:
                self._place.miss(meeting.key, rank=rank)
            except WayFailed:
                # Another store, at another port, may be reached.
                self._place = None

    def close(self) -> None:
        """Let go of the place."""
        self._place = None


class Sending:
    """A source that sends to these workers from now on."""

    def __init__(
        self,
        source: WeightSource,
        meeting: Meeting,
        *,
        members: Sequence[int],
        failed: Callable[[Sending], None],
    ) -> None:
        """`failed` is called in the thread of the sending, if that does not end well."""
        self.meeting = meeting
        self.members = members
        self.seconds = 0.0
        self._source = source
        self._failed = failed
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="hand-over", daemon=True)
        self._thread.start()

    def rank(self, worker: int) -> int:
        """The rank of a worker in the group."""
        return 1 + self.members.index(worker)

    def wait(self, *, seconds: float) -> None:
        """Wait until the source is done with its weights, but no longer than that."""
        self._thread.join(timeout=seconds)

    def raise_other(self) -> None:
        """Raise what the source raised, unless it only says that this way failed."""
        if self._error is not None and not isinstance(self._error, WayFailed):
            raise self._error

    def raise_reason(self, failure: WayFailed) -> None:
        """Raise what the source raised, now that a worker failed: it may be why."""
        self.raise_other()
        if self._error is not None:
            raise WayFailed(f"{failure}; the sender: {self._error}") from failure

    def _send(self) -> None:
        start = perf_counter()
        try:
            self._source.send(self.meeting)
        except BaseException as error:  # noqa: BLE001  raised in the threads of the workers
            self._error = error
            self._failed(self)
        self.seconds = perf_counter() - start


_WAYS: Sequence[HandOverWay] = get_args(HandOverWay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What taking over the weights was for one worker."""

    version: int
    bytes: int
    buckets: int
    fetch_seconds: float
    load_seconds: float
    way: HandOverWay | None = None
    """`None` where only the number of the version was handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What one hand-over moved, and how long it took; of the workers, the slowest counts."""

    version: int
    workers: int
    way: HandOverWay | None
    """The last one that a worker had to take; `None` where there were no tensors."""
    buckets: int
    bytes: int
    """Of one copy of the weights."""
    put_seconds: float
    """Of the source: gathering them, and sending, putting or writing. In a group the workers
    receive meanwhile."""
    fetch_seconds: float
    load_seconds: float
    seconds: float
    """From the first worker that asked to the last that had them, ways that failed included."""


def ways_from(first: HandOverWay) -> Sequence[HandOverWay]:
    """A way, and those that are taken if it fails.

    >>> ways_from("objects")
    ('objects', 'disk')
    """
    return _WAYS[_WAYS.index(first) :]


@dataclass(slots=True, kw_only=True, eq=False)
class Shipment:
    """Weights on their way."""

    weights: Weights
    source: WeightSource | None
    ways: Sequence[HandOverWay]
    start: float
    """When the first worker asked for them."""
    making: threading.Lock = field(default_factory=threading.Lock)
    """Held by the worker that has the source make something for all."""
    made: dict[HandOverWay, Offer | WayFailed] = field(default_factory=dict)
    put_seconds: dict[HandOverWay, float] = field(default_factory=dict)
    failed: set[HandOverWay] = field(default_factory=set)
    """Ways that did not bring them to some worker."""
    arrived: set[int] = field(default_factory=set)
    """Workers that came to the meeting of the group."""
    sending: Sending | WayFailed | None = None
    taken: dict[int, Loading] = field(default_factory=dict)

    def told(self) -> HandOver:
        """What this hand-over was, now that it is over."""
        taken = list(self.taken.values())
        ways = [loading.way for loading in taken if loading.way is not None]
        way = max(ways, key=_WAYS.index, default=None)
        return HandOver(
            version=self.weights.version,
            workers=len(taken),
            way=way,
            buckets=max(loading.buckets for loading in taken),
            bytes=max(loading.bytes for loading in taken),
            put_seconds=0.0 if way is None else self.put_seconds[way],
            fetch_seconds=max(loading.fetch_seconds for loading in taken),
            load_seconds=max(loading.load_seconds for loading in taken),
            seconds=perf_counter() - self.start,
        )

    def remove_file(self) -> None:
        """Nobody reads the file any more."""
        made = self.made.get("disk")
        if isinstance(made, OnDisk):
            # What is left behind is only in the way.
            with suppress(OSError):
                made.path.unlink(missing_ok=True)


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
        from sortedrl.cluster.broadcast import Sender

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
