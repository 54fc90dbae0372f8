"""A run as a trace for Perfetto and Chrome: every slot, update, hand-over and reward as a track.

The file has the Trace Event Format, as a JSON object. Times are whole microseconds since the run
began and never go back; bars of one thread follow each other without overlap. Events are written
as they are made, so a trace needs little more memory than the run's own record.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO, get_args

from sortedrl.errors import DataError
from sortedrl.events import Finish, Harvest, Start, Update
from sortedrl.meter import Meter
from sortedrl.report.lanes import Bar
from sortedrl.report.record import Run, RunRecord, measured
from sortedrl.report.spans import Span, SpanKind, Spans, spans
from sortedrl.whole_file import refuse_foreign, writing_whole

TraceEvent = Mapping[str, object]

PROCESSES = ("rounds", "groups", "trainer", "rewards", "slots")
"""The processes of a trace from top to bottom; a process has its place in this order as its id."""

_FIRST_THREAD = 101
"""Threads are numbered on from here, so that none has the number of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a trace holds."""

    seconds: float
    """From the run's start to its last event."""
    counts: Mapping[str, int]
    """Bars of each kind, and `counters` and `resumes`."""


@dataclass(slots=True)
class _Threads:
    """The threads so far: where they belong and what they are called."""

    names: list[tuple[str, str]] = field(default_factory=list)

    def add(self, process: str, name: str) -> tuple[int, int]:
        """The process and the number of a new thread."""
        self.names.append((process, name))
        return _process(process), _FIRST_THREAD + len(self.names) - 1


def write_trace(record: RunRecord, path: Path) -> TraceSummary:
    """Write the trace of a run; packed where the path ends in `.gz`."""
    refuse_foreign(path, mark=b'{"displayTimeUnit": "ms", "otherData": {"run": ')
    run = measured(record)
    about = {"run": run.name, "schedule": run.metrics.schedule, "slots": run.metrics.slots}
    counts = dict.fromkeys((*get_args(SpanKind), "counters", "resumes", "names"), 0)
    try:
        with writing_whole(path) as file, _packed_or_plain(path, file) as write:
            head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
            write(f'{head[:-1]}, "traceEvents": [\n'.encode())
            for number, event in enumerate(trace_events(run)):
                counts[_counted_as(event)] += 1
                line = json.dumps(event, allow_nan=False, separators=(",", ":"))
                write(f"{',' if number else ''}{line}\n".encode())
            write(b"]}\n")
    except OSError as error:
        raise DataError(
            path,
            f"cannot be written ({error.strerror}); check the path and the room on the disk",
        ) from error
    del counts["names"]
    return TraceSummary(seconds=run.lanes.end - run.lanes.start, counts=counts)


def trace_events(run: Run) -> Iterator[TraceEvent]:
    """The names of processes and threads, then everything that happened, in order."""
    found = spans(run)
    threads = _Threads()
    streams = [
        *_span_streams(run, found, threads),
        *_slot_streams(run, found, threads),
        _marks(run, found),
        _running(run),
        _tokens(run),
    ]
    yield from _names(threads)
    yield from heapq.merge(*streams, key=itemgetter("ts"))


def _names(threads: _Threads) -> Iterator[TraceEvent]:
    used = {process for process, _ in threads.names}
    for process in PROCESSES:
        if process in used:
            number = _process(process)
            yield _metadata("process_name", {"name": process}, pid=number, tid=0)
            yield _metadata("process_sort_index", {"sort_index": number}, pid=number, tid=0)
    for tid, (process, name) in enumerate(threads.names, start=_FIRST_THREAD):
        number = _process(process)
        yield _metadata("thread_name", {"name": name}, pid=number, tid=tid)
        yield _metadata("thread_sort_index", {"sort_index": tid}, pid=number, tid=tid)


def _metadata(kind: str, told: Mapping[str, object], *, pid: int, tid: int) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": told}


def _span_streams(run: Run, found: Spans, threads: _Threads) -> Iterator[Iterator[TraceEvent]]:
    """A thread for each track of a process; where bars would overlap, one more for them."""
    for process, tracks in found.tracks().items():
        for name, track in tracks.items():
            for place, lane in enumerate(_lanes(track)):
                pid, tid = threads.add(process, f"{name} ({place + 1})" if place else name)
                yield _bars(lane, run=run, pid=pid, tid=tid)


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
            "args": span.told,
        }


def _lanes(track: Sequence[Span]) -> list[list[Span]]:
    """The spans in as few lanes as they need, none over another; one lane if there are none."""
    lanes: list[list[Span]] = [[]]
    for span in sorted(track, key=lambda span: (span.start, span.end)):
        free = next((lane for lane in lanes if not lane or lane[-1].end <= span.start), None)
        if free is None:
            free = []
            lanes.append(free)
        free.append(span)
    return lanes


def _slot_streams(run: Run, found: Spans, threads: _Threads) -> Iterator[Iterator[TraceEvent]]:
    for slot, lane in enumerate(run.lanes.lanes):
        pid, tid = threads.add("slots", f"slot {slot}")
        yield _bars(
            (_slot_span(bar, run=run, found=found) for bar in lane), run=run, pid=pid, tid=tid
        )


def _slot_span(bar: Bar, *, run: Run, found: Spans) -> Span:
    """A stretch of writing with what became of it."""
    key = (bar.prompt, bar.sample)
    is_open = key in found.running and not bar.is_finished and not bar.decoded
    told: dict[str, object] = {
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
        told["length"] = bar.length
        if key in run.rewards:
            told["reward"] = run.rewards[key]
    return Span(
        kind="slots",
        start=bar.start,
        end=bar.end,
        name=f"prompt {bar.prompt}.{bar.sample}",
        told=told,
    )


def _marks(run: Run, found: Spans) -> Iterator[TraceEvent]:
    """Where a run that was killed was taken up again."""
    for resume in found.resumes:
        yield {
            "ph": "i",
            "name": "resumed",
            "cat": "rounds",
            "ts": _microseconds(run, resume.seconds),
            "pid": _process("rounds"),
            "tid": _FIRST_THREAD,
            "s": "g",
            "args": {"round": resume.round, "version": resume.version},
        }


def _running(run: Run) -> Iterator[TraceEvent]:
    """Slots in use; the area under it is the run's busy slot-seconds."""
    slots = run.metrics.slots
    last = latest = (0, 0)
    for event in run.record.events:
        if isinstance(event, Harvest):
            value = 0
        elif isinstance(event, Start | Finish):
            value = min(event.running, slots)
        else:
            continue
        moment = _microseconds(run, event.seconds)
        # of several values in one microsecond, only the last one lasts
        if moment != latest[0] and latest[1] != last[1]:
            yield _counter("running slots", latest, unit="slots")
            last = latest
        latest = (moment, value)
    if latest[1] != last[1]:
        yield _counter("running slots", latest, unit="slots")


def _tokens(run: Run) -> Iterator[TraceEvent]:
    """Tokens decoded, trained on and thrown away so far, at every harvest and update."""
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
    """The word for an event in a summary."""
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
    # without name and time, the same run gives the same file
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        yield packed.write
