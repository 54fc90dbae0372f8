"""What runs inside the workers of the hand-over tests, and sources that go wrong."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from sortedrl.cluster.weight_transport import LocalSource, WayFailed
from sortedrl.cluster.worker import SimulatedRecipe


def digest(tensors):
    """Names, dtypes, shapes and bits of tensors."""
    from sortedrl.cluster.broadcast import as_bytes

    return {
        name: [
            str(tensor.dtype),
            list(tensor.shape),
            hashlib.sha256(as_bytes(tensor.cpu()).numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingRecipe:
    """A simulated engine that writes down which weights it was given."""

    folder: Path

    @property
    def has_weights(self):
        return True

    def engine(self):
        # Real engines have it already; the first import takes longer than a short meeting.
        import torch  # noqa: F401

        engine = SimulatedRecipe(slots=2, max_tokens=8).engine()
        take_over = engine.load_weights

        def load_weights(weights):
            take_over(weights)
            file = self.folder / f"{os.getpid()}-{weights.version}.json"
            file.write_text(json.dumps(digest(weights.tensors)))

        engine.load_weights = load_weights
        return engine


class Source:
    """Tensors that travel; what a test wants to go wrong is done before each bucket, or instead."""

    def __init__(self, tensors, *, sender=None, before=lambda number: None, broken=()):
        self.local = LocalSource(tensors)
        self.tensors, self.sender = tensors, sender
        self.before, self.broken = before, broken
        self.meetings = []

    def ship(self):
        self.refuse("objects")
        return self.local.ship()

    def send(self, meeting):
        self.meetings.append(meeting)
        if "group" in self.broken and self.sender is not None:
            self.sender.close()
        self.refuse("group")
        self.sender.send(meeting, self.parts())

    def write(self, path):
        self.refuse("disk")
        self.local.write(path)

    def refuse(self, way):
        if way in self.broken:
            raise WayFailed(f"{way} is out of order")

    def parts(self):
        """One tensor in each."""
        for number, item in enumerate(self.tensors.items()):
            self.before(number)
            yield [item]
