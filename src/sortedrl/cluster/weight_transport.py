"""The sources of weights, a trainer here or one of many ranks, and how a worker receives them.

A source can broadcast the weights, put them into the object store, or write them to a file, and a
worker is told which of the three to expect. A source that cannot use a transport raises
`WayFailed`, and the next one is used; anything else that it raises ends the sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sortedrl.errors import EngineError

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch import Tensor

    from sortedrl.cluster.broadcast import Bucket, Receiver, Sender


SENT_BYTES = 16 << 20
"""Of a bucket on its way over a group: below what a process gives back to the system at once, so
memory is used again."""
_SHIPPED_BYTES = 256 << 20


class WayFailed(EngineError):
    """One way of handing weights over that did not work; another may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the sender and the workers meet to form a group; the sender is rank 0."""

    host: str
    port: int
    """Of a store that the controller keeps; the weights themselves do not pass through it."""
    world: int
    """The sender and all workers."""
    key: str
    """The name of this group of members. Who has a group of this name goes on with it."""
    timeout: float
    """Seconds that all members have to come, and then for each bucket."""


@runtime_checkable
class WeightSource(Protocol):
    """Weights that can be asked to travel."""

    def ship(self) -> Sequence[ObjectRef[Bucket]]:
        """Put them into the object store, in buckets."""

    def send(self, meeting: Meeting) -> None:
        """Broadcast them to the workers that come to the meeting; returns when all have them."""

    def write(self, path: Path) -> None:
        """Write them as one safetensors file, which is complete as soon as it is there."""


class LocalSource:
    """The weights of a trainer in the process of the controller."""

    def __init__(self, tensors: Mapping[str, object], *, sender: Sender | None = None) -> None:
        """With a `sender` its group is kept from one hand-over to the next."""
        self._tensors = tensors
        self._sender = sender

    def ship(self) -> Sequence[ObjectRef[Bucket]]:
        """Put them into the object store, in buckets."""
        from sortedrl.cluster.broadcast import parts

        return shipped(parts(self._tensors.items(), bucket_bytes=_SHIPPED_BYTES))

    def send(self, meeting: Meeting) -> None:
        """Broadcast them to the workers that come to the meeting."""
        from sortedrl.cluster.broadcast import Sender, parts

        sender = Sender() if self._sender is None else self._sender
        try:
            sender.send(meeting, parts(self._tensors.items(), bucket_bytes=SENT_BYTES))
        finally:
            if self._sender is None:
                sender.close()

    def write(self, path: Path) -> None:
        """Write them as one safetensors file."""
        from sortedrl.cluster.broadcast import as_tensor

        named = self._tensors.items()
        write_weights({name: as_tensor(name, given) for name, given in named}, path)


def shipped(parts: Iterable[Sequence[tuple[str, Tensor]]]) -> list[ObjectRef[Bucket]]:
    """Put all parts into the object store; raises `WayFailed` if it does not take them.

    The parts are always taken to their end, so ranks that gather them together stay in step.
    """
    import ray
    from ray.exceptions import RayError

    from sortedrl.cluster.broadcast import bucket

    coming = iter(parts)
    try:
        return [ray.put(bucket(part)) for part in coming]
    except RayError as error:
        raise WayFailed(f"the object store did not take them: {first_line(error)}") from error
    finally:
        deque(coming, maxlen=0)


def write_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """One safetensors file, written beside its place and renamed; tied tensors are written twice.

    Raises `WayFailed` if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file(_apart(tensors), partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise WayFailed(f"{path} could not be written: {first_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of such a file, on the CPU; raises `WayFailed` if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WayFailed(f"{path} could not be read: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an exception says, without what follows it."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, with no memory in common: the file format has no word for that."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        place = held.untyped_storage().data_ptr()
        apart[name] = held.clone() if place in seen else held
        seen.add(place)
    return apart


@dataclass(frozen=True, slots=True, kw_only=True)
class InGroup:
    """Weights that are broadcast to all members of a group."""

    meeting: Meeting
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InObjects:
    """Weights that lie in the object store."""

    buckets: Sequence[ObjectRef[Bucket]]
    seconds: float
    """How long fetching one of them may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """Weights in a safetensors file."""

    path: Path


Offer = InGroup | InObjects | OnDisk


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Weights that a worker has in its memory."""

    tensors: Mapping[str, Tensor]
    bytes: int
    buckets: int


class Fetcher:
    """Takes what a worker is offered; raises `WayFailed` if it cannot."""

    def __init__(self) -> None:
        """It has taken nothing yet."""
        self._receiver: Receiver | None = None

    def fetched(self, offer: Offer) -> Fetched:
        """The weights of an offer; they must be read only, and let go of soon."""
        match offer:
            case InGroup():
                return self._received(offer)
            case InObjects():
                return _from_objects(offer)
            case OnDisk():
                return _from_disk(offer)

    def close(self) -> None:
        """Leave the group."""
        if self._receiver is not None:
            self._receiver.close()

    def _received(self, offer: InGroup) -> Fetched:
        from sortedrl.cluster.broadcast import Receiver

        if self._receiver is None:
            self._receiver = Receiver(_device())
        received = self._receiver.receive(offer.meeting, offer.rank)
        return Fetched(tensors=received.tensors, bytes=received.bytes, buckets=received.buckets)


def _device() -> str:
    """Where this worker wants its weights."""
    import ray
    import torch

    return "cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu"


def _from_objects(offer: InObjects) -> Fetched:
    import ray
    from ray.exceptions import RayError

    from sortedrl.cluster.broadcast import num_bytes, unpacked

    try:
        parts = [ray.get(bucket, timeout=offer.seconds) for bucket in offer.buckets]
    except RayError as error:
        raise WayFailed(f"an object could not be fetched: {first_line(error)}") from error
    return Fetched(tensors=unpacked(parts), bytes=sum(map(num_bytes, parts)), buckets=len(parts))


def _from_disk(offer: OnDisk) -> Fetched:
    tensors = read_weights(offer.path)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Fetched(tensors=tensors, bytes=size, buckets=1)
