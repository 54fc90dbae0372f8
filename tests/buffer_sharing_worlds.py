"""Senders and workers of the tests of shared buffers, as threads or as processes."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch

from sortedrl.cluster.broadcast import BroadcastReceiver, BroadcastSender, RendezvousStore
from sortedrl.cluster.buckets import as_bytes
from sortedrl.cluster.weight_transport import Rendezvous
from sortedrl.models.shared_memory import FileSharing


def buckets(count, *, seed=0):
    """Buckets of two tensors of growing and shrinking sizes, of random bits."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        length = 100 + 1000 * (number * 7 % 5)
        bits = torch.randint(-(1 << 15), 1 << 15, (2, length), generator=generator)
        narrow = bits.to(torch.int16).view(torch.bfloat16)
        yield [(f"{number}.a", narrow[0]), (f"{number}.b", narrow[1, :7])]


def bits_of(parts):
    """The bytes of all tensors by name."""
    return {name: as_bytes(tensor).tolist() for part in parts for name, tensor in part}


class RefusingSharing(FileSharing):
    """A worker that cannot open what others share."""

    def opened(self, handle):
        raise RuntimeError("the container has no IPC")


class UnsharingSharing(FileSharing):
    """A sender whose buffers have no handle."""

    def handle(self, buffer):
        raise RuntimeError("this memory cannot be shared")


class Cluster:
    """Senders and workers as threads of this process, and a store between them."""

    def __init__(self, senders, workers):
        """Each with its sharing, or `None`."""
        self.store = RendezvousStore("127.0.0.1", seconds=60)
        self.senders = [
            BroadcastSender(number=number, count=len(senders), sharing=sharing)
            for number, sharing in enumerate(senders)
        ]
        self.workers = [BroadcastReceiver(sharing=sharing) for sharing in workers]

    def rendezvous(self, key="one", *, timeout=60.0):
        """The rendezvous of this key."""
        return Rendezvous(
            host="127.0.0.1",
            port=self.store.port,
            world=1 + len(self.workers),
            key=key,
            timeout=timeout,
        )

    def start(self, threads, rendezvous, parts):
        """The sends, and what the workers receive, as futures."""
        sending = [threads.submit(sender.send, rendezvous, parts()) for sender in self.senders]
        receiving = [
            threads.submit(lambda w=w, r=r: [list(b.items()) for b in w.buckets(rendezvous, r)])
            for r, w in enumerate(self.workers, 1)
        ]
        return sending, receiving

    def sync(self, rendezvous, parts):
        """What every worker received."""
        with ThreadPoolExecutor(len(self.senders) + len(self.workers)) as threads:
            sending, receiving = self.start(threads, rendezvous, parts)
            for future in sending:
                future.result()
            return [future.result() for future in receiving]

    def kinds(self):
        """The channels of the workers, by the names of their classes."""
        return [[type(c).__name__ for c in worker._member._channels] for worker in self.workers]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in (*self.senders, *self.workers):
            end.close()


def receive_as_process(port, world, rank, folder, syncs, dies_at):
    """A worker: takes some syncs, and says whether it got the bits, or dies in one of them."""
    with closing(BroadcastReceiver(sharing=FileSharing(Path(folder)))) as receiver:
        for sync in range(syncs):
            rendezvous = Rendezvous(
                host="127.0.0.1", port=port, world=world, key="processes", timeout=120
            )
            received = []
            for bucket in receiver.buckets(rendezvous, rank):
                received.append(list(bucket.items()))
                if dies_at is not None and len(received) == dies_at:
                    os.kill(os.getpid(), 9)
            if bits_of(received) != bits_of(buckets(9, seed=sync)):
                sys.exit("other bits")
