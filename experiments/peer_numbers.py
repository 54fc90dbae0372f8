"""The numbers of the peer table: speeds and curves, computed the same way for both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.curves import ALONG, curve, mean_score, reached
from experiments.learning_rows import Cell
from experiments.record import Record
from sortedrl.config.checks import require
from sortedrl.core.files import Value
from sortedrl.errors import DataError


def curve_numbers(folder: Path, *, targets: Sequence[float]) -> dict[str, Any]:
    """The numbers of a curve, as in `experiments.curves`."""
    points = curve(folder)
    return {
        "first_score": points[0].score,
        "last_score": points[-1].score,
        "best_score": max(point.score for point in points),
        "mean_score": mean_score(points),
        "reached": {
            f"{target:g}": {along: reached(points, target, along=along) for along in ALONG}
            for target in targets
        },
        "curve": [asdict(point) for point in points],
    }


def speeds(rows: Sequence[Mapping[str, Value]], *, first: int) -> dict[str, float]:
    """The speed of a training: overall, and `later`, after the first updates.

    >>> rows = [
    ...     {"update": n, "total/seconds": 3.0 + n, "total/samples": 8 * n,
    ...      "total/trained_tokens": 80 * n, "rollout/rollout_seconds": 0.5}
    ...     for n in (1, 2, 3)
    ... ]
    >>> found = speeds(rows, first=1)
    >>> found["samples_per_second"], found["later_samples_per_second"]
    (4.0, 8.0)
    """
    updates = [row for row in rows if row.get("total/seconds") is not None]
    require(
        len(updates) > first,
        f"first_updates must be below the {len(updates)} updates of a run, got {first}",
    )
    start, end = updates[first - 1] if first else None, updates[-1]
    generated = sum(number(row, "rollout/rollout_seconds") for row in updates)
    numbers = {
        "samples": number(end, "total/samples"),
        "trained_tokens": number(end, "total/trained_tokens"),
        "updates": len(updates),
        "seconds": number(end, "total/seconds"),
        "generation_share": generated / number(end, "total/seconds"),
    }
    for name, since in (("", None), ("later_", start)):
        seconds = _gained(since, end, "total/seconds")
        numbers[f"{name}samples_per_second"] = _gained(since, end, "total/samples") / seconds
        numbers[f"{name}tokens_per_second"] = _gained(since, end, "total/trained_tokens") / seconds
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One arm of the table, over its seeds."""

    arm: str
    seeds: tuple[int, ...]
    cells: Mapping[str, Cell]
    """By name: those of `SHOWN`, the ratios, and the cost of each target."""


SHOWN = (
    "samples",
    "updates",
    "seconds",
    "samples_per_second",
    "tokens_per_second",
    "later_samples_per_second",
    "later_tokens_per_second",
    "generation_share",
    "first_score",
    "last_score",
)
"""Numbers of a run that the table shows."""
RATIOS = ("samples_per_second", "tokens_per_second", "later_samples_per_second")
"""Numbers compared with the same seed of `AGAINST`."""
AGAINST = "trl-generate"


def table(records: Sequence[Record]) -> list[PeerRow]:
    """A row for each measured arm, our own first; ratios are computed per seed."""
    arms: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        if record.numbers["kind"] == "run":
            arms.setdefault(record.numbers["arm"], {})[record.numbers["seed"]] = record.numbers
    base = arms.get(AGAINST, {})
    order = sorted(arms, key=lambda arm: (arm.startswith("trl-"), arm not in ("sync", AGAINST)))
    return [_row(arm, arms[arm], base) for arm in order]


def target_key(target: str, along: str) -> str:
    """The cell of the cost to reach a score."""
    return f"{along}_to_{target}"


def _row(
    arm: str, runs: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]
) -> PeerRow:
    seeds = tuple(sorted(runs))
    cells = {name: Cell(tuple(runs[seed][name] for seed in seeds)) for name in SHOWN}
    for name in RATIOS:
        cells[f"{name}_ratio"] = Cell(
            tuple(runs[s][name] / base[s][name] if s in base else None for s in seeds)
        )
    for target in runs[seeds[0]]["reached"]:
        for along in ("samples", "seconds"):
            taken = tuple(runs[seed]["reached"][target][along] for seed in seeds)
            cells[target_key(target, along)] = Cell(taken)
    return PeerRow(arm=arm, seeds=seeds, cells=cells)


def _gained(since: Mapping[str, Value] | None, end: Mapping[str, Value], name: str) -> float:
    return number(end, name) - (0.0 if since is None else number(since, name))


def number(row: Mapping[str, Value], name: str) -> float:
    """A number of an update; raises if it is missing."""
    value = row.get(name)
    if not isinstance(value, int | float):
        raise DataError("metrics.jsonl", f"{name} must be a number, got {value!r}")
    return float(value)
