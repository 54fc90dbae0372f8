"""Which slot wrote which answer when: a run's events as bars in lanes.

Bars of one slot never overlap, and every trajectory that got a slot has one bar per start.
A bar lies inside a rollout, so the widths of all bars add up to the run's busy slot-seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Generic, Literal, TypeVar

from sortedrl.core.events import (
    Begin,
    Event,
    Finish,
    Harvest,
    Interrupt,
    Landed,
    Load,
    Pause,
    Renew,
    Resume,
    Start,
    SyncWeights,
    Update,
)
from sortedrl.types import Key

Item = TypeVar("Item")
BandKind = Literal["rollout", "update", "hand_over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One stretch of writing: a trajectory in a slot from its start to its finish or interrupt."""

    slot: int
    start: float
    end: float
    prompt: int
    sample: int
    group: int
    cached: int
    """Tokens it came with."""
    kept: int
    """Tokens it came with that the weights of this rollout still stood for."""
    decoded: int
    """Tokens written in this stretch."""
    discarded: int
    """Of those, the ones discarded later: always the last ones."""
    is_finished: bool
    length: int | None
    """Tokens of the answer as it was trained on; `None` if the log ends before that."""
    version: int
    """The version of the weights that wrote here."""

    @property
    def outcome(self) -> Literal["finished", "interrupted", "discarded"]:
        """Completed; or stopped and continued later; or some of it discarded."""
        if self.discarded:
            return "discarded"
        return "finished" if self.is_finished else "interrupted"

    @property
    def discarded_from(self) -> float:
        """The second from which on everything written here was discarded."""
        share = 1 - self.discarded / self.decoded if self.decoded else 1.0
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A time in which the whole engine rolls out, waits for an update, or takes new weights."""

    start: float
    end: float
    kind: BandKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A run as a picture needs it. `lanes[slot]` holds the bars of a slot in order."""

    slots: int
    start: float
    end: float
    lanes: tuple[tuple[Bar, ...], ...]
    bands: tuple[Band, ...]

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The bars of all slots."""
        return tuple(bar for lane in self.lanes for bar in lane)


def lanes(events: Iterable[Event]) -> Lanes:
    """The lanes of a log, complete or cut off.

    A started trajectory takes the lowest free slot. When none is free it queues and takes the
    next one freed; if it is interrupted before that, it has no bar.
    """
    tracer: _Tracer | None = None
    for event in events:
        if tracer is None:
            if not isinstance(event, Begin):
                raise ValueError(f"a log opens with 'begin', got {event.kind!r}")
            tracer = _Tracer(event)
        tracer.take(event)
    if tracer is None:
        raise ValueError("the log is empty; a run writes 'begin' first")
    return tracer.lanes()


class SlotQueue(Generic[Item]):
    """Who waits for a slot: the lowest free slot goes to whoever has waited longest."""

    def __init__(self, slots: int) -> None:
        """All slots are free."""
        self._free = list(range(slots))
        self._waiting: dict[Key, Item] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key, item: Item) -> None:
        """Somebody waits from now on."""
        self._waiting[key] = item

    def add_first(self, key: Key, item: Item) -> None:
        """Somebody waits before all others."""
        self._waiting = {key: item, **self._waiting}

    def leave(self, key: Key) -> Item | None:
        """What was waited with by somebody who no longer waits; `None` if nobody did."""
        return self._waiting.pop(key, None)

    def free(self, slot: int) -> None:
        """A slot is free again."""
        heapq.heappush(self._free, slot)

    def assigned(self) -> Iterator[tuple[int, Key, Item]]:
        """Give the free slots away, as long as there are any and somebody waits."""
        while self._waiting and self._free:
            key = next(iter(self._waiting))
            yield heapq.heappop(self._free), key, self._waiting.pop(key)


@dataclass(slots=True)
class _Stretch:
    """A bar while its tokens may still be discarded: frozen only once the log is read."""

    slot: int
    begun: float
    event: Start
    version: int
    ended: float = 0.0
    kept: int = 0
    decoded: int = 0
    discarded: int = 0
    is_finished: bool = False

    def bar(self, *, length: int | None) -> Bar:
        """The bar, once nothing more can happen to it."""
        event = self.event
        return Bar(
            slot=self.slot,
            start=self.begun,
            end=self.ended,
            prompt=event.prompt,
            sample=event.sample,
            group=event.group,
            cached=event.cached,
            kept=self.kept,
            decoded=self.decoded,
            discarded=self.discarded,
            is_finished=self.is_finished,
            length=length,
            version=self.version,
        )


class _Tracer:
    """Follows the trajectories through the slots."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._now = begin.seconds
        self._version = 0
        self._rollout_since: float | None = begin.seconds
        self._rollout_end = begin.seconds
        self._queue: SlotQueue[Start] = SlotQueue(begin.slots)
        self._running: dict[Key, _Stretch] = {}
        self._written: dict[Key, list[_Stretch]] = {}
        self._length: dict[Key, int] = {}
        self._bands: list[Band] = []

    def take(self, event: Event) -> None:
        """Take in the next event."""
        self._now = event.seconds
        if isinstance(event, SyncWeights | Load | Start) and self._rollout_since is None:
            self._rollout_since = event.seconds
        if isinstance(event, Start):
            self._cut((event.prompt, event.sample), event.cached)
            self._queue.add((event.prompt, event.sample), event)
            self._fill()
        elif isinstance(event, Finish | Interrupt | Pause):
            self._stop(event)
        elif isinstance(event, Renew):
            self._cut((event.prompt, event.sample), event.kept)
        elif isinstance(event, Harvest):
            self._end_rollout()
        elif isinstance(event, SyncWeights | Resume):
            self._version = event.version
        self._wait(event)
        if isinstance(event, Update):
            for trained in event.trained:
                self._length[trained.prompt, trained.sample] = trained.tokens

    def lanes(self) -> Lanes:
        """The lanes so far; what still runs ends now."""
        by_slot: list[list[Bar]] = [[] for _ in range(self._begin.slots)]
        for key, stretches in self._written.items():
            length = self._length.get(key)
            for stretch in stretches:
                by_slot[stretch.slot].append(stretch.bar(length=length))
        for running in self._running.values():
            running.ended = self._writing_until
            by_slot[running.slot].append(running.bar(length=None))
        for lane in by_slot:
            lane.sort(key=attrgetter("start", "end"))
        self._end_rollout()
        return Lanes(
            slots=self._begin.slots,
            start=self._begin.seconds,
            end=self._now,
            lanes=tuple(tuple(lane) for lane in by_slot),
            bands=tuple(sorted(self._bands, key=attrgetter("start"))),
        )

    def _wait(self, event: Event) -> None:
        """Until now the engine stood still for what has happened."""
        kind: BandKind = "hand_over" if isinstance(event, SyncWeights) else "update"
        seconds = 0.0
        if isinstance(event, Update | SyncWeights):
            seconds = event.took_seconds
        elif isinstance(event, Landed):
            seconds = event.waited_seconds
        if seconds > 0:
            self._bands.append(Band(start=self._now - seconds, end=self._now, kind=kind))

    @property
    def _writing_until(self) -> float:
        """Nothing is written after the harvest, though interrupts take time."""
        return self._now if self._rollout_since is not None else self._rollout_end

    def _fill(self) -> None:
        for slot, key, start in self._queue.assigned():
            self._running[key] = _Stretch(
                slot=slot,
                begun=self._now,
                event=start,
                version=self._version,
                kept=start.cached,
            )

    def _stop(self, event: Finish | Interrupt | Pause) -> None:
        key = (event.prompt, event.sample)
        kept = event.tokens - event.decoded
        self._cut(key, kept)
        stretch = self._running.pop(key, None)
        if stretch is None and event.decoded and self._running:
            stretch = self._swapped(key)
        if stretch is None:
            self._queue.leave(key)
            # The environment ended a conversation outside: its last turn was the end of it.
            for last in self._written.get(key, ())[-1:]:
                last.is_finished = isinstance(event, Finish)
        else:
            stretch.ended = self._writing_until
            stretch.kept = kept
            stretch.decoded = event.decoded
            stretch.is_finished = isinstance(event, Finish)
            self._written.setdefault(key, []).append(stretch)
            self._queue.free(stretch.slot)
        if isinstance(event, Interrupt):
            self._cut(key, event.kept)
        if self._rollout_since is not None:
            self._fill()

    def _swapped(self, key: Key) -> _Stretch | None:
        """The slot of one that wrote while we thought it queued: the last one started gives way."""
        start = self._queue.leave(key)
        if start is None:
            return None
        last = max(self._running, key=lambda other: (self._running[other].begun, other))
        stretch = self._running.pop(last)
        self._queue.add_first(last, stretch.event)
        return replace(stretch, event=start, kept=start.cached)

    def _cut(self, key: Key, tokens: int) -> None:
        """Discard everything after the first `tokens` tokens of the answer."""
        for stretch in self._written.get(key, ()):
            live = stretch.decoded - stretch.discarded
            if live > tokens:
                stretch.discarded = stretch.decoded - tokens
            tokens -= min(live, tokens)

    def _end_rollout(self) -> None:
        if self._rollout_since is not None:
            if self._now > self._rollout_since:
                band = Band(start=self._rollout_since, end=self._now, kind="rollout")
                self._bands.append(band)
            self._rollout_since = None
            self._rollout_end = self._now
