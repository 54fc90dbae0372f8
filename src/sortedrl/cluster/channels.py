"""The two ways of a bucket from a sender to workers: in a broadcast, or in a buffer that they read.

    BroadcastChannel   sizes -> flat            NCCL, or gloo through main memory
    SharedChannel      sizes -> replies         gloo, for these small messages only

A channel is a process group with the sender as index 0. It has two buffers: one is packed while the
other is in transit, and a buffer is used again when its bucket has arrived everywhere. Errors of
the network, and a rank that is gone, are `TransportFailed`; a channel is closed then.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not in its types
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOptions,
)

from sortedrl.cluster.buckets import Buffer, Part, bucket_sizes
from sortedrl.cluster.weight_transport import Rendezvous, as_transport_failure
from sortedrl.models.shared_memory import BufferSharing

if TYPE_CHECKING:
    from torch.distributed import Work

_CONNECT_TRIES = 5
_LEAST_CONNECT_SECONDS = 2.0
# Below this much free memory on its GPU a worker keeps what it receives in main memory.
_SPARE_GPU_BYTES = 2 << 30
# An NCCL group that begins with this set waits with a time limit, and has no watchdog, which would
# end the whole process when another rank dies.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class BroadcastChannel:
    """Buckets that a process group broadcasts."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._buffers = self._two_buffers()

    def send(self, part: Part) -> None:
        """Pack a bucket, and begin to send it."""
        # The other buffer may still be in transit: its sizes and its bytes.
        self._group.wait(leaving=2)
        sizes, flat = next(self._buffers).packed(part)
        self._group.start(sizes.to(self._device))
        self._group.start(flat)

    def end(self) -> None:
        """Say that there are no more, and wait until all have arrived."""
        self._group.start(bucket_sizes().to(self._device))
        self._group.wait()
        self._buffers = self._two_buffers()

    def buckets(self) -> Iterator[tuple[Tensor, int]]:
        """The bytes of each bucket that arrives, and how many of them are its header."""
        while True:
            sizes = bucket_sizes().to(self._device)
            self._group.start(sizes)
            self._group.wait()
            header_bytes, size = sizes.tolist()
            if not size:
                return
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._group.start(flat)
            self._group.wait()
            yield flat.cpu() if _is_full(flat) else flat, header_bytes

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _two_buffers(self) -> Iterator[Buffer]:
        empty = partial(torch.empty, dtype=torch.uint8, device=self._device)
        return cycle((Buffer(empty), Buffer(empty)))


class SharedChannel:
    """Buckets that stay in the buffers of the sender, from where the workers copy them.

    The sizes are broadcast as for any bucket, and the reply of a worker takes the place of the
    bytes: it has its copy. A worker opens a buffer when it is new, which both sides see by the
    sizes: the handle is in the store by then.
    """

    def __init__(
        self,
        group: ProcessGroup,
        sharing: BufferSharing,
        *,
        store: PrefixStore,
        index: int,
        world: int,
    ) -> None:
        self._group = group
        self._sharing = sharing
        self._store = store
        self._index = index
        self._workers = range(1, world)
        self._buffers = self._two_buffers()
        self._opened: dict[int, Tensor] = {}

    def send(self, part: Part) -> None:
        """Pack a bucket, and say that it is there."""
        # The other buffer may still be read.
        self._group.wait(leaving=2)
        sizes, _ = next(self._buffers).packed(part)
        self._sharing.synchronize()
        self._group.start(sizes)
        self._group.start_reply()

    def end(self) -> None:
        """Say that there are no more, wait until nobody has a buffer open, and free them."""
        self._group.start(bucket_sizes())
        self._group.start_reply()
        self._group.wait()
        self._free()

    def buckets(self) -> Iterator[tuple[Tensor, int]]:
        """A copy of the bytes of each bucket, and how many of them are its header."""
        for number in cycle((0, 1)):
            sizes = bucket_sizes()
            self._group.start(sizes)
            self._group.wait()
            header_bytes, size = sizes.tolist()
            if not size:
                break
            flat = self._copied(number, size)
            self._group.start_reply()
            yield flat, header_bytes
        self._free()
        self._group.start_reply()
        self._group.wait()

    def close(self) -> None:
        """Leave the group, and free or close the buffers."""
        self._group.close()
        self._free()

    def _copied(self, number: int, size: int) -> Tensor:
        with as_transport_failure("a buffer could not be read"):
            if number not in self._opened or self._opened[number].numel() < size:
                name = _handle_name(number, self._index)
                self._opened[number] = self._sharing.opened(self._store.get(name).decode())
                self._store.delete_key(name)
            shared = self._opened[number][:size]
            flat = shared.cpu() if _is_full(shared) else shared.clone()
            self._sharing.synchronize()
        return flat

    def _free(self) -> None:
        self._buffers = self._two_buffers()
        self._opened.clear()
        self._sharing.close()

    def _two_buffers(self) -> Iterator[Buffer]:
        return cycle([Buffer(partial(self._shared, number)) for number in (0, 1)])

    def _shared(self, number: int, size: int) -> Tensor:
        """A new buffer that the workers can open."""
        with as_transport_failure("a buffer could not be shared"):
            buffer = self._sharing.empty(size)
            handle = self._sharing.handle(buffer)
            for index in self._workers:
                self._store.set(_handle_name(number, index), handle)
        return buffer


Channel = BroadcastChannel | SharedChannel


class ProcessGroup:
    """A process group of a sender, as index 0, and workers."""

    def __init__(
        self,
        store: PrefixStore,
        *,
        index: int,
        world: int,
        rendezvous: Rendezvous,
        is_nccl: bool,
    ) -> None:
        self._limit = timedelta(seconds=rendezvous.timeout)
        # A connection stays open as long as such a handle exists, so none leaves this object.
        self._under_way: deque[Work] = deque()
        formed = _nccl if is_nccl else _gloo
        self._backend: Any = formed(store, index=index, world=world, rendezvous=rendezvous)

    def start(self, tensor: Tensor) -> None:
        """Begin to broadcast a tensor from the sender into this tensor of all others."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        options.timeout = self._limit
        with as_transport_failure("the broadcast failed"):
            self._under_way.append(self._backend.broadcast([tensor], options))

    def start_reply(self) -> None:
        """Begin to reply to the sender, or as the sender to get the replies of all others."""
        options = ReduceOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        options.timeout = self._limit
        with as_transport_failure("the broadcast failed"):
            self._under_way.append(self._backend.reduce([torch.zeros(1)], options))

    def wait(self, *, leaving: int = 0) -> None:
        """Wait until all but the last so many are done; the limit holds for each of them."""
        with as_transport_failure("the broadcast failed"):
            while len(self._under_way) > leaving:
                self._under_way.popleft().wait()

    def close(self) -> None:
        """End what is under way, here and with the others."""
        # The group ends in any case.
        with suppress(RuntimeError):
            self._backend.abort()
        self._under_way.clear()
        del self._backend


def _gloo(store: PrefixStore, *, index: int, world: int, rendezvous: Rendezvous) -> Any:  # noqa: ANN401
    # Its types do not have the options that it takes.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    # It waits five times as long for a rank that was here and does not connect.
    seconds = max(_LEAST_CONNECT_SECONDS, rendezvous.timeout / _CONNECT_TRIES)
    options._timeout = timedelta(seconds=seconds)
    # The name of a machine often means its loopback, which the others cannot reach.
    address = _own_address(rendezvous)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, index, world, options)


def _nccl(store: PrefixStore, *, index: int, world: int, rendezvous: Rendezvous) -> Any:  # noqa: ANN401
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=rendezvous.timeout)
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return ProcessGroupNCCL(store, index, world, options)
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


def _handle_name(number: int, index: int) -> str:
    return f"handle/{number}/{index}"


def _is_full(tensor: Tensor) -> bool:
    """Whether the GPU of this tensor has hardly any memory left."""
    return tensor.is_cuda and torch.cuda.mem_get_info(tensor.device)[0] < _SPARE_GPU_BYTES
