"""The three weight transports: how a source sends, and how a worker receives.

    broadcast   over a process group       BroadcastDelivery
    objects     through the object store   ObjectDelivery
    disk        through a file             DiskDelivery

A source is a trainer in this process or one of many ranks. A source or a worker that cannot use a
transport raises `TransportFailed`, and the next one is used; any other exception ends the weight
sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from sortedrl.errors import EngineError
from sortedrl.types import Weights

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch import Tensor

    from sortedrl.cluster.broadcast import BroadcastReceiver, BroadcastSender
    from sortedrl.cluster.buckets import Bucket


BROADCAST_BYTES = 16 << 20
"""Of a bucket of a broadcast: small enough for the allocator to reuse its memory."""
OBJECT_BYTES = 256 << 20
"""Of a bucket in the object store."""


class TransportFailed(EngineError):
    """A weight transport that did not work; another may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the sender and the workers form a process group; the sender is rank 0."""

    host: str
    port: int
    """Of a store that the controller keeps; the weights themselves do not pass through it."""
    world: int
    """The sender and all workers."""
    key: str
    """The name of the process group; a rank that is in a group of this name keeps using it."""
    timeout: float
    """Seconds that all ranks have to join, and then for each bucket."""


class WeightSource(Protocol):
    """Sends the weights of a trainer by each of the transports; kept for the whole run."""

    def put(self, weights: Weights) -> Sequence[ObjectRef[Bucket]]:
        """Put them into the object store, in buckets."""

    def send(self, weights: Weights, rendezvous: Rendezvous) -> None:
        """Broadcast them to the workers that join; returns when all have them."""

    def write(self, weights: Weights, path: Path) -> None:
        """Write them as one safetensors file, which is complete as soon as it is there."""

    def close(self) -> None:
        """Leave the process group."""


class LocalSource:
    """The weights of a trainer in the process of the controller: those that come with tensors."""

    def __init__(self) -> None:
        """There is no process group yet."""
        self._sender: BroadcastSender | None = None

    def put(self, weights: Weights) -> Sequence[ObjectRef[Bucket]]:
        """Put them into the object store, in buckets."""
        from sortedrl.cluster.buckets import parts

        return put_objects(parts(_tensors(weights).items(), bucket_bytes=OBJECT_BYTES))

    def send(self, weights: Weights, rendezvous: Rendezvous) -> None:
        """Broadcast them to the workers that join."""
        from sortedrl.cluster.broadcast import BroadcastSender
        from sortedrl.cluster.buckets import parts

        tensors = _tensors(weights)
        if self._sender is None:
            self._sender = BroadcastSender.for_tensors(tensors)
        self._sender.send(rendezvous, parts(tensors.items(), bucket_bytes=BROADCAST_BYTES))

    def write(self, weights: Weights, path: Path) -> None:
        """Write them as one safetensors file."""
        from sortedrl.cluster.buckets import as_tensor

        named = {name: as_tensor(name, given) for name, given in _tensors(weights).items()}
        write_weights(named.items(), path, like=named)

    def close(self) -> None:
        """Leave the process group."""
        if self._sender is not None:
            self._sender.close()


def _tensors(weights: Weights) -> Mapping[str, object]:
    if weights.tensors is None:
        raise EngineError(
            "rollout workers share no memory with the trainer, so new weights must come with "
            f"their tensors; version {weights.version} came without"
        )
    return weights.tensors


def put_objects(parts: Iterable[Sequence[tuple[str, Tensor]]]) -> list[ObjectRef[Bucket]]:
    """Put all parts into the object store; raises `TransportFailed` if it does not take them.

    The parts are always taken to their end, so ranks that gather them together stay in step.
    """
    import ray
    from ray.exceptions import RayError

    from sortedrl.cluster.buckets import bucket

    coming = iter(parts)
    try:
        return [ray.put(bucket(part)) for part in coming]
    except RayError as error:
        raise TransportFailed(
            f"the object store did not take the weights: {first_line(error)}"
        ) from error
    finally:
        deque(coming, maxlen=0)


def write_weights(
    tensors: Iterable[tuple[str, Tensor]], path: Path, *, like: Mapping[str, Tensor]
) -> None:
    """Write one safetensors file under another name, and rename it; tied tensors come twice.

    One tensor at a time is in memory; `like` has their dtypes and shapes. Raises `TransportFailed`
    if it cannot be written.
    """
    from sortedrl.training.checkpoint import TensorFile

    partial = path.with_name(f"{path.name}.partial")
    try:
        file = TensorFile(partial, like)
        for name, tensor in tensors:
            file.add(name, tensor)
        file.close()
        partial.replace(path)
    except OSError as error:
        raise TransportFailed(f"{path} could not be written: {first_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of such a file, on the CPU; raises `TransportFailed` if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise TransportFailed(f"{path} could not be read: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of the message of an exception."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def as_transport_failure(what: str) -> Iterator[None]:
    """Turn what torch and the network raise into `TransportFailed`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise TransportFailed(f"{what}: {first_line(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastDelivery:
    """Weights that are broadcast to all workers of a process group."""

    rendezvous: Rendezvous
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDelivery:
    """Weights in the object store."""

    buckets: Sequence[ObjectRef[Bucket]]
    seconds: float
    """How long fetching one of them may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskDelivery:
    """Weights in a safetensors file."""

    path: Path


Delivery = BroadcastDelivery | ObjectDelivery | DiskDelivery


class ReceivedWeights(Mapping[str, "Tensor"]):
    """Weights that arrive at a worker bucket by bucket.

    `items` gives the tensors of a bucket as soon as it has arrived, and keeps none of them: it can
    be iterated once. Everything else waits for all of them first.
    """

    def __init__(self, buckets: Iterator[Mapping[str, Tensor]]) -> None:
        """Nothing has arrived yet."""
        self.bytes = 0
        self.num_buckets = 0
        self.seconds = 0.0
        """Spent on waiting for buckets."""
        self._coming = buckets
        self._is_begun = False
        self._all: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._whole)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._whole)

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors, as they arrive."""
        return _ArrivingItems(self) if self._all is None else self._all.items()

    def arriving(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors as they arrive; raises `TransportFailed` if they do not."""
        assert not self._is_begun, "weights that arrive are iterated once"
        self._is_begun = True
        while True:
            start = perf_counter()
            try:
                bucket = next(self._coming, None)
            finally:
                self.seconds += perf_counter() - start
            if bucket is None:
                return
            self.num_buckets += 1
            self.bytes += sum(tensor.nbytes for tensor in bucket.values())
            yield from bucket.items()

    @property
    def _whole(self) -> Mapping[str, Tensor]:
        if self._all is None:
            self._all = dict(self.arriving())
        return self._all


class _ArrivingItems(ItemsView[str, "Tensor"]):
    """The items of weights that are still arriving."""

    def __init__(self, weights: ReceivedWeights) -> None:
        super().__init__(weights)
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights.arriving()


class WeightReceiver:
    """The receiving end of all transports, in a worker."""

    def __init__(self) -> None:
        """Nothing was received yet."""
        self._receiver: BroadcastReceiver | None = None

    def receive(self, delivery: Delivery) -> ReceivedWeights:
        """The weights as they arrive; they must be read only, and not be kept.

        Iterating raises `TransportFailed` if they do not arrive.
        """
        match delivery:
            case BroadcastDelivery():
                return ReceivedWeights(self._broadcast(delivery))
            case ObjectDelivery():
                return ReceivedWeights(_from_objects(delivery))
            case DiskDelivery():
                return ReceivedWeights(_from_disk(delivery))

    def close(self) -> None:
        """Leave the process group."""
        if self._receiver is not None:
            self._receiver.close()

    def _broadcast(self, delivery: BroadcastDelivery) -> Iterator[Mapping[str, Tensor]]:
        from sortedrl.cluster.broadcast import BroadcastReceiver

        if self._receiver is None:
            self._receiver = BroadcastReceiver(_device())
        yield from self._receiver.buckets(delivery.rendezvous, delivery.rank)


def _device() -> str:
    """The device of this worker's weights: a worker sees its own GPUs only."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _from_objects(delivery: ObjectDelivery) -> Iterator[Mapping[str, Tensor]]:
    import ray
    from ray.exceptions import RayError

    from sortedrl.cluster.buckets import unpacked

    for bucket in delivery.buckets:
        try:
            part = ray.get(bucket, timeout=delivery.seconds)
        except RayError as error:
            raise TransportFailed(f"an object could not be fetched: {first_line(error)}") from error
        yield unpacked([part])


def _from_disk(delivery: DiskDelivery) -> Iterator[Mapping[str, Tensor]]:
    yield read_weights(delivery.path)
