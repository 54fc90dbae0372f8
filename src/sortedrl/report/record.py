"""A run as its folder tells it: settings, events, numbers, some answers, read and measured.

Everything is read as far as it is whole. A run that is still going on, or was killed in the middle
of a line, is the run up to its last whole line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sortedrl.config.toml import read_toml
from sortedrl.core.events import Begin, End, Event, Score, read_events
from sortedrl.core.logs import LoggedAnswer, Value, read_answers, read_metrics
from sortedrl.core.meter import measure
from sortedrl.core.metrics import Metrics
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.lanes import Lanes, lanes
from sortedrl.types import Key

BESIDE = ("metrics.jsonl", "config.toml", "answers.jsonl", "run.json")
"""What a run's folder holds beside its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run wrote down; `events` open with `begin`."""

    name: str
    events: Sequence[Event]
    rows: Sequence[Mapping[str, Value]] = ()
    """The rows of its metrics: one for each update, and one for each evaluation."""
    config: Mapping[str, Any] | None = None
    """Every setting, as resolved; `None` where only events are known."""
    answers: Sequence[LoggedAnswer] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """When it started, on which machine, and the commit, as far as it is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """An evaluation: the share of right answers, and where in the run it took place."""

    score: float
    update: int
    answers: float
    """Answers trained on by then."""
    tokens: float
    """Tokens trained on by then."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run, measured."""

    record: RunRecord
    metrics: Metrics
    lanes: Lanes
    scores: tuple[HeldOut, ...]
    rewards: Mapping[Key, float]
    """The rewards of the answers that were trained on, where they got any."""

    @property
    def name(self) -> str:
        """What pages and pictures call it."""
        return self.record.name

    @property
    def is_ended(self) -> bool:
        """Whether it used up its prompts; not so while it goes on, or where it was stopped."""
        return isinstance(self.record.events[-1], End)


def read_run(path: Path, *, name: str | None = None) -> RunRecord:
    """The record of a run's folder, or of a bare log of events.

    Its name is that of the folder or the file by default.
    """
    called = run_names([path])[0] if name is None else name
    if path.is_file():
        return RunRecord(name=called, events=_events(path))
    log = path / "events.jsonl"
    if not log.is_file():
        raise DataError(
            path,
            "must be the folder of a run, with events.jsonl in it, or a log of events; "
            "check the path",
        )
    return with_files(RunRecord(name=called, events=_events(log)), path)


def with_files(record: RunRecord, folder: Path) -> RunRecord:
    """The record with what lies beside its events in the folder of the run."""
    rows, config, answers, mark = (folder / name for name in BESIDE)
    return replace(
        record,
        rows=read_metrics(rows) if rows.is_file() else [],
        config=read_toml(config) if config.is_file() else None,
        answers=read_answers(answers) if answers.is_file() else [],
        facts=_facts(mark),
    )


def _facts(mark: Path) -> dict[str, str]:
    """The texts in the mark of a run; none where it cannot be read."""
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    texts = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in texts if isinstance(value, str)}


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The records of several runs, with names that tell them apart."""
    if not paths:
        raise ConfigError("at least one run must be given, got none; name the folder of a run")
    return [read_run(p, name=n) for p, n in zip(paths, run_names(paths), strict=True)]


def run_names(paths: Sequence[Path]) -> list[str]:
    """What runs at these places are called: as much of each path's end as no other has."""
    places = [_parts(path.resolve()) for path in paths]
    names = []
    for number, parts in enumerate(places):
        others = places[:number] + places[number + 1 :]
        if parts in others:
            given = str(paths[number])
            raise ConfigError(f"every run must be given once, got {given!r} twice; leave one out")
        count = 1
        while count < len(parts) and any(o[-count:] == parts[-count:] for o in others):
            count += 1
        names.append("/".join(parts[-count:]))
    return names


def _parts(path: Path) -> tuple[str, ...]:
    """A log in the folder of a run is called like the folder."""
    if path.suffix != ".jsonl":
        return path.parts
    return path.parent.parts if path.name == "events.jsonl" else (*path.parts[:-1], path.stem)


def measured(record: RunRecord) -> Run:
    """The run with its numbers."""
    return Run(
        record=record,
        metrics=measure(record.events),
        lanes=lanes(record.events),
        scores=tuple(_held_out(record.rows)),
        rewards={
            (scored.prompt, scored.sample): scored.reward
            for event in record.events
            if isinstance(event, Score)
            for scored in event.scored
            if scored.reward is not None
        },
    )


def number(row: Mapping[str, Value], name: str) -> float | None:
    """A number of a row of metrics, if it is there and finite."""
    value = row.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _events(log: Path) -> list[Event]:
    events = list(read_events(log))
    if not events or not isinstance(events[0], Begin):
        raise DataError(
            log, "must open with 'begin', but does not; wait for the run's first update"
        )
    return events


def _held_out(rows: Sequence[Mapping[str, Value]]) -> Iterator[HeldOut]:
    """The evaluations of a run, each at the place of the last update before it."""
    answers = tokens = seconds = 0.0
    for row in rows:
        answers = number(row, "total/samples") or answers
        tokens = number(row, "total/trained_tokens") or tokens
        seconds = number(row, "total/seconds") or seconds
        score = number(row, "evaluation/score")
        if score is not None:
            yield HeldOut(
                score=score,
                update=int(number(row, "update") or 0),
                answers=answers,
                tokens=tokens,
                seconds=seconds,
            )
