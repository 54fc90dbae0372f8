"""Weights as buckets of bytes, broadcast from one sender to the workers over a process group.

A bucket holds tensors of up to a few hundred megabytes together. Only names, dtypes, shapes and
bytes travel; bytes and not arrays, because numpy has no bfloat16. In a broadcast a bucket is one
flat tensor of bytes, after a small tensor with its sizes:

    sizes   bytes of the header, bytes of header and tensors; 0, 0 is the end
    flat    header | tensor | tensor ...     each begins at a multiple of 16 bytes

The header has names, dtypes and shapes, as JSON.

The process group is separate from torch's default group, which trainer and engines may use. Rank 0
sends: while one bucket is in transit, the next is gathered and packed. A group in which something
failed is closed, and never used again.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not in its types
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from sortedrl.cluster.weight_transport import Rendezvous, TransportFailed, first_line
from sortedrl.errors import ModelError
from sortedrl.models.offload import in_buckets

if TYPE_CHECKING:
    from torch.distributed import Work


_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedTensor:
    """One tensor as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: np.ndarray


Bucket = tuple[SerializedTensor, ...]


def parts(
    tensors: Iterable[tuple[str, object]], *, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, in parts of about so many bytes; at least one tensor in each.

    They are taken one after the other, so they may be gathered during the iteration.
    """
    named = ((name, as_tensor(name, given)) for name, given in tensors)
    return in_buckets(((pair, pair[1].nbytes) for pair in named), max_bytes=bucket_bytes)


def bucket(part: Iterable[tuple[str, Tensor]]) -> Bucket:
    """One part as bytes, on the CPU."""
    return tuple(_packed(name, tensor) for name, tensor in part)


def unpacked(parts: Iterable[Bucket]) -> dict[str, Tensor]:
    """The tensors, over the very same bytes: they must be read only."""
    return {packed.name: _tensor(packed) for part in parts for packed in part}


def as_tensor(name: str, given: object) -> Tensor:
    """What was given under this name, which must be a tensor."""
    if not isinstance(given, Tensor):
        raise ModelError(f"{name} must be a tensor to be sent, got {type(given).__name__}")
    return given


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat; a contiguous tensor is not copied."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a message."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name."""
    dtype: torch.dtype = torch.__dict__[name]
    return dtype


def _packed(name: str, tensor: Tensor) -> SerializedTensor:
    return SerializedTensor(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        buffer=as_bytes(tensor.detach().cpu()).numpy(),
    )


def _tensor(packed: SerializedTensor) -> Tensor:
    dtype = dtype_named(packed.dtype)
    if not packed.buffer.nbytes:
        return torch.empty(packed.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The bytes are in shared memory, which is read only; nothing writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        held = torch.from_numpy(packed.buffer)
    return held.view(dtype).reshape(packed.shape)


_ALIGNMENT = 16

Part = Sequence[tuple[str, Tensor]]


class Buffer:
    """Memory that one bucket after the other is packed into."""

    def __init__(self, device: torch.device) -> None:
        """Memory of this device, allocated when it is needed."""
        self._device = device
        self._flat: Tensor | None = None

    def packed(self, part: Part) -> tuple[Tensor, Tensor]:
        """The sizes of a part, and its bytes."""
        rows = [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in part]
        header = json.dumps(rows).encode()
        places, size = _offsets([tensor.nbytes for _, tensor in part], start=len(header))
        if self._flat is None or self._flat.numel() < size:
            self._flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        flat = self._flat[:size]
        flat[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for (_, tensor), place in zip(part, places, strict=True):
            flat[place : place + tensor.nbytes].copy_(as_bytes(tensor))
        return bucket_sizes(self._device, header_bytes=len(header), size=size), flat


def bucket_sizes(device: torch.device, *, header_bytes: int = 0, size: int = 0) -> Tensor:
    """What is sent before a bucket; by default the end of all buckets."""
    return torch.tensor([header_bytes, size], dtype=torch.int64).to(device)


def tensors_of_bucket(flat: Tensor, *, header_bytes: int) -> dict[str, Tensor]:
    """The tensors over these very bytes."""
    rows = json.loads(flat[:header_bytes].cpu().numpy().tobytes())
    dtypes = [dtype_named(dtype) for _, dtype, _ in rows]
    sizes = [
        dtype.itemsize * torch.Size(shape).numel()
        for dtype, (_, _, shape) in zip(dtypes, rows, strict=True)
    ]
    places, _ = _offsets(sizes, start=header_bytes)
    return {
        name: flat[place : place + size].view(dtype).reshape(shape)
        for (name, _, shape), dtype, size, place in zip(rows, dtypes, sizes, places, strict=True)
    }


def _offsets(sizes: Iterable[int], *, start: int) -> tuple[list[int], int]:
    """Where tensors of these sizes begin behind `start`, and where the last one ends."""
    places = []
    end = start
    for size in sizes:
        place = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(place)
        end = place + size
    return places, end


_CONNECT_TRIES = 5
_LEAST_CONNECT_SECONDS = 2.0
_LOST = "lost"
_NO_GPU = "cpu"
# Below this much free memory on its GPU a worker keeps what it receives in main memory.
_SPARE_GPU_BYTES = 2 << 30
# An NCCL group that begins with this set waits with a time limit, and has no watchdog, which would
# end the whole process when another rank dies.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class RendezvousStore:
    """The store over which sender and workers find each other; kept by the controller."""

    def __init__(self, host: str, *, seconds: float) -> None:
        """Listen at a free port of this machine, which others reach as `host`."""
        with _as_transport_failure("no store could be opened"):
            self._store = TCPStore(
                host,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )
        self.host = host
        self.port = self._store.port

    def set_lost(self, key: str, *, rank: int) -> None:
        """A rank will not join: the others need not wait for it."""
        with _as_transport_failure("the store does not answer"):
            PrefixStore(key, self._store).set(_name(rank), _LOST)


class BroadcastSender:
    """The first rank; keeps its process group until a rendezvous has another key."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """NCCL is taken if this is a GPU, and all workers have others; else gloo."""
        self._groups = _GroupOfRank(torch.device(device))

    @classmethod
    def for_tensors(cls, tensors: Mapping[str, object]) -> Self:
        """A sender on the device of these tensors."""
        places = (tensor.device for tensor in tensors.values() if isinstance(tensor, Tensor))
        return cls(next(places, torch.device("cpu")))

    def send(self, rendezvous: Rendezvous, buckets: Iterable[Part]) -> None:
        """Broadcast all buckets to the workers; raises `TransportFailed` if one of them is gone.

        The buckets are always taken to their end, so ranks that gather them together stay in step.
        """
        coming = iter(buckets)
        try:
            group = self._groups.group(rendezvous, rank=0)
            buffers = cycle((Buffer(group.device), Buffer(group.device)))
            for part in coming:
                # The other buffer may still be in transit: its sizes and its bytes.
                group.wait(leaving=2)
                for tensor in next(buffers).packed(part):
                    group.start(tensor)
            group.start(bucket_sizes(group.device))
            group.wait()
        except BaseException:
            self.close()
            raise
        finally:
            deque(coming, maxlen=0)

    def close(self) -> None:
        """Leave the group; ranks that still wait for it see that."""
        self._groups.leave()


class BroadcastReceiver:
    """A worker; keeps its process group until a rendezvous has another key."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """The device that the weights shall be on; without NCCL they come to the CPU."""
        self._groups = _GroupOfRank(torch.device(device))

    def buckets(self, rendezvous: Rendezvous, rank: int) -> Iterator[dict[str, Tensor]]:
        """All tensors that are sent, bucket by bucket; stopping before the end leaves the group.

        Raises `TransportFailed` if another rank is gone.
        """
        try:
            group = self._groups.group(rendezvous, rank=rank)
            while True:
                announced = bucket_sizes(group.device)
                group.start(announced)
                group.wait()
                header_bytes, size = announced.tolist()
                if not size:
                    break
                flat = torch.empty(size, dtype=torch.uint8, device=group.device)
                group.start(flat)
                group.wait()
                yield tensors_of_bucket(_off_full_gpu(flat), header_bytes=header_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group."""
        self._groups.leave()


class _GroupOfRank:
    """The process group that a rank is in, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: _ProcessGroup | None = None

    def group(self, rendezvous: Rendezvous, *, rank: int) -> _ProcessGroup:
        """The group of this rendezvous: the present one if it is that, or a new one."""
        if self._group is None or self._group.key != rendezvous.key:
            self.leave()
            self._group = _ProcessGroup(rendezvous, rank=rank, device=self._device)
        return self._group

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class _ProcessGroup:
    """A process group, once all of its ranks have joined."""

    def __init__(self, rendezvous: Rendezvous, *, rank: int, device: torch.device) -> None:
        limit = timedelta(seconds=rendezvous.timeout)
        self.key = rendezvous.key
        self._limit = limit
        # A connection stays open as long as such a handle exists, so none leaves this object.
        self._under_way: deque[Work] = deque()
        with _as_transport_failure("the ranks did not all join"):
            store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=limit)
            names = _joined_devices(
                PrefixStore(rendezvous.key, store), rendezvous, rank=rank, device=device
            )
            is_nccl = _NO_GPU not in names and len(set(names)) == rendezvous.world
            self.device = device if is_nccl else torch.device("cpu")
            links = PrefixStore(f"{rendezvous.key}/links", store)
            self._backend: Any = (
                _nccl(links, rank=rank, rendezvous=rendezvous)
                if is_nccl
                else _gloo(links, rank=rank, rendezvous=rendezvous)
            )

    def start(self, tensor: Tensor) -> None:
        """Begin to broadcast a tensor from the first rank into this tensor of all others."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        options.timeout = self._limit
        with _as_transport_failure("the broadcast failed"):
            self._under_way.append(self._backend.broadcast([tensor], options))

    def wait(self, *, leaving: int = 0) -> None:
        """Wait until all but the last so many are done; the limit holds for each of them."""
        with _as_transport_failure("the broadcast failed"):
            while len(self._under_way) > leaving:
                self._under_way.popleft().wait()

    def close(self) -> None:
        """End what is under way, here and with the others."""
        # The group ends in any case.
        with suppress(RuntimeError):
            self._backend.abort()
        self._under_way.clear()
        del self._backend


def _joined_devices(
    store: PrefixStore, rendezvous: Rendezvous, *, rank: int, device: torch.device
) -> Sequence[str]:
    """The device names of all ranks, after waiting for them."""
    store.set(_name(rank), _device_name(device))
    places = [_name(other) for other in range(rendezvous.world)]
    store.wait(places, timedelta(seconds=rendezvous.timeout))
    names = [store.get(place).decode() for place in places]
    if _LOST in names:
        raise TransportFailed(f"rank {names.index(_LOST)} of {rendezvous.world} is lost")
    return names


def _gloo(store: PrefixStore, *, rank: int, rendezvous: Rendezvous) -> Any:  # noqa: ANN401
    # Its types do not have the options that it takes.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    # It waits five times as long for a rank that was here and does not connect.
    seconds = max(_LEAST_CONNECT_SECONDS, rendezvous.timeout / _CONNECT_TRIES)
    options._timeout = timedelta(seconds=seconds)
    # The name of a machine often means its loopback, which the others cannot reach.
    address = _own_address(rendezvous)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, rendezvous.world, options)


def _nccl(store: PrefixStore, *, rank: int, rendezvous: Rendezvous) -> Any:  # noqa: ANN401
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=rendezvous.timeout)
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return ProcessGroupNCCL(store, rank, rendezvous.world, options)
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _own_address(rendezvous: Rendezvous) -> str:
    """The address of this machine on the route to the store; nothing is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(
        rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(place)
        address: str = towards.getsockname()[0]
        return address


def _device_name(device: torch.device) -> str:
    """A name that no other GPU has."""
    if device.type != "cuda":
        return _NO_GPU
    return str(torch.cuda.get_device_properties(device).uuid)


def _name(rank: int) -> str:
    return f"device/{rank}"


def _off_full_gpu(flat: Tensor) -> Tensor:
    """A received bucket, in main memory if the GPU is nearly full."""
    if flat.is_cuda and torch.cuda.mem_get_info(flat.device)[0] < _SPARE_GPU_BYTES:
        return flat.cpu()
    return flat


@contextmanager
def _as_transport_failure(what: str) -> Iterator[None]:
    """Turn what torch and the network raise into `TransportFailed`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise TransportFailed(f"{what}: {first_line(error)}") from error
