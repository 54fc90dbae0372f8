"""Weights from the trainer to the workers: a bucket at a time, to all of them at once.

    a worker on the same GPU as a sender    reads its buffers in place, by CUDA IPC, if that is on
    all others                              get a broadcast: NCCL if all have GPUs of their own,
                                            which NCCL asks for, else gloo through main memory

The trainer is one sender, or one for each of its ranks: all have every bucket, since they gather
together. The process groups are separate from torch's default group, which trainer and engines may
use. While one bucket is in transit, the next is gathered and packed. A group in which something
failed is closed, and never used again.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Self

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not in its types
    PrefixStore,
    TCPStore,
)

from sortedrl.cluster.buckets import Part, tensors_of_bucket
from sortedrl.cluster.channels import BroadcastChannel, Channel, ProcessGroup, SharedChannel
from sortedrl.cluster.weight_transport import (
    Rendezvous,
    TransportFailed,
    as_transport_failure,
    first_line,
)
from sortedrl.models.shared_memory import BufferSharing, sharing_on

_LOG = logging.getLogger(__name__)
_LOST = "lost"
_CPU = "cpu"
_SENDERS = "senders"
_PROBE_BYTES = 16
# What torch and CUDA raise where memory cannot be shared.
_REFUSED = (RuntimeError, OSError, ValueError)


class RendezvousStore:
    """The store over which sender and workers find each other; kept by the controller."""

    def __init__(self, host: str, *, seconds: float) -> None:
        """Listen at a free port of this machine, which others reach as `host`."""
        with as_transport_failure("no store could be opened"):
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
        with as_transport_failure("the store does not answer"):
            store = PrefixStore(key, self._store)
            store.set(_name(rank), _LOST)
            store.set(_probe_result_name(rank), _LOST)


class BroadcastSender:
    """A sender; keeps its process groups until a rendezvous has another key."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        number: int = 0,
        count: int = 1,
        sharing: BufferSharing | None = None,
    ) -> None:
        """One of `count` senders that have the same weights, on this device.

        Each sends to the workers that can share its buffers, those on the same GPU, and the first
        one to all others too. `sharing` is that of the device, unless a test gives another.
        """
        self._member = _Member(torch.device(device), sharing=sharing)
        self._number, self._count = number, count

    @classmethod
    def for_tensors(cls, tensors: Mapping[str, object]) -> Self:
        """A sender on the device of these tensors."""
        places = (tensor.device for tensor in tensors.values() if isinstance(tensor, Tensor))
        return cls(next(places, torch.device("cpu")))

    def send(self, rendezvous: Rendezvous, buckets: Iterable[Part]) -> None:
        """Send all buckets to its workers; raises `TransportFailed` if one of them is gone.

        The buckets are always taken to their end, so ranks that gather them together stay in step.
        """
        coming = iter(buckets)
        try:
            channels = self._channels(rendezvous)
            for part in coming:
                for channel in channels:
                    channel.send(part)
            for channel in channels:
                channel.end()
        except BaseException:
            self.close()
            raise
        finally:
            deque(coming, maxlen=0)

    def close(self) -> None:
        """Leave the groups; ranks that still wait for it see that."""
        self._member.leave()

    def _channels(self, rendezvous: Rendezvous) -> Sequence[Channel]:
        if self._number and self._member.sharing is None:
            # Without shared buffers the first one sends to all.
            return ()
        return self._member.channels(
            rendezvous, lambda join: join.as_sender(self._number, of=self._count)
        )


class BroadcastReceiver:
    """A worker; keeps its process group until a rendezvous has another key."""

    def __init__(
        self, device: torch.device | str = "cpu", *, sharing: BufferSharing | None = None
    ) -> None:
        """The device that the weights shall be on; over gloo they come to the CPU."""
        self._member = _Member(torch.device(device), sharing=sharing)

    def buckets(self, rendezvous: Rendezvous, rank: int) -> Iterator[dict[str, Tensor]]:
        """All tensors that are sent, bucket by bucket; stopping before the end leaves the group.

        Raises `TransportFailed` if another rank is gone.
        """
        try:
            (channel,) = self._member.channels(rendezvous, lambda join: join.as_worker(rank))
            for flat, header_bytes in channel.buckets():
                yield tensors_of_bucket(flat, header_bytes=header_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group."""
        self._member.leave()


class _Member:
    """A sender or a worker, with the channels of one rendezvous at a time."""

    def __init__(self, device: torch.device, *, sharing: BufferSharing | None) -> None:
        self.device = device
        self.sharing = sharing_on(device) if sharing is None else sharing
        self.has_warned = False
        self._key: str | None = None
        self._channels: list[Channel] = []

    @property
    def place(self) -> str:
        """A name that no other place has where buffers can be shared, or that of all CPUs."""
        return _CPU if self.sharing is None else self.sharing.place

    def channels(
        self, rendezvous: Rendezvous, formed: Callable[[_Join], Iterator[Channel]]
    ) -> Sequence[Channel]:
        """Those of this rendezvous: the present ones if they are, or new ones."""
        if self._key != rendezvous.key:
            self.leave()
            with as_transport_failure("the ranks did not all join"):
                # One by one: those that were formed are closed if the next one fails.
                for channel in formed(_Join(rendezvous, self)):
                    self._channels.append(channel)
            self._key = rendezvous.key
        return self._channels

    def leave(self) -> None:
        self._key = None
        while self._channels:
            self._channels.pop().close()


class _Join:
    """The way of one rank into its channels: all ranks decide alike, from what is in the store.

    1. Every rank names its place, and waits for those of the others.
    2. Each sender shares a small buffer with the workers at its place, which try to read it.
    3. Workers that could share the buffers of their sender, the others those of a broadcast.
    """

    def __init__(self, rendezvous: Rendezvous, member: _Member) -> None:
        self._rendezvous, self._member = rendezvous, member
        self._limit = timedelta(seconds=rendezvous.timeout)
        store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=self._limit)
        self._store = PrefixStore(rendezvous.key, store)

    def as_sender(self, number: int, *, of: int) -> Iterator[Channel]:
        """The channels of a sender: to the workers that share its buffers, and to the rest."""
        if not number:
            self._store.set(_SENDERS, str(1 if self._member.sharing is None else of))
        self._store.set(_sender_name(number), self._member.place)
        senders, workers = self._places()
        sharing = shared_ranks(senders, workers)
        own = [rank for rank, sender in sharing.items() if sender == number]
        try:
            self._send_probe(own)
            refusals = self._refusals(sharing)
        finally:
            if self._member.sharing is not None:
                self._member.sharing.close()
        self._warn_once({rank: refusals[rank] for rank in own if rank in refusals})
        taken = [rank for rank in own if rank not in refusals]
        if taken:
            yield self._shared_channel(number, taken, index=0)
        rest = [rank for rank in workers if rank not in sharing or rank in refusals]
        if rest and not number:
            yield self._broadcast_channel(senders[0], {n: workers[n] for n in rest}, index=0)

    def as_worker(self, rank: int) -> Iterator[Channel]:
        """The one channel of a worker."""
        self._store.set(_name(rank), self._member.place)
        senders, workers = self._places()
        sharing = shared_ranks(senders, workers)
        if rank in sharing:
            self._store.set(_probe_result_name(rank), self._probe_result(rank))
        refusals = self._refusals(sharing)
        if rank in sharing and rank not in refusals:
            number = sharing[rank]
            taken = [n for n in workers if sharing.get(n) == number and n not in refusals]
            yield self._shared_channel(number, taken, index=1 + taken.index(rank))
            return
        rest = [n for n in workers if n not in sharing or n in refusals]
        places = {n: workers[n] for n in rest}
        yield self._broadcast_channel(senders[0], places, index=1 + rest.index(rank))

    def _places(self) -> tuple[list[str], dict[int, str]]:
        """Those of the senders, and of the workers by their ranks."""
        ranks = range(self._rendezvous.world)
        first, *workers = self._values_of(ranks, _name)
        (count,) = self._values([_SENDERS])
        others = self._values([_sender_name(number) for number in range(1, int(count))])
        return [first, *others], dict(zip(ranks[1:], workers, strict=True))

    def _send_probe(self, ranks: Sequence[int]) -> None:
        """Share a buffer with a few random bytes with these workers."""
        if not ranks or self._member.sharing is None:
            return
        sent = os.urandom(_PROBE_BYTES)
        try:
            handle = _filled(self._member.sharing, sent)
        except _REFUSED as error:
            # A worker that gets no handle refuses with these words.
            handle = None
            sent = first_line(error).encode()
        for rank in ranks:
            self._store.set(_probe_name(rank), json.dumps([handle, sent.hex()]))

    def _probe_result(self, rank: int) -> str:
        """Why the buffer of the sender cannot be read; nothing if it can."""
        assert self._member.sharing is not None, "who shares nothing gets no probe"
        handle, sent = json.loads(self._values([_probe_name(rank)])[0])
        if handle is None:
            return bytes.fromhex(sent).decode()
        try:
            read = _read(self._member.sharing, handle)
        except _REFUSED as error:
            return first_line(error)
        finally:
            self._member.sharing.close()
        return "" if read.hex() == sent else "other bytes were read than were written"

    def _refusals(self, sharing: Iterable[int]) -> dict[int, str]:
        """The workers that cannot read the buffers of their senders, and why."""
        ranks = list(sharing)
        reasons = self._values_of(ranks, _probe_result_name)
        return {rank: reason for rank, reason in zip(ranks, reasons, strict=True) if reason}

    def _warn_once(self, refusals: Mapping[int, str]) -> None:
        if refusals and not self._member.has_warned:
            self._member.has_warned = True
            rank, reason = next(iter(refusals.items()))
            _LOG.warning(
                "weights go to rank %d of %d through main memory, not by CUDA IPC: %s",
                rank,
                self._rendezvous.world,
                reason,
            )

    def _values_of(self, ranks: Sequence[int], name: Callable[[int], str]) -> list[str]:
        """The values of these ranks, none of which may be lost."""
        values = self._values([name(rank) for rank in ranks])
        if _LOST in values:
            lost = ranks[values.index(_LOST)]
            raise TransportFailed(f"rank {lost} of {self._rendezvous.world} is lost")
        return values

    def _values(self, names: list[str]) -> list[str]:
        """The values of these names, after waiting for them."""
        if names:
            self._store.wait(names, self._limit)
        return [self._store.get(name).decode() for name in names]

    def _shared_channel(self, number: int, ranks: Sequence[int], *, index: int) -> Channel:
        assert self._member.sharing is not None, "who shares nothing shares with nobody"
        store = PrefixStore(f"shared/{number}", self._store)
        world = 1 + len(ranks)
        group = ProcessGroup(
            store, index=index, world=world, rendezvous=self._rendezvous, is_nccl=False
        )
        return SharedChannel(group, self._member.sharing, store=store, index=index, world=world)

    def _broadcast_channel(self, sender: str, workers: Mapping[int, str], *, index: int) -> Channel:
        places = [sender, *workers.values()]
        is_nccl = _can_use_nccl(places)
        group = ProcessGroup(
            PrefixStore("links", self._store),
            index=index,
            world=len(places),
            rendezvous=self._rendezvous,
            is_nccl=is_nccl,
        )
        return BroadcastChannel(group, self._member.device if is_nccl else torch.device("cpu"))


def shared_ranks(senders: Sequence[str], workers: Mapping[int, str]) -> dict[int, int]:
    """The number of the sender at the same place, for each worker that has one.

    >>> shared_ranks(["GPU-a", "GPU-b"], {1: "GPU-b", 2: "GPU-c", 3: "cpu"})
    {1: 1}
    """
    return {
        rank: senders.index(place)
        for rank, place in workers.items()
        if place != _CPU and place in senders
    }


def _can_use_nccl(places: Sequence[str]) -> bool:
    """Whether all have GPUs, and no two the same: NCCL refuses two processes on one GPU."""
    on_gpus = not any(place.startswith(_CPU) for place in places)
    return on_gpus and len(set(places)) == len(places)


def _filled(sharing: BufferSharing, sent: bytes) -> str:
    """The handle of a new buffer with these bytes, which exists until `sharing` is closed."""
    buffer = sharing.empty(len(sent))
    buffer.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
    sharing.synchronize()
    return sharing.handle(buffer)


def _read(sharing: BufferSharing, handle: str) -> bytes:
    """The bytes of a buffer of another process."""
    return sharing.opened(handle).cpu().numpy().tobytes()


def _name(rank: int) -> str:
    return f"device/{rank}"


def _sender_name(number: int) -> str:
    return f"sender/{number}" if number else _name(0)


def _probe_name(rank: int) -> str:
    return f"probe/{rank}"


def _probe_result_name(rank: int) -> str:
    return f"probe-result/{rank}"
