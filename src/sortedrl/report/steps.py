"""Shares over a common axis as columns: one strip for each run, all on the same scales.

A column is as high as its share and as wide as what it stands for; where there is room,
a gap of one pixel follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.report.axis import round_steps, short
from sortedrl.report.panel import FOOT, HEADING, WIDTH, Panel
from sortedrl.report.svg import Canvas, series

_LEFT, _RIGHT = 56, 20
_TALL, _FLAT, _MANY = 96, 60, 4
_BETWEEN = 14
_GAP, _WIDE = 1, 6
_THIN = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One column: where it begins and ends, its share, and what it tells when pointed at."""

    start: float
    end: float
    share: float
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The columns of one run in order, and the share of all of them together."""

    name: str
    note: str
    steps: tuple[Step, ...]
    level: float


def strips(
    rows: Sequence[Strip], *, title: str, x_label: str, x_start: float = 0.0, has_whole_x: bool
) -> str:
    """The strips below each other as a picture for a page, 860 pixels wide."""
    x_end = max((step.end for row in rows for step in row.steps), default=x_start + 1.0)
    across = x_end - x_start or 1.0
    high = _round_up(max((step.share for row in rows for step in row.steps), default=0.0))
    height = _TALL if len(rows) <= _MANY else _FLAT
    pitch = HEADING + height + _BETWEEN
    canvas = Canvas(WIDTH, pitch * len(rows) - _BETWEEN + FOOT, label=title)
    panels = [
        Panel(
            left=_LEFT,
            right=WIDTH - _RIGHT,
            top=pitch * place + HEADING,
            floor=pitch * place + HEADING + height,
        )
        for place in range(len(rows))
    ]
    marks = [(mark / high, f"{short(100 * mark)} %") for mark in (0.0, high / 2, high)]
    for place, (row, panel) in enumerate(zip(rows, panels, strict=True)):
        panel.draw_name(canvas, row.name, note=row.note, css=series(place))
        panel.draw_heights(canvas, marks)
        is_wide = (panel.right - panel.left) / (len(row.steps) or 1) >= _WIDE
        for step in row.steps:
            left = panel.x((step.start - x_start) / across)
            right = panel.x((step.end - x_start) / across)
            width = max(0.0, right - left - _GAP) if is_wide else right - left
            _draw_step(
                canvas, step, left=left, width=width, panel=panel, high=high, css=series(place)
            )
        if row.steps:
            level, end = panel.y(row.level / high), (row.steps[-1].end - x_start) / across
            canvas.line(panel.left, level, x2=panel.x(end), y2=level, css="guide")
    places = [mark for mark in round_steps(x_end, count=8) if mark >= x_start]
    if has_whole_x:
        places = [mark for mark in places if mark == int(mark)]
    panels[-1].draw_places(
        canvas, [((mark - x_start) / across, short(mark)) for mark in places], label=x_label
    )
    return canvas.inline()


def _draw_step(
    canvas: Canvas,
    step: Step,
    *,
    left: float,
    width: float,
    panel: Panel,
    high: float,
    css: str,
) -> None:
    """A column; one of no height is left out."""
    if not step.share:
        return
    height = max(_THIN, panel.floor - panel.y(step.share / high))
    canvas.rect(
        left,
        panel.floor - height,
        width=width,
        height=height,
        css=css,
        title=step.told,
    )


def _round_up(share: float) -> float:
    """The end of an axis of shares: a round number whose half is round too."""
    return next((end for end in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8) if share <= end), 1.0)
