"""Folds the events and metrics of a run into the state of the live view.

It tracks what the meter does not: the answer in each slot, the number of ready answers, the
progress of groups. All other numbers come from the meter.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sortedrl.core.events import (
    Event,
    Finish,
    Harvest,
    Interrupt,
    Load,
    Pause,
    Renew,
    Start,
    SyncWeights,
    Update,
)
from sortedrl.core.files import Value
from sortedrl.core.meter import Figures
from sortedrl.report.charts.svg import neighbours
from sortedrl.report.lanes import SlotQueue
from sortedrl.types import Key

TRENDS = {
    "reward": "reward/mean",
    "length": "length/mean",
    "bubble": "rollout/bubble",
    "goodput": "rollout/goodput",
    "staleness": "rollout/mean_staleness",
    "score": "evaluation/score",
}
"""The numbers plotted over the run, by their names in a row of metrics."""

_MOST = 256
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A number over the run so far, and its last value."""

    values: tuple[float, ...]
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """Progress of the oldest open group, and the number of younger open ones."""

    number: int
    trained: int
    total: int
    num_younger: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a frame shows; of a run that is still loading, little is known."""

    activity: str = ""
    """The current activity, as text."""
    done: float = 0.0
    """The share of the run that is done."""
    seconds: float = 0.0
    schedule: str = ""
    updates: int = 0
    skipped: int = 0
    round: int = 0
    is_rollout: bool = False
    running: int = 0
    shares: tuple[float | None, ...] = ()
    """Per slot the progress towards a long answer, from 0 to 1; `None` if idle."""
    ready: int = 0
    update_batch: int = 0
    group: OpenGroup | None = None
    figures: Figures | None = None
    trends: Mapping[str, Trend] = field(default_factory=dict)
    memory: Memory | None = None


@dataclass(slots=True)
class _Group:
    total: int
    trained: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a view needs from a run."""

    schedule: str
    slots: int
    update_batch: int
    max_tokens: int
    device: str
    decoded: Callable[[], int]
    """Tokens decoded so far; called from another thread."""
    seconds: Callable[[], float]
    """Seconds of the run so far; called from another thread."""
    figures: Callable[[], Figures]
    """The meter's figures; called only while an event is processed, after the meter."""


class LiveState:
    """The current state of a run."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._slots = Slots(source.slots, decoded=source.decoded)
        self._longest = 0
        self._updates = self._skipped = self._round = self._ready = 0
        self._is_rollout = False
        self._groups: dict[int, _Group] = {}
        self._histories = {name: History() for name in TRENDS}

    @property
    def running(self) -> int:
        """Answers being generated."""
        return self._slots.running

    @property
    def ready(self) -> int:
        """Complete answers that are not trained yet."""
        return self._ready

    def __call__(self, event: Event) -> None:
        """Process the next event."""
        if isinstance(event, SyncWeights | Load | Start | Harvest):
            self._round = event.round
            self._is_rollout = not isinstance(event, Harvest)
        if isinstance(event, Start):
            self._slots.start((event.prompt, event.sample), cached=event.cached)
        elif isinstance(event, Finish):
            self._slots.stop((event.prompt, event.sample))
            self._longest = max(self._longest, event.tokens)
            self._ready += 1
        elif isinstance(event, Interrupt | Pause):
            self._slots.stop((event.prompt, event.sample))
        elif isinstance(event, Renew):
            self._ready -= 1
        elif isinstance(event, Load):
            self._groups[event.group] = _Group(event.trajectories)
        elif isinstance(event, Update):
            self._update(event)

    def updated(self, row: Mapping[str, Value]) -> None:
        """Process a row of metrics, of an update or an evaluation."""
        for name, key in TRENDS.items():
            value = row.get(key)
            if isinstance(value, int | float):
                self._histories[name].add(value)
        if row.get("skipped_steps"):
            self._skipped += 1

    def snapshot(
        self,
        *,
        activity: str,
        done: float,
        figures: Figures | None,
        memory: Memory | None,
    ) -> Snapshot:
        """The current state, combined with numbers from elsewhere."""
        return Snapshot(
            activity=activity,
            done=done,
            seconds=self.source.seconds(),
            schedule=self.source.schedule,
            updates=self._updates,
            skipped=self._skipped,
            round=self._round,
            is_rollout=self._is_rollout,
            running=self._slots.assigned,
            shares=self._shares(),
            ready=self._ready,
            update_batch=self.source.update_batch,
            group=self._oldest(),
            figures=figures,
            trends={
                name: Trend(values=history.values(), last=history.last)
                for name, history in self._histories.items()
                if history.last is not None
            },
            memory=memory,
        )

    def _shares(self) -> tuple[float | None, ...]:
        """Relative to the longest answer so far, or to the limit before there is one."""
        tokens = self._slots.tokens()
        written = max((count for count in tokens if count is not None), default=0.0)
        scale = max(self._longest or self.source.max_tokens, written, 1)
        return tuple([None if count is None else max(0.0, count / scale) for count in tokens])

    def _update(self, event: Update) -> None:
        self._updates += 1
        self._ready -= len(event.trained)
        for trained in event.trained:
            self._groups[trained.group].trained += 1
        for number in event.closed:
            del self._groups[number]

    def _oldest(self) -> OpenGroup | None:
        if not self._groups:
            return None
        number = min(self._groups)
        group = self._groups[number]
        return OpenGroup(
            number=number,
            trained=group.trained,
            total=group.total,
            num_younger=len(self._groups) - 1,
        )


class Slots:
    """The slots of one engine."""

    def __init__(self, count: int, *, decoded: Callable[[], int]) -> None:
        """Start with all slots free; `decoded` returns the tokens decoded so far."""
        self._offsets: list[float | None] = [None] * count
        self._slot_of: dict[Key, int] = {}
        self._queue: SlotQueue[int] = SlotQueue(count)
        self._decoded = decoded
        self._counted = decoded()
        self._growth = 0.0

    @property
    def running(self) -> int:
        """Answers that were started and not stopped, queued ones included."""
        return len(self._slot_of) + len(self._queue)

    @property
    def assigned(self) -> int:
        """Answers that have a slot."""
        return len(self._slot_of)

    def start(self, key: Key, *, cached: int) -> None:
        """Start an answer with `cached` tokens."""
        self._grow()
        self._queue.add(key, cached)
        self._fill()

    def stop(self, key: Key) -> None:
        """Stop an answer, complete or not; unknown ones are ignored."""
        self._grow()
        is_queued = self._queue.leave(key) is not None
        slot = None if is_queued else self._slot_of.pop(key, None)
        if slot is not None:
            self._offsets[slot] = None
            self._queue.free(slot)
            self._fill()

    def tokens(self) -> list[float | None]:
        """Estimated tokens of the answer in each slot; `None` if idle."""
        self._grow()
        growth = self._growth
        return [None if offset is None else offset + growth for offset in self._offsets]

    def _grow(self) -> None:
        decoded = self._decoded()
        if self._slot_of:
            self._growth += (decoded - self._counted) / len(self._slot_of)
        self._counted = decoded

    def _fill(self) -> None:
        for slot, key, cached in self._queue.assigned():
            self._slot_of[key] = slot
            self._offsets[slot] = cached - self._growth


class History:
    """A bounded history of one number."""

    def __init__(self) -> None:
        self.last: float | None = None
        self._values: list[float] = []
        self._open: list[float] = []
        self._stride = 1

    def add(self, value: float) -> None:
        """Add a value; values that are not finite are ignored."""
        if not math.isfinite(value):
            return
        self.last = value
        self._open.append(value)
        if len(self._open) == self._stride:
            self._values.append(_mean(self._open))
            self._open.clear()
        if len(self._values) == _MOST:
            self._values = squeezed(self._values, _MOST // 2)
            self._stride *= 2

    def values(self) -> tuple[float, ...]:
        """The history so far."""
        return (*self._values, _mean(self._open)) if self._open else tuple(self._values)


def squeezed(values: Sequence[float], most: int) -> list[float]:
    """At most `most` values, each the mean of an equal part.

    >>> squeezed([1, 3, 5, 7, 9, 11], 3)
    [2.0, 6.0, 10.0]
    """
    return [_mean(part) for _, part in neighbours(values, most=most)]


def _mean(values: Sequence[float]) -> float:
    # Divided first, as the sum of large finite numbers may overflow.
    return sum(value / len(values) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes in use, and the `total` of a device with its own memory."""

    used: int
    total: int | None


def used_memory(device: str) -> Memory:
    """Memory in use on the GPU by all processes; on a CPU, by this process."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info(device)
        return Memory(used=total - free, total=total)
    return Memory(used=_resident_bytes(), total=None)


def _resident_bytes() -> int:
    """Resident memory of this process; its peak if the system does not report the current value."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * resource.getpagesize()
