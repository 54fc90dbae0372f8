"""Which slot generated which answer when: the events of a run as bars in lanes, and as plain text.

Bars of a slot never overlap, and every trajectory that got a slot has one bar per start. Bars lie
inside rollouts, so their widths add up to the busy slot-seconds of the run.

`ticks` shows a small run second by second, one row per slot and one column per second, for runs
whose decode steps take exactly one second, so that a letter is a token. Below the rows it lists
what was loaded, started, harvested, interrupted, resumed and trained.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from textwrap import wrap
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
from sortedrl.errors import ConfigError
from sortedrl.types import Key

Item = TypeVar("Item")
BandKind = Literal["rollout", "update", "weight_sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A slot interval: a trajectory in a slot from its start to its finish or interrupt."""

    slot: int
    start: float
    end: float
    prompt: int
    sample: int
    group: int
    cached: int
    """Tokens cached at the start."""
    kept: int
    """Cached tokens that the weights of this rollout kept."""
    decoded: int
    """Tokens decoded in this interval."""
    discarded: int
    """Tokens of this interval that were discarded later: always the last ones."""
    is_finished: bool
    length: int | None
    """Tokens of the answer when it was trained on; `None` if the log ends before that."""
    version: int
    """The version of the weights that decoded here."""

    @property
    def outcome(self) -> Literal["finished", "interrupted", "discarded"]:
        """Finished; or interrupted and continued later; or partly discarded."""
        if self.discarded:
            return "discarded"
        return "finished" if self.is_finished else "interrupted"

    @property
    def discarded_from(self) -> float:
        """The second after which everything decoded here was discarded."""
        share = 1 - self.discarded / self.decoded if self.decoded else 1.0
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A time in which the whole engine rolls out, waits for an update, or syncs weights."""

    start: float
    end: float
    kind: BandKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A run as lanes: `lanes[slot]` holds the bars of a slot in order."""

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
    """The lanes of a log, complete or truncated.

    A started trajectory takes the lowest free slot. If none is free, it queues for the next one; if
    it is interrupted before that, it has no bar.
    """
    tracer: _Tracer | None = None
    for event in events:
        if tracer is None:
            if not isinstance(event, Begin):
                raise ValueError(f"a log must start with 'begin', got {event.kind!r}")
            tracer = _Tracer(event)
        tracer.take(event)
    if tracer is None:
        raise ValueError("the log is empty; the first event must be 'begin'")
    return tracer.lanes()


class SlotQueue(Generic[Item]):
    """Assigns slots: the lowest free slot goes to the first in the queue."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._waiting: dict[Key, Item] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key, item: Item) -> None:
        """Add an answer to the end of the queue."""
        self._waiting[key] = item

    def add_first(self, key: Key, item: Item) -> None:
        """Add an answer to the front of the queue."""
        self._waiting = {key: item, **self._waiting}

    def leave(self, key: Key) -> Item | None:
        """Remove an answer from the queue; returns its item, or `None` if it was not queued."""
        return self._waiting.pop(key, None)

    def free(self, slot: int) -> None:
        """Mark a slot as free."""
        heapq.heappush(self._free, slot)

    def assigned(self) -> Iterator[tuple[int, Key, Item]]:
        """Assign free slots to queued answers, as long as there are both."""
        while self._waiting and self._free:
            key = next(iter(self._waiting))
            yield heapq.heappop(self._free), key, self._waiting.pop(key)


@dataclass(slots=True)
class _OpenBar:
    """A bar whose tokens may still be discarded; frozen at the end of the log."""

    slot: int
    begun: float
    event: Start
    version: int
    ended: float = 0.0
    kept: int = 0
    decoded: int = 0
    discarded: int = 0
    is_finished: bool = False

    def frozen(self, *, length: int | None) -> Bar:
        """The final bar."""
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
        self._running: dict[Key, _OpenBar] = {}
        self._written: dict[Key, list[_OpenBar]] = {}
        self._length: dict[Key, int] = {}
        self._bands: list[Band] = []

    def take(self, event: Event) -> None:
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
        """The lanes so far; what is still running ends now."""
        by_slot: list[list[Bar]] = [[] for _ in range(self._begin.slots)]
        for key, bars in self._written.items():
            length = self._length.get(key)
            for bar in bars:
                by_slot[bar.slot].append(bar.frozen(length=length))
        for running in self._running.values():
            running.ended = self._writing_until
            by_slot[running.slot].append(running.frozen(length=None))
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
        """The engine was idle for the cause of this event until now."""
        kind: BandKind = "weight_sync" if isinstance(event, SyncWeights) else "update"
        seconds = 0.0
        if isinstance(event, Update | SyncWeights):
            seconds = event.took_seconds
        elif isinstance(event, Landed):
            seconds = event.waited_seconds
        if seconds > 0:
            self._bands.append(Band(start=self._now - seconds, end=self._now, kind=kind))

    @property
    def _writing_until(self) -> float:
        """Nothing is decoded after the harvest, although interrupts take time."""
        return self._now if self._rollout_since is not None else self._rollout_end

    def _fill(self) -> None:
        for slot, key, start in self._queue.assigned():
            self._running[key] = _OpenBar(
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
        bar = self._running.pop(key, None)
        if bar is None and event.decoded and self._running:
            bar = self._swapped(key)
        if bar is None:
            self._queue.leave(key)
            # The environment ended a conversation while it was outside: its last turn was its end.
            for last in self._written.get(key, ())[-1:]:
                last.is_finished = isinstance(event, Finish)
        else:
            bar.ended = self._writing_until
            bar.kept = kept
            bar.decoded = event.decoded
            bar.is_finished = isinstance(event, Finish)
            self._written.setdefault(key, []).append(bar)
            self._queue.free(bar.slot)
        if isinstance(event, Interrupt):
            self._cut(key, event.kept)
        if self._rollout_since is not None:
            self._fill()

    def _swapped(self, key: Key) -> _OpenBar | None:
        """Swap a queued answer that decoded after all with the answer started last."""
        start = self._queue.leave(key)
        if start is None:
            return None
        last = max(self._running, key=lambda other: (self._running[other].begun, other))
        bar = self._running.pop(last)
        self._queue.add_first(last, bar.event)
        return replace(bar, event=start, kept=start.cached)

    def _cut(self, key: Key, tokens: int) -> None:
        """Discard everything after the first `tokens` tokens of the answer."""
        for bar in self._written.get(key, ()):
            live = bar.decoded - bar.discarded
            if live > tokens:
                bar.discarded = bar.decoded - tokens
            tokens -= min(live, tokens)

    def _end_rollout(self) -> None:
        if self._rollout_since is not None:
            if self._now > self._rollout_since:
                band = Band(start=self._rollout_since, end=self._now, kind="rollout")
                self._bands.append(band)
            self._rollout_since = None
            self._rollout_end = self._now


_MARGIN = 9
_BANDS = {"update": "|", "weight_sync": ":", "rollout": "."}

MAX_PROMPTS = 26
"""Limit of prompts, which are named by letters."""
_WIDTH = 88


def ticks(events: Sequence[Event]) -> str:
    """Slot rows, legend and list of events, without a final newline."""
    run = lanes(events)
    _check(run)
    begin = events[0]
    assert isinstance(begin, Begin)
    rows = [f"slot {slot + 1}".ljust(_MARGIN) + _row(run, slot) for slot in range(run.slots)]
    heading = f"{begin.schedule}: {run.slots} slots, {run.end - run.start:.0f} seconds"
    return "\n".join([heading, "", _scale(run), *rows, "", _legend(run), "", *story(events, run)])


def _check(run: Lanes) -> None:
    """Refuse a run that cannot be shown second by second."""
    if any(bar.decoded != bar.end - bar.start for bar in run.bars) or any(
        second % 1 for band in run.bands for second in (band.start, band.end)
    ):
        raise ConfigError(
            "ticks need a run whose decode steps take 1 second and everything else whole seconds; "
            "set hardware to 'ticks', or draw the run as SVG"
        )
    prompts = max((bar.prompt for bar in run.bars), default=0) + 1
    if prompts > MAX_PROMPTS:
        raise ConfigError(
            f"ticks name prompts by letters, so at most {MAX_PROMPTS} are possible, "
            f"got {prompts}; use the preset 'six', or draw the run as SVG"
        )


def _scale(run: Lanes) -> str:
    marks = (str(second).ljust(5) for second in range(0, int(run.end - run.start) + 1, 5))
    return ("second".ljust(_MARGIN) + "".join(marks)).rstrip()


def _row(run: Lanes, slot: int) -> str:
    row = [" "] * int(run.end - run.start)
    for band in run.bands:
        for second in range(int(band.start - run.start), int(band.end - run.start)):
            row[second] = _BANDS[band.kind]
    for bar in run.lanes[slot]:
        start = int(bar.start - run.start)
        kept = bar.decoded - bar.discarded
        for token in range(bar.decoded):
            mark = letter(bar.prompt)
            row[start + token] = mark if token < kept else mark.lower()
    return "".join(row).rstrip()


def _legend(run: Lanes) -> str:
    entries = ["A: a token of prompt A"]
    if any(bar.discarded for bar in run.bars):
        entries.append("a: one discarded later")
    entries += [".: idle slot", "|: update"]
    if any(band.kind == "weight_sync" for band in run.bands):
        entries.append(":: weight sync")
    return "   ".join(entries)


def letter(prompt: int) -> str:
    """The name of a prompt: A, B, C and so on."""
    return chr(ord("A") + prompt)


def story(events: Sequence[Event], run: Lanes) -> list[str]:
    """What happened in each second; harvests and updates have lines of their own.

    An update is listed when it begins.
    """
    lines: list[str] = []
    for second, moment in groupby(_Narrator(events, run).clauses(), key=itemgetter(0)):
        time = f"{second - run.start:3.0f} s  "
        parts: list[list[str]] = []
        for _, clause in moment:
            if not parts or clause.startswith(("harvest", "update")):
                parts.append([])
            parts[-1].append(clause)
        for part in parts:
            later = " " * (len(time) + 2)
            lines += wrap("; ".join(part), _WIDTH, initial_indent=time, subsequent_indent=later)
            time = " " * len(time)
    return lines


class _Narrator:
    """Turns events into clauses, one for adjacent events of one kind."""

    def __init__(self, events: Sequence[Event], run: Lanes) -> None:
        self._events = events
        self._has_samples = any(bar.sample for bar in run.bars)
        self._members: dict[int, list[Key]] = {}
        for event in events:
            if isinstance(event, Start):
                members = self._members.setdefault(event.group, [])
                if (event.prompt, event.sample) not in members:
                    members.append((event.prompt, event.sample))
        self._bars: dict[Key, Iterator[Bar]] = {
            key: iter(sorted(bars, key=lambda bar: (bar.start, bar.end)))
            for key, bars in _by_key(run.bars).items()
        }
        self._seen: set[Key] = set()
        self._ready: list[Key] = []
        self._num_updates = 0

    def clauses(self) -> Iterator[tuple[float, str]]:
        """The second and the text of each clause."""
        for (second, _), run in groupby(self._events, key=_moment):
            yield from ((second, clause) for clause in self._tell(list(run)))

    def _tell(self, events: list[Event]) -> Iterator[str]:
        """The clauses of events of one kind at the same time."""
        starts = [event for event in events if isinstance(event, Start)]
        if starts:
            yield from self._describe_starts(starts)
        stops = [event for event in events if isinstance(event, Interrupt)]
        if stops:
            yield from self._describe_interrupts(stops)
        finishes = [event for event in events if isinstance(event, Finish)]
        if finishes:
            yield self._describe_finishes(finishes)
        renewals = [event for event in events if isinstance(event, Renew)]
        if renewals:
            yield self._describe_renewals(renewals)
        for event in events:
            if isinstance(event, Load):
                yield f"load group {event.group}: {self._names(self._members[event.group])}"
            elif isinstance(event, Harvest):
                yield f"harvest {self._names(self._ready)}" if self._ready else "harvest nothing"
            elif isinstance(event, Update):
                yield self._describe_update(event)
            elif isinstance(event, Resume):
                yield f"resume from the checkpoint after update {self._num_updates}"

    def _describe_starts(self, starts: list[Start]) -> Iterator[str]:
        fresh: list[Key] = []
        redrawn: list[Key] = []
        resumed: list[tuple[Key, Bar]] = []
        for event in starts:
            key = (event.prompt, event.sample)
            bar = next(self._bars[key])
            if key not in self._seen:
                fresh.append(key)
            elif event.cached:
                resumed.append((key, bar))
            else:
                redrawn.append(key)
            self._seen.add(key)
        if redrawn:
            yield f"restart {self._names(redrawn)} from scratch"
        if resumed:
            names = self._names(key for key, _ in resumed)
            cached, kept = [b.cached for _, b in resumed], [b.kept for _, b in resumed]
            held = "" if cached == kept else f", of which {_numbers(kept)} are kept"
            yield f"resume {names} after {_tokens(cached)}{held}"
        if fresh:
            yield f"start {self._names(fresh)}"

    def _describe_interrupts(self, stops: list[Interrupt]) -> Iterator[str]:
        for is_kept, run in groupby(stops, key=lambda event: event.kept > 0 or not event.tokens):
            group = list(run)
            names = self._names((event.prompt, event.sample) for event in group)
            verb = "keep" if is_kept else "discard"
            whose = "its" if len(group) == 1 else "their"
            count = [event.kept if is_kept else event.tokens for event in group]
            yield f"interrupt {names} and {verb} {whose} {_tokens(count)}"

    def _describe_finishes(self, finishes: list[Finish]) -> str:
        keys = [(event.prompt, event.sample) for event in finishes]
        self._ready += keys
        verb = "is" if len(keys) == 1 else "are"
        lengths = _tokens([event.tokens for event in finishes])
        return f"{self._names(keys)} {verb} complete with {lengths}"

    def _describe_renewals(self, renewals: list[Renew]) -> str:
        keys = [(event.prompt, event.sample) for event in renewals]
        self._ready = [key for key in self._ready if key not in keys]
        kept = _tokens([event.kept for event in renewals])
        verb = "is queued again" if len(keys) == 1 else "are queued again"
        return f"{self._names(keys)} waited through the update and {verb} with {kept}"

    def _describe_update(self, event: Update) -> str:
        keys = [(trained.prompt, trained.sample) for trained in event.trained]
        self._ready = [key for key in self._ready if key not in keys]
        lengths = _tokens([trained.tokens for trained in event.trained])
        self._num_updates += 1
        text = f"update {self._num_updates} trains {self._names(keys)} with {lengths}"
        oldest = max((trained.staleness_max for trained in event.trained), default=0)
        if oldest:
            text += f", the oldest {oldest} update{'s' if oldest > 1 else ''} old"
        if event.closed:
            groups = "group" if len(event.closed) == 1 else "groups"
            text += f"; close {groups} {_numbers(event.closed)}"
        return text

    def _names(self, keys: Iterable[Key]) -> str:
        return " ".join(letter(p) + (str(s) if self._has_samples else "") for p, s in keys)


def _moment(event: Event) -> tuple[float, str]:
    """When an event is listed, and its kind; an update is listed when it begins."""
    begun = event.took_seconds if isinstance(event, Update) else 0.0
    return event.seconds - begun, event.kind


def _by_key(bars: Iterable[Bar]) -> dict[Key, list[Bar]]:
    keyed: dict[Key, list[Bar]] = {}
    for bar in bars:
        keyed.setdefault((bar.prompt, bar.sample), []).append(bar)
    return keyed


def _numbers(values: Iterable[int]) -> str:
    return " ".join(str(value) for value in values)


def _tokens(counts: Sequence[int]) -> str:
    return f"{_numbers(counts)} token{'' if list(counts) == [1] else 's'}"
