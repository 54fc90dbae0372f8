"""Where weights come from on their way to the workers: a trainer here, or one of many ranks.

A source knows three ways. One that cannot bring the weights raises `WayFailed`, and the next way
is taken; anything else that it raises ends the hand-over.
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

    from sortedrl.cluster.bridge import Sender
    from sortedrl.cluster.buckets import Bucket

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
        from sortedrl.cluster.buckets import parts

        return shipped(parts(self._tensors.items(), bucket_bytes=_SHIPPED_BYTES))

    def send(self, meeting: Meeting) -> None:
        """Broadcast them to the workers that come to the meeting."""
        from sortedrl.cluster.bridge import Sender
        from sortedrl.cluster.buckets import parts

        sender = Sender() if self._sender is None else self._sender
        try:
            sender.send(meeting, parts(self._tensors.items(), bucket_bytes=SENT_BYTES))
        finally:
            if self._sender is None:
                sender.close()

    def write(self, path: Path) -> None:
        """Write them as one safetensors file."""
        from sortedrl.cluster.buckets import as_tensor

        named = self._tensors.items()
        write_weights({name: as_tensor(name, given) for name, given in named}, path)


def shipped(parts: Iterable[Sequence[tuple[str, Tensor]]]) -> list[ObjectRef[Bucket]]:
    """Put all parts into the object store; raises `WayFailed` if it does not take them.

    The parts are always taken to their end, so ranks that gather them together stay in step.
    """
    import ray
    from ray.exceptions import RayError

    from sortedrl.cluster.buckets import bucket

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
