"""The learning curve of a run: held-out scores over samples, tokens and seconds.

There is a point for each evaluation. Means between two points (lengths, staleness) belong to the
later one, so the windows of a curve cover the run without gaps and overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from sortedrl.core.events import read_events
from sortedrl.core.files import Value, read_metrics
from sortedrl.core.meter import measure, numbers
from sortedrl.errors import DataError
from sortedrl.report.record import number

Along = Literal["samples", "trained_tokens", "decoded_tokens", "seconds"]
"""The costs of a score."""
_TASK = "evaluation/"
_OVER_TASKS = ("evaluation/score", "evaluation/length")
ALONG: tuple[Along, ...] = ("samples", "trained_tokens", "decoded_tokens", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """An evaluation, and the training since the previous one."""

    update: int
    samples: int
    """Answers trained on so far."""
    trained_tokens: int
    decoded_tokens: int
    seconds: float
    """Training time, without evaluations."""
    score: float
    """Share of right answers to the held-out prompts."""
    held_out_length: float
    """Mean length of these answers, which are never interrupted."""
    trained_length: float | None
    """Mean length of the answers trained since the previous point."""
    reward: float | None
    """Mean reward of the same answers."""
    staleness: float | None
    """Mean staleness of the same tokens."""
    entropy: float | None = None
    """Mean entropy of the policy over the same tokens, in nats."""
    gap: float | None = None
    """Largest difference between the log-probabilities of engine and trainer, in nats."""
    ess: float | None = None
    """Smallest effective sample size of an update's importance weights, as a share of tokens."""
    ratio_p99: float | None = None
    """Largest 99 % quantile of an update's importance ratios."""
    by_task: Mapping[str, float] = field(default_factory=dict)
    """The score of each task, if there are several."""


def curve(folder: Path) -> list[CurvePoint]:
    """Read the curve of a run folder."""
    points = list(_points(read_metrics(folder / "metrics.jsonl")))
    if not points:
        raise DataError(
            folder,
            "must be a run with evaluations, but its metrics have no score; set "
            "evaluation.tasks and run it again",
        )
    return points


def reached(points: Sequence[CurvePoint], target: float, *, along: Along) -> float | None:
    """The cost to reach a score for the first time; `None` if never reached.

    The curve is interpolated linearly.
    """
    if points and points[0].score >= target:
        return _place(points[0], along)
    for before, after in pairwise(points):
        if after.score >= target:
            share = (target - before.score) / (after.score - before.score)
            start, end = _place(before, along), _place(after, along)
            return start + share * (end - start)
    return None


def mean_score(points: Sequence[CurvePoint]) -> float:
    """The mean score over the samples, which rewards early learning."""
    width = points[-1].samples - points[0].samples
    if not width:
        return points[-1].score
    area = sum((a.samples - b.samples) * (a.score + b.score) / 2 for b, a in pairwise(points))
    return area / width


def written_length(points: Sequence[CurvePoint]) -> float:
    """The mean length that the policy generates, over the samples.

    Each window counts with the mean of the held-out lengths at its two ends.
    """
    windows = [
        (after.samples - before.samples, (after.held_out_length + before.held_out_length) / 2)
        for before, after in pairwise(points)
    ]
    samples = sum(count for count, _ in windows)
    if not samples:
        return points[-1].held_out_length
    return sum(count * length for count, length in windows) / samples


def run_numbers(folder: Path, *, targets: Sequence[float]) -> dict[str, Any]:
    """All numbers of a run for the tables, with its curve, as JSON values."""
    points = curve(folder)
    figures = measure(read_events(folder / "events.jsonl")).run
    written = written_length(points)
    return {
        "first_score": points[0].score,
        "last_score": points[-1].score,
        "best_score": max(point.score for point in points),
        "mean_score": mean_score(points),
        "written_length": written,
        "first_held_out_length": points[0].held_out_length,
        "last_held_out_length": points[-1].held_out_length,
        "length_bias": figures.mean_length / written,
        "reached": {
            f"{target:g}": {along: reached(points, target, along=along) for along in ALONG}
            for target in targets
        },
        **numbers(figures),
        "curve": [asdict(point) for point in points],
    }


def points_of(curve_rows: Sequence[Mapping[str, Any]]) -> list[CurvePoint]:
    """The curve of a result."""
    return [CurvePoint(**row) for row in curve_rows]


def _points(rows: Sequence[Mapping[str, Value]]) -> Iterator[CurvePoint]:
    """A point for each evaluation among the rows of metrics."""
    window: list[Mapping[str, Value]] = []
    latest: Mapping[str, Value] = {}
    for row in rows:
        score = number(row, "evaluation/score")
        if score is None:
            window.append(row)
            latest = row
            continue
        samples = _total(window, "rollout/trajectories")
        tokens = _total(window, "rollout/trained_tokens")
        stale = sum(
            _both(row, "rollout/mean_staleness", "rollout/trained_tokens") for row in window
        )
        reward = sum(_both(row, "reward/mean", "rollout/trajectories") for row in window)
        yield CurvePoint(
            update=int(number(row, "update") or 0),
            samples=int(number(latest, "total/samples") or 0),
            trained_tokens=int(number(latest, "total/trained_tokens") or 0),
            decoded_tokens=int(number(latest, "total/decoded_tokens") or 0),
            seconds=number(latest, "total/seconds") or 0.0,
            score=score,
            held_out_length=number(row, "evaluation/length") or 0.0,
            trained_length=tokens / samples if samples else None,
            reward=reward / samples if samples else None,
            staleness=stale / tokens if tokens else None,
            entropy=sum(_both(row, "entropy/mean", "rollout/trained_tokens") for row in window)
            / tokens
            if tokens
            else None,
            gap=max((number(row, "gap/max") or 0.0 for row in window), default=None),
            ess=min(_logged(window, "correction/ess"), default=None),
            ratio_p99=max(_logged(window, "correction/ratio_p99"), default=None),
            by_task=_by_task(row),
        )
        window = []


def _by_task(row: Mapping[str, Value]) -> dict[str, float]:
    scores = {
        name.removeprefix(_TASK): value
        for name, value in row.items()
        if name.startswith(_TASK) and name not in _OVER_TASKS and isinstance(value, int | float)
    }
    return scores if len(scores) > 1 else {}


def _place(point: CurvePoint, along: Along) -> float:
    values: dict[Along, float] = {
        "samples": point.samples,
        "trained_tokens": point.trained_tokens,
        "decoded_tokens": point.decoded_tokens,
        "seconds": point.seconds,
    }
    return values[along]


def _total(rows: Sequence[Mapping[str, Value]], name: str) -> float:
    return sum(number(row, name) or 0.0 for row in rows)


def _logged(rows: Sequence[Mapping[str, Value]], name: str) -> list[float]:
    """The values of rows that have it: on-policy runs log no importance ratios."""
    return [value for row in rows if (value := number(row, name)) is not None]


def _both(row: Mapping[str, Value], value: str, weight: str) -> float:
    return (number(row, value) or 0.0) * (number(row, weight) or 0.0)
