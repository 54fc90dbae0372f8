"""The results of a learning table as rows and charts: one row and one line per arm.

A cell is the mean over the seeds with minimum and maximum; if not every seed reached a score, the
cell says how many did, and the mean is over those. Ratios to the baseline are computed per seed,
because the arms of a seed share their warm start, prompts and held-out questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.curves import CurvePoint, points_of
from experiments.markdown import table
from experiments.record import Record
from sortedrl.core.files import write_whole
from sortedrl.report.charts.curves import curves
from sortedrl.report.record import Line, SeedGroup, seed_series

BASELINE = "sync"
"""The baseline arm."""

Numbers = Mapping[str, Any]
"""The numbers of a result."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A value per seed; `None` if missing."""

    values: tuple[float | None, ...]

    @property
    def known(self) -> tuple[float, ...]:
        """The values that are not missing."""
        return tuple(value for value in self.values if value is not None)

    @property
    def mean(self) -> float | None:
        """The mean over seeds with a value; `None` if none has one."""
        known = self.known
        return sum(known) / len(known) if known else None

    def scaled(self, factor: float) -> Cell:
        """The values times a factor."""
        return Cell(tuple(None if value is None else factor * value for value in self.values))

    def text(self, form: str) -> str:
        """The mean, with minimum and maximum in brackets, in the format `form`.

        >>> Cell((2.0, 4.0)).text(",.0f"), Cell((2.0, None)).text(".1f"), Cell((None,)).text("g")
        ('3 (2 to 4)', '2.0 (1 of 2 seeds)', 'not reached')
        """
        known, mean = self.known, self.mean
        if mean is None:
            return "not reached"
        notes = []
        least, most = format(min(known), form), format(max(known), form)
        if least != most:
            notes.append(f"{least} to {most}")
        if len(known) < len(self.values):
            notes.append(f"{len(known)} of {len(self.values)} seeds")
        return format(mean, form) + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRow:
    """One arm of a table, over its seeds."""

    algorithm: str
    arm: str
    schedule: str
    seeds: tuple[int, ...]
    cells: Mapping[str, Cell]
    """By column: those of `COLUMNS`, and the cost to reach each target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A number of a run, and its format."""

    key: str
    title: str
    form: str
    scale: float = 1.0


SCORES = (
    Column(key="first_score", title="warm start, %", form=".1f", scale=100),
    Column(key="last_score", title="at the end, %", form=".1f", scale=100),
    Column(key="mean_score", title="mean over the run, %", form=".1f", scale=100),
    Column(key="seconds", title="seconds", form=".1f"),
    Column(key="trained_tokens", title="tokens trained", form=",.0f"),
    Column(key="decoded_tokens", title="tokens decoded", form=",.0f"),
    Column(key="bubble", title="bubble, %", form=".1f", scale=100),
)
LENGTHS = (
    Column(key="mean_length", title="trained on", form=".1f"),
    Column(key="written_length", title="written", form=".1f"),
    Column(key="length_bias", title="length bias", form=".3f"),
    Column(key="bias_ratio", title="of sync's", form=".3f"),
    Column(key="first_held_out_length", title="held-out, warm start", form=".1f"),
    Column(key="last_held_out_length", title="held-out, at the end", form=".1f"),
    Column(key="length_ratio", title="of sync's", form=".3f"),
    Column(key="mean_staleness", title="mean staleness", form=".2f"),
    Column(key="max_staleness", title="most", form=".0f"),
)
COLUMNS = (*SCORES, *LENGTHS)


def arm_rows(records: Sequence[Record], settings: Mapping[str, Any]) -> list[LearningRow]:
    """The rows of a table, in the order of its TOML; arms without results have none."""
    runs = [record.numbers for record in records if record.numbers["kind"] == "run"]
    rows = []
    for algorithm in settings["algorithms"]:
        baseline = _by_seed(runs, algorithm=algorithm, arm=BASELINE)
        for arm in settings["arms"]:
            own = _by_seed(runs, algorithm=algorithm, arm=arm)
            if own:
                rows.append(_row(own, baseline, targets=settings["targets"]))
    return rows


def score_table(rows: Sequence[LearningRow]) -> str:
    """Scores and costs, as a Markdown table."""
    return _markdown(rows, SCORES)


def length_table(rows: Sequence[LearningRow]) -> str:
    """Lengths and staleness, as a Markdown table."""
    return _markdown(rows, LENGTHS)


def target_table(rows: Sequence[LearningRow], target: float) -> str:
    """The cost to reach a score, as a Markdown table."""
    columns = [
        Column(key=target_key(target, along), title=title, form=form)
        for along, title, form in (
            ("samples", "samples", ",.0f"),
            ("samples_ratio", "of sync's", ".2f"),
            ("trained_tokens", "tokens trained", ",.0f"),
            ("decoded_tokens", "tokens decoded", ",.0f"),
            ("seconds", "seconds", ".1f"),
            ("seconds_ratio", "of sync's", ".2f"),
        )
    ]
    return _markdown(rows, columns)


def target_key(target: float, along: str) -> str:
    """The column of the cost to reach a score."""
    return f"{target:g}/{along}"


def figures(
    records: Sequence[Record], settings: Mapping[str, Any], *, folder: Path, name: str
) -> list[Path]:
    """Write the charts of a table: scores and lengths, one line per arm."""
    pictures: tuple[tuple[str, str, str, str, _Drawn], ...] = (
        ("score-samples", "Right answers to held-out prompts", "answers trained on", "", _scores),
        ("score-seconds", "Right answers to held-out prompts", "seconds", "", _scores_in_time),
        ("length", "Mean length of held-out answers", "answers trained on", "tokens", _written),
        ("trained", "Mean length of answers trained on", "answers trained on", "tokens", _trained),
        ("entropy", "Entropy of the policy", "answers trained on", "nats", _entropy),
    )
    written = []
    for algorithm in settings["algorithms"]:
        for ending, title, x_label, y_label, drawn in pictures:
            groups, lines = _lines(records, settings, algorithm=algorithm, drawn=drawn)
            if not any(lines):
                continue
            picture = curves(
                seed_series(groups, lines),
                x_label=x_label,
                y_label=y_label or "right answers",
                title=f"{title}, {algorithm}",
                is_share=not y_label,
                scheme="auto",
            )
            path = folder / f"{name}-{algorithm}-{ending}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, picture.encode())
            written.append(path)
    return written


_Drawn = Callable[[Sequence[CurvePoint]], Line]


def _scores(points: Sequence[CurvePoint]) -> Line:
    return [(point.samples, point.score) for point in points]


def _scores_in_time(points: Sequence[CurvePoint]) -> Line:
    return [(point.seconds, point.score) for point in points]


def _written(points: Sequence[CurvePoint]) -> Line:
    return [(point.samples, point.held_out_length) for point in points]


def _trained(points: Sequence[CurvePoint]) -> Line:
    return [(p.samples, p.trained_length) for p in points if p.trained_length is not None]


def _entropy(points: Sequence[CurvePoint]) -> Line:
    return [(p.samples, p.entropy) for p in points if p.entropy is not None]


def _lines(
    records: Sequence[Record], settings: Mapping[str, Any], *, algorithm: str, drawn: _Drawn
) -> tuple[list[SeedGroup], list[Line]]:
    """The line of each run, and the groups of seeds of an arm."""
    runs = [record.numbers for record in records if record.numbers["kind"] == "run"]
    groups: list[SeedGroup] = []
    lines: list[Line] = []
    for arm in settings["arms"]:
        own = _by_seed(runs, algorithm=algorithm, arm=arm)
        if own:
            places = tuple(range(len(lines), len(lines) + len(own)))
            groups.append(SeedGroup(name=next(iter(own.values()))["schedule"], places=places))
            lines += [drawn(points_of(numbers["curve"])) for numbers in own.values()]
    return groups, lines


def _by_seed(runs: Sequence[Numbers], *, algorithm: str, arm: str) -> dict[int, Numbers]:
    own = [run for run in runs if run["algorithm"] == algorithm and run["arm"] == arm]
    return {run["seed"]: run for run in sorted(own, key=lambda run: int(run["seed"]))}


def _row(
    own: Mapping[int, Numbers], baseline: Mapping[int, Numbers], *, targets: Sequence[float]
) -> LearningRow:
    first = next(iter(own.values()))
    cells = {column.key: _cell(own, _named(column.key)) for column in COLUMNS}
    cells["bias_ratio"] = _ratio(own, baseline, _named("length_bias"))
    cells["length_ratio"] = _ratio(own, baseline, _named("last_held_out_length"))
    for target in targets:
        for along in ("samples", "trained_tokens", "decoded_tokens", "seconds"):
            took = _taken(target, along)
            cells[target_key(target, along)] = _cell(own, took)
            cells[target_key(target, f"{along}_ratio")] = _ratio(own, baseline, took)
    return LearningRow(
        algorithm=first["algorithm"],
        arm=first["arm"],
        schedule=first["schedule"],
        seeds=tuple(own),
        cells=cells,
    )


def _named(key: str) -> Callable[[Numbers], float | None]:
    return lambda numbers: numbers.get(key)


def _taken(target: float, along: str) -> Callable[[Numbers], float | None]:
    def took(numbers: Numbers) -> float | None:
        value: float | None = numbers["reached"][f"{target:g}"][along]
        return value

    return took


def _cell(own: Mapping[int, Numbers], of: Callable[[Numbers], float | None]) -> Cell:
    return Cell(tuple(of(numbers) for numbers in own.values()))


def _ratio(
    own: Mapping[int, Numbers],
    baseline: Mapping[int, Numbers],
    of: Callable[[Numbers], float | None],
) -> Cell:
    """Each seed's value over that of the baseline, if both have one."""
    values: list[float | None] = []
    for seed, numbers in own.items():
        above, below = of(numbers), of(baseline[seed]) if seed in baseline else None
        values.append(above / below if above is not None and below else None)
    return Cell(tuple(values))


def _markdown(rows: Sequence[LearningRow], columns: Sequence[Column]) -> str:
    """A Markdown table; with a column for the algorithm if there are several."""
    several = len({row.algorithm for row in rows}) > 1
    head = [*(["algorithm"] if several else []), "schedule", *(c.title for c in columns)]
    return table(
        head,
        [
            [
                *([row.algorithm] if several else []),
                row.schedule,
                *(row.cells[c.key].scaled(c.scale).text(c.form) for c in columns),
            ]
            for row in rows
        ],
    )
