"""Strategies and modes side by side: goodput, bubble and length biases as labelled bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sortedrl.report.axis import short
from sortedrl.report.svg import Canvas

Row = Mapping[str, object]
"""One row of `compare.row`."""

_WIDTH = 860
_NAMES = 176
_COLUMN, _BETWEEN, _LABEL = 150, 21, 48
_TOP, _PITCH, _GAP, _BOTTOM = 62, 20, 8, 14
_FAIR = 0.1
"""A length bias within this of 1 counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One measure: its heading, its values, and where its bars start."""

    head: str
    hint: str
    values: tuple[float, ...]
    origin: float
    format: Callable[[float], str]
    colour: Callable[[float], str]


def bar_chart(rows: Sequence[Row]) -> str:
    """The rows as one SVG, 860 pixels wide, in the order given."""
    if not rows:
        raise ValueError("a bar chart needs at least one row, got none")
    tops = _tops(rows)
    height = tops[-1] + _PITCH + _BOTTOM
    names = [str(row["name"]) for row in rows]
    canvas = Canvas(_WIDTH, height, label="Strategies compared: " + ", ".join(names))
    for name, top in zip(names, tops, strict=True):
        canvas.text(_NAMES - 12, top + 14, content=name, anchor="end")
    left = float(_NAMES)
    for column in _columns(rows):
        _draw_column(canvas, column, left=left, tops=tops)
        left += _COLUMN + _BETWEEN
    return canvas.svg()


def _columns(rows: Sequence[Row]) -> list[_Column]:
    versus = all(row.get("goodput_vs_sync") is not None for row in rows)
    goodput = "goodput_vs_sync" if versus else "goodput"
    return [
        _Column(
            head="goodput, times sync" if versus else "goodput, tokens/s",
            hint="trained tokens per second",
            values=_values(rows, goodput),
            origin=0.0,
            format=(lambda value: f"{value:.2f} ×") if versus else short,  # noqa: RUF001
            colour=lambda _: "plain",
        ),
        _Column(
            head="bubble",
            hint="idle slots during rollout",
            values=_values(rows, "bubble"),
            origin=0.0,
            format=lambda value: f"{100 * value:.1f} %",
            colour=lambda _: "waiting",
        ),
        _bias_column(rows, "length_bias", head="length bias", hint="trained on / written"),
        _bias_column(rows, "early_length_bias", head="early bias", hint="first half of the run"),
    ]


def _bias_column(rows: Sequence[Row], name: str, *, head: str, hint: str) -> _Column:
    return _Column(
        head=head,
        hint=hint,
        values=_values(rows, name),
        origin=1.0,
        format=lambda value: f"{value:.2f}",
        colour=lambda value: "good" if abs(value - 1) <= _FAIR else "discarded",
    )


def _draw_column(canvas: Canvas, column: _Column, *, left: float, tops: Sequence[float]) -> None:
    canvas.text(left, 26, content=column.head, css="head")
    canvas.text(left, 43, content=column.hint, css="small")
    low = min(column.origin, *column.values)
    high = max(column.origin, *column.values)
    # bars that point left need room for their label there, too
    room = _COLUMN - _LABEL * (2 if low < column.origin else 1)
    scale = room / ((high - low) or 1.0)
    zero = left + (column.origin - low) * scale + (_LABEL if low < column.origin else 0)
    canvas.line(zero, tops[0] - 3, x2=zero, y2=tops[-1] + _PITCH + 3, css="rule")
    for value, top in zip(column.values, tops, strict=True):
        width = abs(value - column.origin) * scale
        points_left = value < column.origin
        x = zero - width if points_left else zero
        label = column.format(value)
        css = column.colour(value)
        canvas.rect(x, top + 3, width=max(width, 1), height=_PITCH - 6, css=css, radius=1)
        edge = x - 5 if points_left else x + max(width, 1) + 5
        canvas.text(edge, top + 14, content=label, anchor="end" if points_left else "start")


def _tops(rows: Sequence[Row]) -> list[float]:
    """Where each row starts: a little air between two strategies."""
    tops: list[float] = []
    top = float(_TOP)
    for index, row in enumerate(rows):
        if index and row["strategy"] != rows[index - 1]["strategy"]:
            top += _GAP
        tops.append(top)
        top += _PITCH
    return tops


def _values(rows: Sequence[Row], name: str) -> tuple[float, ...]:
    values = []
    for row in rows:
        value = row[name]
        if not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number in every row, got {value!r}")
        values.append(float(value))
    return tuple(values)
