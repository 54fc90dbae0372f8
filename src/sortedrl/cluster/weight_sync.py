"""Weight sync: pushes each new version of the weights from the trainer to all rollout workers.

    push -> broadcast: source sends, workers receive  -> reached by all? done
         -> objects:   source puts, the rest fetch    -> ...
         -> disk:      source writes, the rest read   -> ...

Workers that a transport did not reach get the weights by the next one. A transport that fails in
three syncs in a row is not tried again. Objects and file are gone when the push returns. The same
workers keep their process group from sync to sync; as soon as a worker changes, or anything fails
in a group, the next broadcast has a new one. A worker that is lost during a push is left out.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, get_args

from sortedrl.cluster.weight_transport import (
    BroadcastDelivery,
    Delivery,
    DiskDelivery,
    ObjectDelivery,
    Rendezvous,
    TransportFailed,
    WeightSource,
)
from sortedrl.config.checks import require
from sortedrl.config.cluster import WeightTransport
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

if TYPE_CHECKING:
    from sortedrl.cluster.broadcast import RendezvousStore

_TRANSPORTS: Sequence[WeightTransport] = get_args(WeightTransport)
# One transport may fail, and the next must still end before the worker counts as lost.
_SHARE_OF_TIMEOUT = 1 / 5
_MOST_SECONDS = 60.0
# A transport that never works must not cost its timeout at every update.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoad:
    """The load of the weights by one worker."""

    version: int
    bytes: int
    buckets: int
    fetch_seconds: float
    load_seconds: float
    transport: WeightTransport | None = None
    """`None` where only the number of the version was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Bytes and seconds of one weight sync; of the workers, the slowest counts."""

    version: int
    workers: int
    transport: WeightTransport | None
    """The last one that a worker needed; `None` where there were no tensors."""
    buckets: int
    bytes: int
    """Of one copy of the weights."""
    put_seconds: float
    """Of the source: gathering them, and sending, putting or writing. In a broadcast the workers
    receive meanwhile."""
    fetch_seconds: float
    load_seconds: float
    seconds: float
    """Of the whole push, transports that failed included."""

    @property
    def metrics(self) -> dict[str, float]:
        """For the metrics row of an update."""
        return {
            "hand_over/seconds": self.seconds,
            "hand_over/bytes": float(self.bytes),
            "hand_over/buckets": float(self.buckets),
            "hand_over/workers": float(self.workers),
            "hand_over/put_seconds": self.put_seconds,
            "hand_over/fetch_seconds": self.fetch_seconds,
            "hand_over/load_seconds": self.load_seconds,
        }


class SyncTarget(Protocol):
    """A rollout worker that weights are pushed to."""

    @property
    def number(self) -> int:
        """The number of the worker."""

    def take_weights(self, weights: Weights, delivery: Delivery | None) -> WeightLoad:
        """Have the worker receive the weights, and wait; without a delivery, the version only.

        Raises `TransportFailed` if they did not arrive, and `EngineLost` if the worker is lost.
        """


def transports_from(first: WeightTransport) -> Sequence[WeightTransport]:
    """A transport, and those that are used if it fails.

    >>> transports_from("objects")
    ('objects', 'disk')
    """
    return _TRANSPORTS[_TRANSPORTS.index(first) :]


@dataclass(slots=True, kw_only=True)
class _Push:
    weights: Weights
    left: list[SyncTarget]
    """Workers that do not have the weights yet."""
    start: float = field(default_factory=perf_counter)
    loads: list[WeightLoad] = field(default_factory=list)
    put_seconds: dict[WeightTransport, float] = field(default_factory=dict)
    reasons: dict[WeightTransport, str] = field(default_factory=dict)
    """The first error of each transport that did not reach every worker."""

    def report(self) -> SyncReport:
        used = [load.transport for load in self.loads if load.transport is not None]
        transport = max(used, key=_TRANSPORTS.index, default=None)
        return SyncReport(
            version=self.weights.version,
            workers=len(self.loads),
            transport=transport,
            buckets=max(load.buckets for load in self.loads),
            bytes=max(load.bytes for load in self.loads),
            put_seconds=0.0 if transport is None else self.put_seconds[transport],
            fetch_seconds=max(load.fetch_seconds for load in self.loads),
            load_seconds=max(load.load_seconds for load in self.loads),
            seconds=perf_counter() - self.start,
        )


class WeightSync:
    """Pushes weights to workers. One push at a time; others wait for it."""

    def __init__(
        self,
        source: WeightSource | None,
        report: Callable[[SyncReport], None],
        *,
        warn: Callable[[str], None],
        transports: Sequence[WeightTransport],
        folder: Path | None,
        timeout_seconds: float,
    ) -> None:
        """Without a `source` the engines have no weights, and only versions are pushed.

        `report` gets each push to all workers once it is complete, `warn` each transport that
        failed. Files go to `folder`; without one, disk is left out.
        """
        self._transports = [name for name in transports if name != "disk" or folder is not None]
        require(
            bool(self._transports),
            "cluster.weight_sync disk needs a folder that all machines can read, got none; give "
            "one, or set it to objects",
        )
        self._source = source
        self._report = report
        self._warn = warn
        self._folder = folder
        self._seconds = min(_MOST_SECONDS, timeout_seconds * _SHARE_OF_TIMEOUT)
        self._groups = BroadcastGroups(seconds=self._seconds)
        self._failures: Counter[WeightTransport] = Counter()
        self._pushing = threading.Lock()

    def push(
        self, weights: Weights, workers: Sequence[SyncTarget], *, is_joining: bool = False
    ) -> None:
        """Push the weights to these workers; returns when each has them, or is lost.

        Workers that join others get them without a broadcast: a process group of their own is not
        worth it. Raises `EngineError` if no transport reached a worker that is alive.
        """
        transports = [name for name in self._transports if not is_joining or name != "broadcast"]
        with self._pushing:
            progress = _Push(weights=weights, left=list(workers))
            if self._source is None:
                self._deliver(progress, {worker.number: None for worker in workers}, transport=None)
            else:
                self._push_by(transports, progress, self._source)
            if progress.left:
                numbers = ", ".join(str(worker.number) for worker in progress.left)
                reasons = "; ".join(f"{name}: {why}" for name, why in progress.reasons.items())
                raise EngineError(
                    f"rollout worker {numbers} must have the weights of version {weights.version}, "
                    f"but every transport failed: {reasons}"
                )
            if progress.loads and not is_joining:
                self._report(progress.report())

    def close(self) -> None:
        """Leave the process group."""
        if self._source is not None:
            self._source.close()
        self._groups.close()

    def _push_by(
        self, transports: Sequence[WeightTransport], progress: _Push, source: WeightSource
    ) -> None:
        for transport in transports:
            if not progress.left:
                break
            start = perf_counter()
            try:
                if transport == "broadcast":
                    self._broadcast(progress, source)
                else:
                    with self._delivery(transport, source, progress.weights) as delivery:
                        progress.put_seconds[transport] = perf_counter() - start
                        deliveries = {worker.number: delivery for worker in progress.left}
                        self._deliver(progress, deliveries, transport=transport)
            except TransportFailed as error:
                progress.reasons[transport] = str(error)
            self._count(transport, progress)

    def _broadcast(self, progress: _Push, source: WeightSource) -> None:
        members = tuple(worker.number for worker in progress.left)
        rendezvous = self._groups.rendezvous(members)
        ranks = {number: rank for rank, number in enumerate(members, start=1)}
        sending = _SenderThread(
            lambda: source.send(progress.weights, rendezvous),
            failed=lambda: self._groups.leave_out(rendezvous, rank=0),
        )
        deliveries: dict[int, Delivery | None] = {
            number: BroadcastDelivery(rendezvous=rendezvous, rank=rank)
            for number, rank in ranks.items()
        }
        try:
            self._deliver(
                progress,
                deliveries,
                transport="broadcast",
                failed=lambda number: self._groups.leave_out(rendezvous, rank=ranks[number]),
            )
        finally:
            # The trainer may change the weights as soon as the push is over.
            sending.wait(seconds=self._seconds)
        progress.put_seconds["broadcast"] = sending.seconds
        sending.raise_failure(progress.reasons)

    @contextmanager
    def _delivery(
        self, transport: WeightTransport, source: WeightSource, weights: Weights
    ) -> Iterator[Delivery]:
        """Objects or a file with the weights, for all workers; removed afterwards."""
        if transport == "objects":
            yield ObjectDelivery(buckets=list(source.put(weights)), seconds=self._seconds)
            return
        assert self._folder is not None, "without a folder disk is left out"
        name = f"weights-{weights.version}-{uuid.uuid4().hex[:8]}.safetensors"
        path = self._folder.absolute() / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TransportFailed(f"{path.parent} could not be made: {error}") from error
        try:
            source.write(weights, path)
            yield DiskDelivery(path=path)
        finally:
            with suppress(OSError):  # a file that is left behind does no harm
                path.unlink(missing_ok=True)

    def _deliver(
        self,
        progress: _Push,
        deliveries: Mapping[int, Delivery | None],
        *,
        transport: WeightTransport | None,
        failed: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Have all workers that are left receive their delivery, in parallel.

        `failed` is called with the number of a worker as soon as that did not get it.
        """
        errors: list[Exception] = []
        left: list[SyncTarget] = []
        with ThreadPoolExecutor(max_workers=max(1, len(progress.left))) as threads:
            taking = {
                threads.submit(
                    worker.take_weights, progress.weights, deliveries[worker.number]
                ): worker
                for worker in progress.left
            }
            for future in as_completed(taking):
                worker, error = taking[future], future.exception()
                if error is None:
                    progress.loads.append(replace(future.result(), transport=transport))
                    continue
                failed(worker.number)
                if isinstance(error, TransportFailed) and transport is not None:
                    left.append(worker)
                    progress.reasons.setdefault(
                        transport, f"rollout worker {worker.number}: {error}"
                    )
                elif isinstance(error, EngineLost):
                    # The pool reports it, which is called next.
                    continue
                elif isinstance(error, Exception):
                    errors.append(error)
                else:
                    raise error
        progress.left = sorted(left, key=lambda worker: worker.number)
        if errors:
            raise errors[0]

    def _count(self, transport: WeightTransport, progress: _Push) -> None:
        """Warn of a transport that failed; one that fails again and again is disabled."""
        if transport not in progress.reasons:
            self._failures[transport] = 0
            return
        self._failures[transport] += 1
        later = self._transports[self._transports.index(transport) + 1 :]
        is_disabled = bool(later) and self._failures[transport] >= _TRIES
        if is_disabled:
            self._transports.remove(transport)
        following = f"{later[0]} is used instead" if later else "no other transport is left"
        never = f"; it failed {_TRIES} times in a row and is not tried again" if is_disabled else ""
        self._warn(
            f"weight sync of version {progress.weights.version} by {transport} failed "
            f"({progress.reasons[transport]}); {following}{never}"
        )


class BroadcastGroups:
    """The process groups of a sender and its workers, one at a time."""

    def __init__(self, *, seconds: float) -> None:
        """`seconds` is the time limit for joining, and for each bucket."""
        self._seconds = seconds
        self._store: RendezvousStore | None = None
        self._members: tuple[int, ...] | None = None
        self._key = ""
        self._changing = threading.Lock()

    def rendezvous(self, members: tuple[int, ...]) -> Rendezvous:
        """The rendezvous of these workers as ranks 1, 2, ... in order; rank 0 sends."""
        with self._changing:
            if self._store is None:
                import ray

                from sortedrl.cluster.broadcast import RendezvousStore

                host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
                self._store = RendezvousStore(host, seconds=self._seconds)
            if members != self._members:
                self._members = members
                self._key = uuid.uuid4().hex
            return Rendezvous(
                host=self._store.host,
                port=self._store.port,
                world=len(members) + 1,
                key=self._key,
                timeout=self._seconds,
            )

    def leave_out(self, rendezvous: Rendezvous, *, rank: int) -> None:
        """A rank failed: the others stop waiting for it, and the next broadcast has a new group."""
        with self._changing:
            if rendezvous.key == self._key:
                self._members = None
            if self._store is not None:
                try:
                    self._store.set_lost(rendezvous.key, rank=rank)
                except TransportFailed:
                    # Another store, at another port, may be reached.
                    self._store = None

    def close(self) -> None:
        """Close the store."""
        self._store = None


class _SenderThread:
    """The source's side of a broadcast: a thread that sends while the workers receive."""

    def __init__(self, send: Callable[[], None], *, failed: Callable[[], None]) -> None:
        """`failed` is called in that thread if the source raised."""
        self.seconds = 0.0
        self._send = send
        self._failed = failed
        self._error: BaseException | None = None
        # A daemon: a sender that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="weight-sync", daemon=True)
        self._thread.start()

    def wait(self, *, seconds: float) -> None:
        """Wait until the source is done with its weights, but no longer than that."""
        self._thread.join(timeout=seconds)

    def raise_failure(self, reasons: dict[WeightTransport, str]) -> None:
        """Raise the exception of the source; `TransportFailed` is only added to the reason."""
        if self._error is None:
            return
        if not isinstance(self._error, TransportFailed):
            raise self._error
        if "broadcast" in reasons:
            reasons["broadcast"] += f"; the sender: {self._error}"

    def _run(self) -> None:
        start = perf_counter()
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001  raised by the push
            self._error = error
            self._failed()
        self.seconds = perf_counter() - start
