"""What a worker is offered as new weights, and how it takes each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.cluster.weight_source import Meeting, WayFailed, first_line, read_weights

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch import Tensor

    from sortedrl.cluster.bridge import Receiver
    from sortedrl.cluster.buckets import Bucket


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
        from sortedrl.cluster.bridge import Receiver

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

    from sortedrl.cluster.buckets import num_bytes, unpacked

    try:
        parts = [ray.get(bucket, timeout=offer.seconds) for bucket in offer.buckets]
    except RayError as error:
        raise WayFailed(f"an object could not be fetched: {first_line(error)}") from error
    return Fetched(tensors=unpacked(parts), bytes=sum(map(num_bytes, parts)), buckets=len(parts))


def _from_disk(offer: OnDisk) -> Fetched:
    tensors = read_weights(offer.path)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Fetched(tensors=tensors, bytes=size, buckets=1)
