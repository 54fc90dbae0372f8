"""The token ledger as a flow, and the staleness of trained tokens.

In the flow, the height of a band is its number of tokens, on one scale for all runs, and outputs
add up to inputs: decoded = trained + discarded + still cached. In the heat map of staleness, the
shares of a column add up to 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.core.events import Update
from sortedrl.core.meter import Ledger
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.svg import (
    FOOT,
    HEADING,
    NARROW,
    SHADES,
    WIDTH,
    Canvas,
    PlotArea,
    each_column,
    neighbours,
    round_steps,
    round_width,
    series_class,
    short,
    span_of,
    stride,
)
from sortedrl.report.html import figure, remarks, section
from sortedrl.report.record import Run

MAX_COLUMNS = 80
"""Columns per run; beyond this, a column combines neighbouring updates."""

_LEFT, _RIGHT = 76, 20
_ROW, _LEAST = 16, 3
_BETWEEN = 20
_KEY, _KEY_LEFT, _KEY_STEP = 34, 18, 12
_GAP, _WIDE = 1, 6
_DOT = 3.0
_ROWS = 12
_TALL, _FLAT, _MANY = 128, 72, 4
_ENDS, _NARROW_ENDS, _THICK = (196, 560), (150, 210), 10
_LABEL = 18
_LINE = 16
_THIN = 0.75
_CORNERS = 24


def staleness_section(runs: Sequence[Run]) -> str:
    """A heat map of each run with stale tokens, and the numbers of every run."""
    summary = remarks(((run.name, staleness_text(run)) for run in runs), are_named=len(runs) > 1)
    maps = [
        HeatMap(name=run.name, note=_note(run), columns=staleness_columns(run), place=place)
        for place, run in enumerate(runs)
        if run.metrics.run.staleness_max
    ]
    pictures = []
    if maps:
        drawn = (
            heat_maps(maps, title="Staleness by update", width=width) for width in (WIDTH, NARROW)
        )
        pictures.append(figure(_caption(runs), *drawn))
    return section("Staleness", summary, *pictures, name="staleness")


def staleness_text(run: Run) -> str:
    """Mean and maximum staleness, in a sentence."""
    figures = run.metrics.run
    if not figures.trajectories:
        return "no updates yet."
    if not figures.staleness_max:
        return "every token was trained on by the weights that generated it."
    return (
        f"tokens are {figures.mean_staleness:.2f} updates old on average when they are trained on, "
        f"{figures.staleness_max:,} at most; the oldest token of an answer is "
        f"{figures.mean_trajectory_staleness:.2f} updates old on average."
    )


def _note(run: Run) -> str:
    figures = run.metrics.run
    return f"mean {figures.mean_staleness:.2f}, at most {figures.staleness_max:,}"


def staleness_columns(run: Run) -> tuple[Column, ...]:
    """The updates in order; neighbours are combined if there are many."""
    updates = [event for event in run.record.events if isinstance(event, Update)]
    return tuple(
        _column(part, first=place + 1) for place, part in neighbours(updates, most=MAX_COLUMNS)
    )


def _column(updates: Sequence[Update], *, first: int) -> Column:
    trained = [answer for update in updates for answer in update.trained]
    counts = Counter(answer.staleness_max for answer in trained)
    tokens = sum(answer.tokens for answer in trained)
    return Column(
        first=first,
        last=first + len(updates) - 1,
        answers=tuple(counts[value] for value in range(max(counts, default=-1) + 1)),
        mean=sum(answer.staleness_sum for answer in trained) / tokens if tokens else 0.0,
    )


def _caption(runs: Sequence[Run]) -> str:
    most = max(stride(run.metrics.run.updates, most=MAX_COLUMNS) for run in runs)
    return (
        f"Each column is {each_column('an update', most)}. An answer counts once, at the "
        "staleness of its oldest token: the updates between the weights that generated that token "
        "and those that trained on it. "
        "Dots mark the mean over all tokens of a column."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Adjacent updates: the number of answers by staleness, and the mean over tokens."""

    first: int
    last: int
    answers: tuple[int, ...]
    """How many answers have the staleness 0, 1, 2, ..."""
    mean: float
    """Mean staleness of the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """The columns of one run in order."""

    name: str
    note: str
    columns: tuple[Column, ...]
    place: int
    """The index of the run on the page, for its colour."""

    @property
    def depth(self) -> int:
        """Number of adjacent staleness values per row."""
        most = max(len(column.answers) for column in self.columns)
        return round_width(most, bins=_ROWS)

    @property
    def num_rows(self) -> int:
        """Rows of the map."""
        most = max(len(column.answers) for column in self.columns)
        return max(_LEAST, math.ceil(most / self.depth))

    def values(self, row: int, *, to: str) -> str:
        """The staleness range of a row, with `to` between first and last."""
        first = row * self.depth
        return str(first) if self.depth == 1 else f"{first}{to}{first + self.depth - 1}"


def heat_maps(maps: Sequence[HeatMap], *, title: str, width: int = WIDTH) -> str:
    """Heat maps above each other as a chart for a page; those without columns are left out."""
    updates = max(run.columns[-1].last for run in maps)
    heights = [run.num_rows * _ROW for run in maps]
    whole = _KEY + sum(heights) + (HEADING + _BETWEEN) * len(maps) - _BETWEEN + FOOT
    canvas = Canvas(width, whole, label=title)
    _draw_key(canvas)
    top = float(_KEY)
    for run, height in zip(maps, heights, strict=True):
        top += HEADING
        frame = PlotArea(left=_LEFT, right=width - _RIGHT, top=top, floor=top + height)
        frame.draw_name(canvas, run.name, note=run.note, css=series_class(run.place))
        _draw_map(canvas, run, frame=frame, updates=updates)
        top += height + _BETWEEN
    steps = round_steps(updates, count=8 * width // WIDTH)
    places = [mark for mark in steps if mark == int(mark) and mark >= 1]
    marks = [((mark - 0.5) / updates, short(mark)) for mark in places]
    frame.draw_places(canvas, marks, label="update")
    return canvas.inline()


def shade(share: float) -> str:
    """The class of a share above 0: the ramp in even steps.

    >>> shade(0.01), shade(0.17), shade(1.0)
    ('shade0', 'shade1', 'shade5')
    """
    return f"shade{min(SHADES - 1, int(share * SHADES))}"


def _draw_key(canvas: Canvas) -> None:
    canvas.text(_KEY_LEFT, 20, content="share of the answers:  0", css="small")
    x = _KEY_LEFT + 132.0
    for step in range(SHADES):
        canvas.rect(x, 11, width=_KEY_STEP - 1, height=11, css=f"shade{step}")
        x += _KEY_STEP
    canvas.text(x + 6, 20, content="100 %", css="small")
    canvas.circle(x + 58, 16, radius=3, css="ink")
    canvas.text(x + 66, 20, content="mean of tokens", css="small")


def _draw_map(canvas: Canvas, run: HeatMap, *, frame: PlotArea, updates: int) -> None:
    for row in range(run.num_rows):
        y = frame.y((row + 0.5) / run.num_rows) + 4
        text = run.values(row, to="\N{EN DASH}")
        canvas.text(frame.left - 8, y, content=text, css="small", anchor="end")
    canvas.line(frame.left, frame.floor, x2=frame.right, y2=frame.floor, css="axis")
    for column in run.columns:
        left, right = (frame.x(edge / updates) for edge in (column.first - 1, column.last))
        _draw_column(canvas, column, run=run, frame=frame, left=left, right=right)


def _draw_column(
    canvas: Canvas, column: Column, *, run: HeatMap, frame: PlotArea, left: float, right: float
) -> None:
    """The cells of a column and its mean; nothing if no answer was trained."""
    whole = sum(column.answers)
    if not whole:
        return
    when = span_of("update", column.first, column.last)
    is_wide = right - left >= _WIDE
    for row in range(run.num_rows):
        count = sum(column.answers[row * run.depth : (row + 1) * run.depth])
        if not count:
            continue
        share = f"{percent(count / whole)} of the answers, {count:,} of {whole:,}"
        canvas.rect(
            left,
            frame.y((row + 1) / run.num_rows),
            width=right - left - (_GAP if is_wide else 0),
            height=_ROW - _GAP,
            css=shade(count / whole),
            title=f"{when}, staleness {run.values(row, to=' to ')}: {share}",
        )
    y = frame.y((column.mean + 0.5) / run.depth / run.num_rows)
    radius = _DOT if is_wide else _DOT / 2
    with canvas.group(title=f"{when}: mean staleness of the tokens {column.mean:.2f}"):
        canvas.circle((left + right) / 2, y, radius=radius + 1, css="paper")
        canvas.circle((left + right) / 2, y, radius=radius, css="ink")


def ledger_section(runs: Sequence[Run]) -> str:
    """The token ledger of each run as a flow."""
    caption = (
        "Bands are as thick as their tokens, on one scale for all runs. Every decoded token is "
        "trained on, discarded, or still cached. Tokens kept at resumes were not decoded again; "
        "tokens prefilled again, prompts included, were recomputed to resume an answer."
    )
    ledgers = [(run.name, run.metrics.run.ledger) for run in runs]
    summary = remarks(((run.name, ledger_text(run)) for run in runs), are_named=len(runs) > 1)
    return section(
        "Where the tokens went",
        summary,
        figure(
            caption,
            *(flows(ledgers, title="Token ledger", width=width) for width in (WIDTH, NARROW)),
        ),
        name="ledger",
    )


def ledger_text(run: Run) -> str:
    """Decoded and discarded tokens per trained token, in a sentence."""
    ledger = run.metrics.run.ledger
    if not ledger.decoded:
        return "no answer has finished or been interrupted yet."
    if not ledger.trained:
        return f"{ledger.decoded:,} tokens decoded, none trained on yet."
    if ledger.trained == ledger.decoded:
        return "every decoded token was trained on."
    trained = percent(ledger.trained / ledger.decoded)
    if ledger.discarded == 0:
        thrown = "none were discarded"
    else:
        ratio = short(100 * ledger.discarded / ledger.trained)
        thrown = f"{ratio} were discarded for every 100 trained on"
    return f"{trained} of the decoded tokens were trained on; {thrown}."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A destination of decoded tokens, with the classes of its mark and its band."""

    name: str
    tokens: int
    css: str
    band: str


def flows(rows: Sequence[tuple[str, Ledger]], *, title: str, width: int = WIDTH) -> str:
    """The ledgers of runs, by name, above each other as a chart for a page.

    A narrow one leaves out the sum: its parts are shown at the bands.
    """
    ends = _ENDS if width >= WIDTH else _NARROW_ENDS
    most = max((ledger.decoded for _, ledger in rows), default=0) or 1
    scale = (_TALL if len(rows) <= _MANY else _FLAT) / most
    heights = [_flow_height(ledger, scale=scale) for _, ledger in rows]
    canvas = Canvas(
        width, sum(heights) + (HEADING + _BETWEEN) * len(rows) - _BETWEEN + 4, label=title
    )
    top = 0.0
    for place, ((name, ledger), height) in enumerate(zip(rows, heights, strict=True)):
        top += HEADING
        frame = PlotArea(left=8, right=width - 8, top=top, floor=top + height)
        frame.draw_name(
            canvas, name, note=_law(ledger) if width >= WIDTH else "", css=series_class(place)
        )
        _draw_flow(canvas, ledger, top=top, scale=scale, ends=ends)
        top += height + _BETWEEN
    return canvas.inline()


def _parts(ledger: Ledger) -> list[_Part]:
    """The destinations that have any tokens."""
    parts = [
        _Part(name="trained", tokens=ledger.trained, css="good", band="good band"),
        _Part(name="discarded", tokens=ledger.discarded, css="discarded", band="hatch"),
        _Part(name="still cached", tokens=ledger.cached, css="faint", band="faint band"),
    ]
    return [part for part in parts if part.tokens > 0]


def _law(ledger: Ledger) -> str:
    return (
        f"decoded {ledger.decoded:,} = trained {ledger.trained:,} "
        f"+ discarded {ledger.discarded:,} + still cached {ledger.cached:,}"
    )


def _flow_height(ledger: Ledger, *, scale: float) -> float:
    """Room for the bands and for the labels on both sides."""
    ends = sum(max(part.tokens * scale, _LABEL) for part in _parts(ledger))
    return max(ends, ledger.decoded * scale, 4.0 * _LINE)


def _draw_flow(
    canvas: Canvas, ledger: Ledger, *, top: float, scale: float, ends: tuple[int, int]
) -> None:
    left, right = ends
    canvas.text(left - 10, top + 13, content=f"decoded {ledger.decoded:,}", anchor="end")
    resumed = [
        f"kept at resumes {ledger.kept:,}",
        f"prefilled again {ledger.prefilled_again:,}",
    ]
    for line, text in enumerate(resumed if ledger.prefilled_again else ["nothing was resumed"]):
        y = top + 13 + _LINE * (line + 1.25)
        canvas.text(left - 10, y, content=text, css="small", anchor="end")
    canvas.rect(
        left,
        top,
        width=_THICK,
        height=max(_THIN, ledger.decoded * scale),
        css="plain",
        title=f"decoded: {ledger.decoded:,} tokens",
    )
    start = end = top
    for part in _parts(ledger):
        thick = part.tokens * scale
        share = percent(part.tokens / ledger.decoded)
        with canvas.group(title=f"{part.name}: {part.tokens:,} tokens, {share} of the decoded"):
            canvas.path(_band(start, end, thick=thick, ends=ends), css=part.band, is_closed=True)
            shown = max(_THIN, thick)
            canvas.rect(right, end, width=_THICK, height=shown, css=part.css)
            text = f"{part.name} {part.tokens:,}"
            y = end + max(_LABEL, thick) / 2 + 4
            canvas.text(right + _THICK + 10, y, content=text, css="head", tail=share)
        start += thick
        end += max(thick, _LABEL)


def _band(
    start: float, end: float, *, thick: float, ends: tuple[int, int]
) -> list[tuple[float, float]]:
    """The outline of a band from height `start` to height `end`, horizontal at both ends."""
    left, right = ends
    upper = []
    for corner in range(_CORNERS + 1):
        way = corner / _CORNERS
        x = left + _THICK + (right - left - _THICK) * way
        upper.append((x, start + (end - start) * way * way * (3 - 2 * way)))
    return [*upper, *((x, y + thick) for x, y in reversed(upper))]
