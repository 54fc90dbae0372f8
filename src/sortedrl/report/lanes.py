"""Which slot wrote which answer when: a run's events as bars in lanes.

Bars of one slot never overlap, and every trajectory that got a slot has one bar per start.
A bar lies inside a rollout, so the widths of all bars add up to the run's busy slot-seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sortedrl.events import (
    Begin,
    Event,
    Finish,
    HandOver,
    Harvest,
    Interrupt,
    Load,
    Renew,
    Start,
    Update,
)
from sortedrl.types import Key

Outcome = Literal["finished", "interrupted", "discarded"]
"""The answer was completed; or stopped and continued later; or some of it was thrown away."""

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
    """Of those, the ones thrown away later: always the last ones."""
    is_finished: bool
    length: int | None
    """Tokens of the answer as it was trained on; `None` if the log ends before that."""

    @property
    def outcome(self) -> Outcome:
        """What became of the tokens written here."""
        if self.discarded:
            return "discarded"
        return "finished" if self.is_finished else "interrupted"

    @property
    def discarded_from(self) -> float:
        """The second from which on everything written here was thrown away."""
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


class _Tracer:
    """Follows the trajectories through the slots."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._now = begin.seconds
        self._rollout_since: float | None = begin.seconds
        self._rollout_end = begin.seconds
        self._free = list(range(begin.slots))
        self._queue: deque[Start] = deque()
        self._running: dict[Key, Bar] = {}
        self._written: dict[Key, list[Bar]] = {}
        self._bands: list[Band] = []

    def take(self, event: Event) -> None:
        """Take in the next event."""
        self._now = event.seconds
        if isinstance(event, HandOver | Load | Start) and self._rollout_since is None:
            self._rollout_since = event.seconds
        if isinstance(event, Start):
            self._queue.append(event)
            self._fill()
        elif isinstance(event, Finish | Interrupt):
            self._stop(event)
        elif isinstance(event, Renew):
            self._cut((event.prompt, event.sample), event.kept)
        elif isinstance(event, Harvest):
            self._end_rollout()
        if isinstance(event, Update | HandOver) and event.took_seconds > 0:
            kind: BandKind = "update" if isinstance(event, Update) else "hand_over"
            start = event.seconds - event.took_seconds
            self._bands.append(Band(start=start, end=event.seconds, kind=kind))
        if isinstance(event, Update):
            for trained in event.trained:
                self._train((trained.prompt, trained.sample), trained.tokens)

    def lanes(self) -> Lanes:
        """The lanes so far; what still runs ends now."""
        bars = [bar for bars in self._written.values() for bar in bars]
        bars += [replace(bar, end=self._writing_until) for bar in self._running.values()]
        by_slot: list[list[Bar]] = [[] for _ in range(self._begin.slots)]
        for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
            by_slot[bar.slot].append(bar)
        self._end_rollout()
        return Lanes(
            slots=self._begin.slots,
            start=self._begin.seconds,
            end=self._now,
            lanes=tuple(tuple(lane) for lane in by_slot),
            bands=tuple(sorted(self._bands, key=lambda band: band.start)),
        )

    @property
    def _writing_until(self) -> float:
        """Nothing is written after the harvest, though interrupts take time."""
        return self._now if self._rollout_since is not None else self._rollout_end

    def _fill(self) -> None:
        while self._queue and self._free:
            start = self._queue.popleft()
            self._running[start.prompt, start.sample] = Bar(
                slot=heapq.heappop(self._free),
                start=self._now,
                end=self._now,
                prompt=start.prompt,
                sample=start.sample,
                group=start.group,
                cached=start.cached,
                kept=start.cached,
                decoded=0,
                discarded=0,
                is_finished=False,
                length=None,
            )

    def _stop(self, event: Finish | Interrupt) -> None:
        key = (event.prompt, event.sample)
        kept = event.tokens - event.decoded
        self._cut(key, kept)
        bar = self._running.pop(key, None)
        if bar is None:
            self._queue = deque(s for s in self._queue if (s.prompt, s.sample) != key)
        else:
            stopped = replace(
                bar,
                end=self._writing_until,
                kept=kept,
                decoded=event.decoded,
                is_finished=isinstance(event, Finish),
            )
            self._written.setdefault(key, []).append(stopped)
            heapq.heappush(self._free, bar.slot)
        if isinstance(event, Interrupt):
            self._cut(key, event.kept)
        if self._rollout_since is not None:
            self._fill()

    def _cut(self, key: Key, tokens: int) -> None:
        """Throw away everything after the first `tokens` tokens of the answer."""
        bars = self._written.get(key, [])
        for index, bar in enumerate(bars):
            live = bar.decoded - bar.discarded
            if live > tokens:
                bars[index] = replace(bar, discarded=bar.decoded - tokens)
            tokens -= min(live, tokens)

    def _train(self, key: Key, tokens: int) -> None:
        self._written[key] = [replace(bar, length=tokens) for bar in self._written.get(key, [])]

    def _end_rollout(self) -> None:
        if self._rollout_since is not None:
            if self._now > self._rollout_since:
                band = Band(start=self._rollout_since, end=self._now, kind="rollout")
                self._bands.append(band)
            self._rollout_since = None
            self._rollout_end = self._now


def first_seconds(run: Lanes, seconds: float) -> Lanes:
    """The lanes of a run as if the picture were torn off there."""
    end = run.start + seconds
    return replace(
        run,
        end=end,
        lanes=tuple(
            tuple(_torn(bar, end) for bar in lane if bar.start < end) for lane in run.lanes
        ),
        bands=tuple(
            replace(band, end=min(band.end, end)) for band in run.bands if band.start < end
        ),
    )


def _torn(bar: Bar, end: float) -> Bar:
    """The part of a bar before `end`: what was written by then, and what of it was to stay."""
    if bar.end <= end:
        return bar
    decoded = round(bar.decoded * (end - bar.start) / (bar.end - bar.start))
    return replace(
        bar,
        end=end,
        decoded=decoded,
        discarded=max(0, decoded - (bar.decoded - bar.discarded)),
        is_finished=False,
        length=bar.kept + bar.decoded if bar.length is None else bar.length,
    )
