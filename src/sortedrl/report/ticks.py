"""A small run second by second, as plain text: one row per slot, one column per second.

For runs where a decode step takes exactly one second, so that a letter is a token.
Below the rows stands a list of what happened: what was loaded, started, harvested, interrupted,
resumed and trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from textwrap import wrap

from sortedrl.core.events import (
    Begin,
    Event,
    Finish,
    Harvest,
    Interrupt,
    Load,
    Renew,
    Resume,
    Start,
    Update,
)
from sortedrl.errors import ConfigError
from sortedrl.report.lanes import Bar, Lanes, lanes
from sortedrl.types import Key

_MARGIN = 9
_BANDS = {"update": "|", "hand_over": ":", "rollout": "."}

MAX_PROMPTS = 26
"""Prompts are named by letters."""
_WIDTH = 88


def ticks(events: Sequence[Event]) -> str:
    """The rows of the slots, what the marks mean, and the story; without a last newline."""
    run = lanes(events)
    _check(run)
    begin = events[0]
    assert isinstance(begin, Begin)
    rows = [f"slot {slot + 1}".ljust(_MARGIN) + _row(run, slot) for slot in range(run.slots)]
    heading = f"{begin.schedule}: {run.slots} slots, {run.end - run.start:.0f} seconds"
    return "\n".join([heading, "", _scale(run), *rows, "", _legend(run), "", *story(events, run)])


def _check(run: Lanes) -> None:
    """Refuse a run that has no second-by-second picture."""
    if any(bar.decoded != bar.end - bar.start for bar in run.bars) or any(
        second % 1 for band in run.bands for second in (band.start, band.end)
    ):
        raise ConfigError(
            "a picture in ticks needs a run where every decode step takes 1 second and everything "
            "else whole seconds; choose hardware 'ticks', or draw the run as SVG"
        )
    prompts = max((bar.prompt for bar in run.bars), default=0) + 1
    if prompts > MAX_PROMPTS:
        raise ConfigError(
            f"a picture in ticks names prompts by letters, so there may be {MAX_PROMPTS}, "
            f"got {prompts}; choose the preset 'six', or draw the run as SVG"
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
    if any(band.kind == "hand_over" for band in run.bands):
        entries.append(":: hand-over")
    return "   ".join(entries)


def letter(prompt: int) -> str:
    """The name of a prompt: A, B, C and so on."""
    return chr(ord("A") + prompt)


def story(events: Sequence[Event], run: Lanes) -> list[str]:
    """What happened in each second; harvests and updates have a line of their own.

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
    """Turns events into clauses, neighbours of one kind into one clause."""

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
        """The clauses of events of one kind at one moment."""
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
            held = "" if cached == kept else f", of which {_numbers(kept)} still hold"
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
