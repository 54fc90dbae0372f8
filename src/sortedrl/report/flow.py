"""The token ledger as a flow: what was decoded runs into what became of it.

Bands are as thick as their tokens, on one scale for all runs, and what goes out is as thick as
what comes in: decoded = trained + discarded + still cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.evaluation.tables import percent
from sortedrl.metrics import Ledger
from sortedrl.report.panel import HEADING, WIDTH, Panel
from sortedrl.report.svg import Canvas, series

_TALL, _FLAT, _MANY = 128, 72, 4
_FROM, _TO, _THICK = 196, 560, 10
_LABEL = 18
_LINE = 16
_BETWEEN = 20
_THIN = 0.75
_CORNERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Where some of the decoded tokens went, by its class, and what the band behind it is."""

    name: str
    tokens: int
    css: str
    band: str


def flows(rows: Sequence[tuple[str, Ledger]], *, title: str) -> str:
    """The ledgers of runs, by name, below each other as a picture for a page, 860 pixels wide."""
    most = max((ledger.decoded for _, ledger in rows), default=0) or 1
    scale = (_TALL if len(rows) <= _MANY else _FLAT) / most
    heights = [_height(ledger, scale=scale) for _, ledger in rows]
    canvas = Canvas(
        WIDTH, sum(heights) + (HEADING + _BETWEEN) * len(rows) - _BETWEEN + 4, label=title
    )
    top = 0.0
    for place, ((name, ledger), height) in enumerate(zip(rows, heights, strict=True)):
        top += HEADING
        panel = Panel(left=8, right=WIDTH - 8, top=top, floor=top + height)
        panel.draw_name(canvas, name, note=_law(ledger), css=series(place))
        _draw(canvas, ledger, top=top, scale=scale)
        top += height + _BETWEEN
    return canvas.inline()


def _parts(ledger: Ledger) -> list[_Part]:
    """The ends of the flow that have any tokens."""
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


def _height(ledger: Ledger, *, scale: float) -> float:
    """Room for the bands and for the words on both sides."""
    ends = sum(max(part.tokens * scale, _LABEL) for part in _parts(ledger))
    return max(ends, ledger.decoded * scale, 4.0 * _LINE)


def _draw(canvas: Canvas, ledger: Ledger, *, top: float, scale: float) -> None:
    canvas.text(_FROM - 10, top + 13, content=f"decoded {ledger.decoded:,}", anchor="end")
    told = [
        f"kept at resumes {ledger.kept:,}",
        f"prefilled again {ledger.prefilled_again:,}",
    ]
    for line, words in enumerate(told if ledger.prefilled_again else ["nothing was resumed"]):
        y = top + 13 + _LINE * (line + 1.25)
        canvas.text(_FROM - 10, y, content=words, css="small", anchor="end")
    canvas.rect(
        _FROM,
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
            canvas.path(_band(start, end, thick=thick), css=part.band, is_closed=True)
            shown = max(_THIN, thick)
            canvas.rect(_TO, end, width=_THICK, height=shown, css=part.css)
            words = f"{part.name} {part.tokens:,}"
            y = end + max(_LABEL, thick) / 2 + 4
            canvas.text(_TO + _THICK + 10, y, content=words, css="head", tail=share)
        start += thick
        end += max(thick, _LABEL)


def _band(start: float, end: float, *, thick: float) -> list[tuple[float, float]]:
    """The outline of a band that leaves level at height `start` and arrives level at `end`."""
    upper = []
    for corner in range(_CORNERS + 1):
        way = corner / _CORNERS
        x = _FROM + _THICK + (_TO - _FROM - _THICK) * way
        upper.append((x, start + (end - start) * way * way * (3 - 2 * way)))
    return [*upper, *((x, y + thick) for x, y in reversed(upper))]
