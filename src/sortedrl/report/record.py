"""Reads a run folder: settings, events, answers, and series of its numbers.

Everything is read up to its last complete line, so runs that are in progress or were killed can be
read too.

A chart has one line per run, in the order of the runs; a run without values has an empty one. Runs
that differ only in the seed form a group: their mean as one line, with a band. A group has no two
runs of the same seed: a seed fixes its run, so that would count one sample twice. Runs that are not
known to be the same count as different, because a mean over unlike runs would mislead.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sortedrl.config.parsing import flat, read_toml
from sortedrl.core.events import Begin, End, Event, Score, Update, read_events
from sortedrl.core.files import LoggedAnswer, Value, read_answers, read_metrics
from sortedrl.core.meter import Metrics, measure
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.charts.curves import Series, curves
from sortedrl.report.charts.svg import NARROW, WIDTH
from sortedrl.report.html import figure
from sortedrl.report.lanes import Lanes, lanes
from sortedrl.types import Key

BESIDE = ("metrics.jsonl", "config.toml", "answers.jsonl", "run.json")
"""Files of a run folder besides its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The files of a run; `events` starts with `begin`."""

    name: str
    events: Sequence[Event]
    rows: Sequence[Mapping[str, Value]] = ()
    """The rows of its metrics, one for each update and each evaluation."""
    config: Mapping[str, Any] | None = None
    """Every setting, as resolved; `None` if only events are known."""
    answers: Sequence[LoggedAnswer] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Start time, machine and commit, as far as recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """An evaluation: accuracy, and when in the run it was."""

    score: float
    update: int
    answers: float
    """Answers trained so far."""
    tokens: float
    """Tokens trained so far."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run with its metrics."""

    record: RunRecord
    metrics: Metrics
    lanes: Lanes
    scores: tuple[HeldOut, ...]
    rewards: Mapping[Key, float]
    """Rewards of trained answers, if they got any."""

    @property
    def name(self) -> str:
        """The name on pages and charts."""
        return self.record.name

    @property
    def is_ended(self) -> bool:
        """Whether it reached the end of its data; false while it runs or if it was stopped."""
        return isinstance(self.record.events[-1], End)


def read_run(path: Path, *, name: str | None = None) -> RunRecord:
    """Read a run folder, or a bare event log.

    Its name is that of the folder or file by default.
    """
    called = run_names([path])[0] if name is None else name
    log = path if path.is_file() else path / "events.jsonl"
    if not log.is_file() or (path.is_file() and not _may_be_events(log)):
        raise DataError(
            path,
            "must be a run folder with events.jsonl, or an event log; check the path",
        )
    if path.is_file():
        return RunRecord(name=called, events=_events(path))
    return with_files(RunRecord(name=called, events=_events(log)), path)


def _may_be_events(file: Path) -> bool:
    """Whether a file is empty or starts with an event, unlike a log of lengths or a TOML file."""
    with file.open(encoding="utf-8", errors="replace") as text:
        opening = text.readline(64)
    return not opening.strip() or '"event"' in opening


def with_files(record: RunRecord, folder: Path) -> RunRecord:
    """Add the other files of the run folder to the record."""
    rows, config, answers, mark = (folder / name for name in BESIDE)
    return replace(
        record,
        rows=read_metrics(rows) if rows.is_file() else [],
        config=read_toml(config) if config.is_file() else None,
        answers=read_answers(answers) if answers.is_file() else [],
        facts=_facts(mark),
    )


def _facts(mark: Path) -> dict[str, str]:
    """The text values of run.json; empty if it cannot be read."""
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    texts = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in texts if isinstance(value, str)}


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read several runs, with unique names."""
    if not paths:
        raise ConfigError("at least one run must be given, got none; give a run folder")
    return [read_run(p, name=n) for p, n in zip(paths, run_names(paths), strict=True)]


def run_names(paths: Sequence[Path]) -> list[str]:
    """Unique names for the runs at these paths: as many trailing parts as needed."""
    places = [_parts(path.resolve()) for path in paths]
    names = []
    for number, parts in enumerate(places):
        others = places[:number] + places[number + 1 :]
        if parts in others:
            given = str(paths[number])
            raise ConfigError(f"each run must be given once, got {given!r} twice; remove one")
        count = 1
        while count < len(parts) and any(o[-count:] == parts[-count:] for o in others):
            count += 1
        names.append("/".join(parts[-count:]))
    return names


def _parts(path: Path) -> tuple[str, ...]:
    """A log in a run folder is named after the folder."""
    if path.suffix != ".jsonl":
        return path.parts
    return path.parent.parts if path.name == "events.jsonl" else (*path.parts[:-1], path.stem)


def measured(record: RunRecord) -> Run:
    """Compute the metrics of a run."""
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
    """A number in a row of metrics, if it is present and finite."""
    value = row.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _events(log: Path) -> list[Event]:
    events = list(read_events(log))
    if not events or not isinstance(events[0], Begin):
        raise DataError(
            log, "must start with 'begin', but does not; wait for the run's first update"
        )
    return events


def _held_out(rows: Sequence[Mapping[str, Value]]) -> Iterator[HeldOut]:
    """The evaluations of a run, each located at the last update before it."""
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


By = Literal["answers", "tokens", "seconds"]
"""The x axes of a score."""

_PLACES: dict[By, tuple[str, Callable[[HeldOut], float]]] = {
    "answers": ("answers trained on", lambda held_out: held_out.answers),
    "tokens": ("tokens trained on", lambda held_out: held_out.tokens),
    "seconds": ("seconds of training", lambda held_out: held_out.seconds),
}

Line = Sequence[tuple[float, float]]
"""Values over positions, in order of position."""
_OTHERWISE = frozenset(
    {
        "seed",
        "out",
        "threads",
        "device",
        "rewards.workers",
        "rewards.batch",
        "rewards.concurrency",
    }
)
_OTHERWISE_SECTIONS = ("saving.", "tracking.")
"""Settings that affect speed but not learning."""
_SEED_OF_TASK = re.compile(r"(?<=[:,])seed=[0-9]+(?=,|$)")
_WORD = re.compile(r"[^-_./\\\s]+")
_SEED_WORDS = ("seed", "s")


_METRICS: tuple[tuple[tuple[str, ...], str, str, bool, str], ...] = (
    (("loss",), "Loss", "loss", False, "Loss of each update, before the optimiser step."),
    (
        ("grad_norm",),
        "Gradient norm",
        "gradient norm",
        False,
        "Norm of the gradient before clipping; the largest of the steps of an update.",
    ),
    (
        ("kl/mean",),
        "KL divergence",
        "KL, nats per token",
        False,
        "Divergence from the reference policy, mean over tokens.",
    ),
    (
        ("policy/clipped_low", "policy/clipped_high", "policy/clipped_dual"),
        "Clip fraction",
        "tokens clipped",
        True,
        "Share of the tokens whose policy ratio was clipped.",
    ),
    (
        ("entropy/mean",),
        "Entropy",
        "entropy, nats",
        False,
        "Entropy of the next-token distribution; near 0 the model no longer explores.",
    ),
    (
        ("correction/ess",),
        "Effective sample size",
        "effective sample size",
        True,
        "Effective sample size of the importance weights, as a share of tokens; 100 % on-policy.",
    ),
    (
        ("gap/max",),
        "Engine-trainer gap",
        "gap, nats",
        False,
        "Largest difference between the log-probabilities of engine and trainer under the same "
        "weights.",
    ),
)
"""Metric keys to sum, title, label, whether it is a share, and caption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """One number of every run."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    is_share: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no run has the number."""
        return not any(self.lines)


def score_chart(runs: Sequence[Run], *, by: By) -> LineChart:
    """The held-out score over answers, tokens, seconds or updates."""
    x_label, place = _PLACES[by]
    return LineChart(
        title=f"Held-out accuracy by {x_label}",
        x_label=x_label,
        y_label="accuracy",
        lines=tuple([(place(held_out), held_out.score) for held_out in r.scores] for r in runs),
        is_share=True,
    )


def length_chart(runs: Sequence[Run]) -> LineChart:
    """The mean answer length of each update."""
    return LineChart(
        title="Mean length of the answers of an update",
        x_label="update",
        y_label="tokens",
        lines=tuple(counted(_lengths(run)) for run in runs),
    )


def reward_chart(runs: Sequence[Run]) -> LineChart:
    """The mean reward of each update."""
    return LineChart(
        title="Mean reward of the answers of an update",
        x_label="update",
        y_label="reward",
        lines=tuple(_over_updates(run, "reward/mean") or counted(_rewards(run)) for run in runs),
    )


def metric_charts(runs: Sequence[Run]) -> Iterator[tuple[LineChart, str]]:
    """Charts of the trainer metrics that any run has, each with its caption."""
    for names, title, y_label, is_share, caption in _METRICS:
        chart = LineChart(
            title=title,
            x_label="update",
            y_label=y_label,
            lines=tuple(_over_updates(run, *names) for run in runs),
            is_share=is_share,
        )
        if not chart.is_empty:
            yield chart, caption


def chart_figure(
    chart: LineChart, groups: Sequence[SeedGroup], *, caption: str, width: int = WIDTH
) -> str:
    """Curves with a line for each group of seeds; empty if no run has the number."""
    if chart.is_empty:
        return ""
    series = seed_series(groups, chart.lines)
    picture, narrow = (
        curves(
            series,
            x_label=chart.x_label,
            y_label=chart.y_label,
            title=chart.title,
            is_share=chart.is_share,
            width=pixels,
        )
        for pixels in (width, NARROW)
    )
    return figure(caption, picture, narrow if width > NARROW else "")


def counted(values: Sequence[float]) -> Line:
    """The values at positions 1, 2, 3 and so on."""
    return [(float(place), value) for place, value in enumerate(values, start=1)]


def _over_updates(run: Run, *names: str) -> Line:
    """A metric, or the sum of several, at each update that has all of them."""
    points = []
    for row in run.record.rows:
        x, *ys = (number(row, name) for name in ("update", *names))
        if x is not None and None not in ys:
            points.append((x, sum(y for y in ys if y is not None)))
    return points


def _lengths(run: Run) -> list[float]:
    return [
        sum(trained.tokens for trained in event.trained) / len(event.trained)
        for event in run.record.events
        if isinstance(event, Update) and event.trained
    ]


def _rewards(run: Run) -> list[float]:
    """Rewards from the events, if the run has no metrics."""
    updates = [event.scored for event in run.record.events if isinstance(event, Score)]
    given = [[one.reward for one in scored if one.reward is not None] for scored in updates]
    return [sum(found) / len(found) for found in given if found]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedGroup:
    """Runs that differ only in the seed."""

    name: str
    places: tuple[int, ...]
    """Indices of the runs."""


class Spread(NamedTuple):
    """Statistics of several lines: their mean, and their range."""

    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...]
    """Positions with minimum and maximum."""


def seed_groups(records: Sequence[RunRecord]) -> list[SeedGroup]:
    """Group the runs by settings without seed, in order, with unique names.

    A run with unknown settings is a group of its own.
    """
    groups: list[list[int]] = []
    for place, record in enumerate(records):
        for group in groups:
            if all(_is_other_seed(records[member], record) for member in group):
                group.append(place)
                break
        else:
            groups.append([place])
    names = _group_names([[records[place] for place in group] for group in groups])
    return [
        SeedGroup(name=name, places=tuple(group)) for name, group in zip(names, groups, strict=True)
    ]


def seed_series(groups: Sequence[SeedGroup], lines: Sequence[Line]) -> list[Series]:
    """A line for each group: that of its only run, or the mean of its runs with a band.

    Runs without points do not count.
    """
    made = []
    for group in groups:
        drawn = [lines[place] for place in group.places if lines[place]]
        if len(drawn) < 2:
            points = tuple(point for line in drawn for point in line)
            note = f"1 of {len(group.places)} seeds" if drawn and len(group.places) > 1 else ""
            made.append(Series(name=group.name, points=points, note=note))
        else:
            points, band = spread(drawn)
            note = f"mean of {len(drawn)} seeds"
            made.append(Series(name=group.name, points=points, note=note, band=band))
    return made


def spread(lines: Sequence[Line]) -> Spread:
    """Mean, minimum and maximum wherever one line has a point and all of them reach.

    Lines are interpolated linearly. With several values at a position, the last one counts.

    >>> spread([[(0, 1.0), (4, 3.0)], [(0, 3.0), (2, 6.0)]]).points
    ((0, 2.0), (2, 4.0))
    """
    values = [dict(line) for line in lines if line]
    if not values:
        return Spread(points=(), band=())
    start, end = max(min(line) for line in values), min(max(line) for line in values)
    places = sorted({x for line in values for x in line if start <= x <= end})
    columns = list(zip(*(_along(line, places) for line in values), strict=True))
    band = tuple((x, min(ys), max(ys)) for x, ys in zip(places, columns, strict=True))
    points = tuple(
        (x, min(max(sum(ys) / len(ys), least), most))
        for (x, least, most), ys in zip(band, columns, strict=True)
    )
    return Spread(points=points, band=band)


def _along(line: Mapping[float, float], places: Sequence[float]) -> Iterator[float]:
    """Interpolate a line at positions within its range."""
    xs = sorted(line)
    for x in places:
        if x in line:
            yield line[x]
        else:
            after = bisect_right(xs, x)
            left, right = xs[after - 1], xs[after]
            share = (x - left) / (right - left)
            yield line[left] + share * (line[right] - line[left])


def _is_other_seed(one: RunRecord, other: RunRecord) -> bool:
    """Whether two runs differ only in the seed, as far as learning is concerned."""
    if one.config is None or other.config is None:
        return False
    seeds = one.config.get("seed"), other.config.get("seed")
    if None in seeds or seeds[0] == seeds[1]:
        return False
    mine, theirs = flat(one.config), flat(other.config)
    models = [str(settings.pop("model", "")) for settings in (mine, theirs)]
    if not _is_same_model(models, [str(seed) for seed in seeds]):
        return False
    return _what_matters(mine) == _what_matters(theirs)


def _what_matters(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_seed(value)
        for name, value in settings.items()
        if name not in _OTHERWISE and not name.startswith(_OTHERWISE_SECTIONS)
    }


def _without_seed(value: object) -> object:
    """Replace the seeds in task specs."""
    if isinstance(value, str):
        return _SEED_OF_TASK.sub("seed=", value)
    return [_without_seed(part) for part in value] if isinstance(value, list) else value


def _is_same_model(models: Sequence[str], seeds: Sequence[str]) -> bool:
    """Whether two models are the same, or in folders named after the seeds.

    Other numbers in a path may be the size of the model.
    """
    one, other = (re.split(r"[/\\]", model) for model in models)
    return len(one) == len(other) and all(
        mine == theirs or _named_after(mine, seeds[0]) == _named_after(theirs, seeds[1])
        for mine, theirs in zip(one, other, strict=True)
    )


def _named_after(folder: str, seed: str) -> str:
    """A folder's name without the seed, if it ends with it as a separate number."""
    return re.sub(rf"(?<![0-9.]){re.escape(seed)}$", "*", folder)


def _group_names(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """A unique name for each group; single runs keep theirs if possible."""
    names: dict[int, str] = {}
    for place in sorted(range(len(groups)), key=lambda place: len(groups[place]) > 1):
        group = groups[place]
        wanted = [group[0].name]
        if len(group) > 1:
            schedule = next(e.schedule for e in group[0].events if isinstance(e, Begin))
            wanted = [_common_name([record.name for record in group]), schedule]
        candidates = chain(wanted, (f"{wanted[-1]} ({number})" for number in count(2)))
        names[place] = next(name for name in candidates if name and name not in names.values())
    return [names[place] for place in range(len(groups))]


def _common_name(names: Sequence[str]) -> str:
    """The common prefix and suffix of names; "" if there is none.

    >>> _common_name(["demo0/sorted", "demo1/sorted"]), _common_name(["sync-seed-1", "sync-seed-2"])
    ('sorted', 'sync')
    >>> _common_name(["run1", "run2"]), _common_name(["a", "b"])
    ('run', '')
    """
    if len(set(names)) == 1:
        return names[0]
    words = [_WORD.findall(name) for name in names]
    head = _shared(words)
    tail = _shared([list(reversed(rest[len(head) :])) for rest in words])[::-1]
    kept = [word for word in head + tail if word.lower() not in _SEED_WORDS]
    if kept:
        return "/".join(kept) if "/" in names[0] else "-".join(kept)
    letters = "".join(_shared([list(name) for name in names])).rstrip("-_./\\ 0123456789")
    return letters if len(letters) > 1 and letters.lower() not in _SEED_WORDS else ""


def _shared(rows: Sequence[Sequence[str]]) -> list[str]:
    """The common prefix of all rows."""
    columns = zip(*rows, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
