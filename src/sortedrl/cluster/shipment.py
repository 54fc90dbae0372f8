"""Weights on their way: what was made of them for the workers, and who has them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import get_args

from sortedrl.cluster.offer import Offer, OnDisk
from sortedrl.cluster.sending import Sending
from sortedrl.cluster.weight_source import WayFailed, WeightSource
from sortedrl.training.cluster import HandOverWay
from sortedrl.types import Weights

_WAYS: Sequence[HandOverWay] = get_args(HandOverWay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What taking over the weights was for one worker."""

    version: int
    bytes: int
    buckets: int
    fetch_seconds: float
    load_seconds: float
    way: HandOverWay | None = None
    """`None` where only the number of the version was handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What one hand-over moved, and how long it took; of the workers, the slowest counts."""

    version: int
    workers: int
    way: HandOverWay | None
    """The last one that a worker had to take; `None` where there were no tensors."""
    buckets: int
    bytes: int
    """Of one copy of the weights."""
    put_seconds: float
    """Of the source: gathering them, and sending, putting or writing. In a group the workers
    receive meanwhile."""
    fetch_seconds: float
    load_seconds: float
    seconds: float
    """From the first worker that asked to the last that had them, ways that failed included."""


def ways_from(first: HandOverWay) -> Sequence[HandOverWay]:
    """A way, and those that are taken if it fails.

    >>> ways_from("objects")
    ('objects', 'disk')
    """
    return _WAYS[_WAYS.index(first) :]


@dataclass(slots=True, kw_only=True, eq=False)
class Shipment:
    """Weights on their way."""

    weights: Weights
    source: WeightSource | None
    ways: Sequence[HandOverWay]
    start: float
    """When the first worker asked for them."""
    making: threading.Lock = field(default_factory=threading.Lock)
    """Held by the worker that has the source make something for all."""
    made: dict[HandOverWay, Offer | WayFailed] = field(default_factory=dict)
    put_seconds: dict[HandOverWay, float] = field(default_factory=dict)
    failed: set[HandOverWay] = field(default_factory=set)
    """Ways that did not bring them to some worker."""
    arrived: set[int] = field(default_factory=set)
    """Workers that came to the meeting of the group."""
    sending: Sending | WayFailed | None = None
    taken: dict[int, Loading] = field(default_factory=dict)

    def told(self) -> HandOver:
        """What this hand-over was, now that it is over."""
        taken = list(self.taken.values())
        ways = [loading.way for loading in taken if loading.way is not None]
        way = max(ways, key=_WAYS.index, default=None)
        return HandOver(
            version=self.weights.version,
            workers=len(taken),
            way=way,
            buckets=max(loading.buckets for loading in taken),
            bytes=max(loading.bytes for loading in taken),
            put_seconds=0.0 if way is None else self.put_seconds[way],
            fetch_seconds=max(loading.fetch_seconds for loading in taken),
            load_seconds=max(loading.load_seconds for loading in taken),
            seconds=perf_counter() - self.start,
        )

    def remove_file(self) -> None:
        """Nobody reads the file any more."""
        made = self.made.get("disk")
        if isinstance(made, OnDisk):
            # What is left behind is only in the way.
            with suppress(OSError):
                made.path.unlink(missing_ok=True)
