"""What runs inside the workers of the weight sync tests, and sources that go wrong."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from simulated_worker import SimulatedFactory
from sortedrl.cluster.weight_transport import LocalSource, TransportFailed


def digest(tensors):
    """Names, dtypes, shapes and bits of tensors."""
    from sortedrl.cluster.buckets import as_bytes

    return {
        name: [
            str(tensor.dtype),
            list(tensor.shape),
            hashlib.sha256(as_bytes(tensor.cpu()).numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingFactory:
    """A simulated engine that writes down which weights it was given."""

    folder: Path

    def engine(self):
        # Real engines have it already; the first import takes longer than a short rendezvous.
        import torch  # noqa: F401

        engine = SimulatedFactory(slots=2, max_tokens=8).engine()
        take_over = engine.load_weights

        def load_weights(weights):
            take_over(weights)
            file = self.folder / f"{os.getpid()}-{weights.version}.json"
            file.write_text(json.dumps(digest(weights.tensors)))

        engine.load_weights = load_weights
        return engine


class Source:
    """A local source in which a test lets something go wrong before each bucket, or instead."""

    def __init__(self, *, sender=None, before=lambda number: None, broken=()):
        self.local, self.sender = LocalSource(), sender
        self.before, self.broken = before, broken
        self.rendezvous = []

    def put(self, weights):
        self.refuse("objects")
        return self.local.put(weights)

    def send(self, weights, rendezvous):
        self.rendezvous.append(rendezvous)
        if "broadcast" in self.broken and self.sender is not None:
            self.sender.close()
        self.refuse("broadcast")
        self.sender.send(rendezvous, self.parts(weights.tensors))

    def write(self, weights, path):
        self.refuse("disk")
        self.local.write(weights, path)

    def close(self):
        self.local.close()

    def refuse(self, transport):
        if transport in self.broken:
            raise TransportFailed(f"{transport} is out of order")

    def parts(self, tensors):
        """One tensor in each."""
        for number, item in enumerate(tensors.items()):
            self.before(number)
            yield [item]
