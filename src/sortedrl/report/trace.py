"""A run as a trace for Perfetto and Chrome: slots, updates, weight syncs and rewards as tracks.

The file is a JSON object in the Trace Event Format. Times are whole microseconds since the start of
the run and never decrease; bars of a thread do not overlap. Events are written as they are
generated, so memory use is little more than that of the run's record. Spans lie between the first
and the last event; what has not ended when the log ends, ends there.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import IO, Literal, get_args

from sortedrl.core.events import (
    Event,
    Finish,
    Harvest,
    Interrupt,
    Landed,
    Load,
    Pause,
    Resume,
    Score,
    Scored,
    Start,
    SyncWeights,
    Update,
)
from sortedrl.core.files import refuse_foreign, writing_whole
from sortedrl.core.meter import Meter
from sortedrl.errors import os_errors
from sortedrl.report.lanes import Bar
from sortedrl.report.record import Run, RunRecord, measured
from sortedrl.types import Key

TraceEvent = Mapping[str, object]

PROCESSES = ("rounds", "groups", "trainer", "rewards", "slots")
"""The processes of a trace from top to bottom; the position is the process id."""

_FIRST_THREAD = 101
"""Threads are numbered from here on, so that none has the number of a process."""

SpanKind = Literal["rounds", "groups", "updates", "weight_syncs", "waits", "rewards", "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """The contents of a trace."""

    seconds: float
    """From the start of the run to its last event."""
    counts: Mapping[str, int]
    """Bars of each kind, `counters` and `resumes`."""


def write_trace(record: RunRecord, path: Path) -> TraceSummary:
    """Write the trace of a run, compressed if the path ends in `.gz`."""
    refuse_foreign(path, mark=b'{"displayTimeUnit": "ms", "otherData": {"run": ')
    run = measured(record)
    about = {"run": run.name, "schedule": run.metrics.schedule, "slots": run.metrics.slots}
    counts = dict.fromkeys((*get_args(SpanKind), "counters", "resumes", "names"), 0)
    advice = "; check the path and the free disk space"
    with (
        os_errors(path, "cannot be written", advice=advice),
        writing_whole(path) as file,
        _packed_or_plain(path, file) as write,
    ):
        head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
        write(f'{head[:-1]}, "traceEvents": [\n'.encode())
        for number, event in enumerate(trace_events(run)):
            counts[_counted_as(event)] += 1
            line = json.dumps(event, allow_nan=False, separators=(",", ":"))
            write(f"{',' if number else ''}{line}\n".encode())
        write(b"]}\n")
    del counts["names"]
    return TraceSummary(seconds=run.lanes.end - run.lanes.start, counts=counts)


def trace_events(run: Run) -> Iterator[TraceEvent]:
    """The names of processes and threads, then all events in order."""
    spans = _Spans(run)
    threads: list[tuple[str, str]] = []
    streams: list[Iterator[TraceEvent]] = []
    for (process, name), track in spans.tracks():
        for place, lane in enumerate(_lanes(track)):
            threads.append((process, f"{name} ({place + 1})" if place else name))
            streams.append(_bars(lane, run=run, pid=_process(process), tid=_thread(threads)))
    for slot, bars in enumerate(run.lanes.lanes):
        threads.append(("slots", f"slot {slot}"))
        written = (_slot_span(bar, run=run, running=spans.running) for bar in bars)
        streams.append(_bars(written, run=run, pid=_process("slots"), tid=_thread(threads)))
    streams += [_resumes(run), _running(run), _tokens(run)]
    yield from _names(threads)
    yield from heapq.merge(*streams, key=itemgetter("ts"))


def _thread(threads: Sequence[object]) -> int:
    """The number of the last thread."""
    return _FIRST_THREAD + len(threads) - 1


def _names(threads: Sequence[tuple[str, str]]) -> Iterator[TraceEvent]:
    used = {process for process, _ in threads}
    for process in PROCESSES:
        if process in used:
            number = _process(process)
            yield _metadata("process_name", {"name": process}, pid=number, tid=0)
            yield _metadata("process_sort_index", {"sort_index": number}, pid=number, tid=0)
    for tid, (process, name) in enumerate(threads, start=_FIRST_THREAD):
        number = _process(process)
        yield _metadata("thread_name", {"name": name}, pid=number, tid=tid)
        yield _metadata("thread_sort_index", {"sort_index": tid}, pid=number, tid=tid)


def _metadata(kind: str, args: Mapping[str, object], *, pid: int, tid: int) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _bars(lane: Iterable[Span], *, run: Run, pid: int, tid: int) -> Iterator[TraceEvent]:
    for span in lane:
        start, end = _microseconds(run, span.start), _microseconds(run, span.end)
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "ts": start,
            "dur": end - start,
            "pid": pid,
            "tid": tid,
            "args": span.args,
        }


def _lanes(track: Sequence[Span]) -> list[list[Span]]:
    """Distribute the spans over as few lanes as possible, without overlap; at least one lane."""
    lanes: list[list[Span]] = [[]]
    for span in sorted(track, key=lambda span: (span.start, span.end)):
        free = next((lane for lane in lanes if not lane or lane[-1].end <= span.start), None)
        if free is None:
            free = []
            lanes.append(free)
        free.append(span)
    return lanes


def _slot_span(bar: Bar, *, run: Run, running: Collection[Key]) -> Span:
    """A slot interval with its outcome."""
    key = (bar.prompt, bar.sample)
    is_open = key in running and not bar.is_finished and not bar.decoded
    args: dict[str, object] = {
        "prompt": bar.prompt,
        "sample": bar.sample,
        "group": bar.group,
        "version": bar.version,
        "kept": bar.kept,
        "decoded": bar.decoded,
        "discarded": bar.discarded,
        "outcome": "running" if is_open else bar.outcome,
    }
    if bar.length is not None:
        args["length"] = bar.length
        if key in run.rewards:
            args["reward"] = run.rewards[key]
    return Span(
        kind="slots",
        start=bar.start,
        end=bar.end,
        name=f"prompt {bar.prompt}.{bar.sample}",
        args=args,
    )


def _resumes(run: Run) -> Iterator[TraceEvent]:
    """Where the run resumed from a checkpoint."""
    for event in run.record.events:
        if isinstance(event, Resume):
            yield {
                "ph": "i",
                "name": "resumed",
                "cat": "rounds",
                "ts": _microseconds(run, event.seconds),
                "pid": _process("rounds"),
                "tid": _FIRST_THREAD,
                "s": "g",
                "args": {"round": event.round, "version": event.version},
            }


def _running(run: Run) -> Iterator[TraceEvent]:
    """Slots in use; the area under it is the busy slot-seconds of the run."""
    slots = run.metrics.slots
    last = latest = (0, 0)
    for event in run.record.events:
        if isinstance(event, Harvest):
            value = 0
        elif isinstance(event, Start | Finish | Pause):
            value = min(event.running, slots)
        else:
            continue
        moment = _microseconds(run, event.seconds)
        # of several values in one microsecond, only the last one counts
        if moment != latest[0] and latest[1] != last[1]:
            yield _counter("running slots", latest, unit="slots")
            last = latest
        latest = (moment, value)
    if latest[1] != last[1]:
        yield _counter("running slots", latest, unit="slots")


def _tokens(run: Run) -> Iterator[TraceEvent]:
    """Tokens decoded, trained and discarded so far, at every harvest and update."""
    meter = Meter()
    events = run.record.events
    for event in events:
        meter(event)
        if isinstance(event, Harvest | Update) or event is events[-1]:
            ledger, moment = meter.run.ledger, _microseconds(run, event.seconds)
            yield _counter("decoded tokens", (moment, ledger.decoded), unit="tokens")
            yield _counter("trained tokens", (moment, ledger.trained), unit="tokens")
            yield _counter("discarded tokens", (moment, ledger.discarded), unit="tokens")


def _counter(name: str, point: tuple[int, int], *, unit: str) -> TraceEvent:
    moment, value = point
    return {
        "ph": "C",
        "name": name,
        "ts": moment,
        "pid": _process("rounds"),
        "tid": _FIRST_THREAD,
        "args": {unit: value},
    }


def _counted_as(event: TraceEvent) -> str:
    """The name under which a summary counts an event."""
    kinds = {"M": "names", "C": "counters", "i": "resumes"}
    return kinds.get(str(event["ph"])) or str(event["cat"])


def _process(name: str) -> int:
    return 1 + PROCESSES.index(name)


def _microseconds(run: Run, second: float) -> int:
    return round(1e6 * (second - run.lanes.start))


@contextmanager
def _packed_or_plain(path: Path, file: IO[bytes]) -> Iterator[Callable[[bytes], object]]:
    if path.suffix != ".gz":
        yield file.write
        return
    # without name and time, so that the same run gives the same file
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        yield packed.write


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time, its name, and the arguments shown with it."""

    kind: SpanKind
    start: float
    end: float
    name: str
    args: Mapping[str, object] = field(default_factory=dict)


class _Spans:
    """The spans of a run, by kind."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: dict[SpanKind, list[Span]] = {kind: [] for kind in get_args(SpanKind)}
        self._workers: dict[int, list[Span]] = {}
        self._rollout_since: float | None = run.lanes.start
        self._round: int | None = None
        self._place = -1
        self._loads: dict[int, Load] = {}
        self._is_overlapped = any(isinstance(event, Landed) for event in run.record.events)
        self._begun = 0.0
        self._flight: Update | None = None
        self.running: set[Key] = set()
        """Answers that were running when the log ends."""
        for event in run.record.events:
            self._take(event)
        self._end_rollout(run.lanes.end)
        self._land(run.lanes.end)
        for group in list(self._loads):
            self._close(group, run.lanes.end, is_closed=False)

    def tracks(self) -> Iterator[tuple[tuple[str, str], list[Span]]]:
        """The spans by process and thread, in the order of the trace."""
        yield ("rounds", "rollout"), self._found["rounds"]
        yield ("groups", "group"), self._found["groups"]
        yield ("trainer", "updates"), self._found["updates"]
        yield ("trainer", "weight sync"), self._found["weight_syncs"]
        if self._found["waits"]:
            yield ("rewards", "waiting"), self._found["waits"]
        for number in sorted(self._workers):
            yield ("rewards", f"worker {number}"), self._workers[number]

    def _take(self, event: Event) -> None:
        if isinstance(event, SyncWeights | Load | Start | Harvest):
            self._enter(event)
        if isinstance(event, Start):
            self.running.add((event.prompt, event.sample))
        elif isinstance(event, Finish | Interrupt | Pause):
            self.running.discard((event.prompt, event.sample))
        elif isinstance(event, Load):
            self._loads[event.group] = event
        elif isinstance(event, Harvest):
            self._end_rollout(event.seconds)
        elif isinstance(event, SyncWeights):
            self._begun = event.seconds
            name = f"weight sync of version {event.version}"
            args = {"version": event.version, "round": event.round}
            start = event.seconds - event.took_seconds
            self._add("weight_syncs", name, start=start, end=event.seconds, args=args)
        elif isinstance(event, Score):
            self._score(event)
        elif isinstance(event, Update):
            self._update(event)
        elif isinstance(event, Landed):
            # The event has a later clock reading than the end of the update.
            self._land(min(self._begun + event.took_seconds, event.seconds))

    def _add(
        self, kind: SpanKind, name: str, *, start: float, end: float, args: Mapping[str, object]
    ) -> None:
        self._found[kind].append(Span(kind=kind, name=name, start=start, end=end, args=args))

    def _enter(self, event: SyncWeights | Load | Start | Harvest) -> None:
        """Rounds are numbered in the order of their first event."""
        if event.round != self._round:
            self._round = event.round
            self._place += 1
        if self._rollout_since is None and not isinstance(event, Harvest):
            self._rollout_since = event.seconds

    def _end_rollout(self, end: float) -> None:
        if self._rollout_since is None or self._round is None:
            return
        figures = self._run.metrics.rounds[self._place]
        args = {
            "round": self._round,
            "bubble": round(figures.bubble, 6),
            "answers": figures.trajectories,
        }
        name = f"rollout {self._round}"
        self._add("rounds", name, start=self._rollout_since, end=end, args=args)
        self._rollout_since = None

    def _update(self, event: Update) -> None:
        if self._is_overlapped:
            # It begins once the engine has its weights: after a weight sync, if there is one.
            self._flight, self._begun = event, event.seconds
        else:
            self._add_update(event, event.seconds - event.took_seconds, end=event.seconds)
        for group in event.closed:
            self._close(group, event.seconds, is_closed=True)

    def _land(self, end: float) -> None:
        if self._flight is not None:
            self._add_update(self._flight, self._begun, end=end)
            self._flight = None

    def _add_update(self, event: Update, start: float, *, end: float) -> None:
        args = {
            "version": event.version,
            "round": event.round,
            "answers": len(event.trained),
            "tokens": sum(trained.tokens for trained in event.trained),
            "closed_groups": list(event.closed),
        }
        self._add("updates", f"update of version {event.version}", start=start, end=end, args=args)

    def _close(self, group: int, end: float, *, is_closed: bool) -> None:
        load = self._loads.pop(group)
        args = {
            "group": group,
            "prompts": load.prompts,
            "answers": load.trajectories,
            "is_closed": is_closed,
        }
        self._add("groups", f"group {group}", start=load.seconds, end=end, args=args)

    def _score(self, event: Score) -> None:
        start = event.seconds - event.waited_seconds
        args = {"round": event.round, "answers": len(event.scored)}
        self._add("waits", "waiting for rewards", start=start, end=event.seconds, args=args)
        batches: dict[tuple[int, float], list[Span]] = {}
        for scored in event.scored:
            if scored.worker is not None and scored.start is not None:
                batch = batches.setdefault((scored.worker, scored.start), [])
                batch.append(self._reward(scored, scored.start, until=event.seconds))
        for (worker, _), batch in batches.items():
            self._workers.setdefault(worker, []).extend(_in_turn(batch, until=event.seconds))

    def _reward(self, scored: Scored, start: float, *, until: float) -> Span:
        """One reward, clamped to the run in case clocks differ slightly."""
        start = min(max(start, self._run.lanes.start), until)
        args: dict[str, object] = {"prompt": scored.prompt, "sample": scored.sample}
        if scored.reward is not None:
            args["reward"] = scored.reward
        return Span(
            kind="rewards",
            start=start,
            end=min(start + (scored.took_seconds or 0.0), until),
            name=f"prompt {scored.prompt}.{scored.sample}",
            args=args,
        )


def _in_turn(batch: Sequence[Span], *, until: float) -> list[Span]:
    """Split a batch of answers scored together into consecutive spans, if it lasted long enough."""
    total = sum(span.end - span.start for span in batch)
    if batch[0].start + total > until:
        return list(batch)
    placed: list[Span] = []
    now = batch[0].start
    for span in batch:
        end = now + span.end - span.start
        placed.append(replace(span, start=now, end=end))
        now = end
    return placed
