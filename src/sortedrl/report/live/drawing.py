"""Shares as characters: bars, sparklines, and the strip of slots.

What is drawn into `width` cells takes at most `width` cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sortedrl.report.live.frame import Glyphs, Line, Piece
from sortedrl.report.live.history import squeezed

_BAR_LEAST = 4
_BAR_MOST = 16


def bar(share: float, width: int, *, glyphs: Glyphs) -> Line:
    """A share of a whole, filled from the left."""
    steps = len(glyphs.parts)
    filled = min(width * steps, max(0, int(share * width * steps)))
    whole, part = divmod(filled, steps)
    text = glyphs.parts[-1] * whole + (glyphs.parts[part - 1] if part else "")
    return (text, "busy"), (glyphs.rest * (width - len(text)), "faint")


def stacked(shares: Sequence[tuple[float, str, str]], width: int) -> Line:
    """Parts of a whole side by side, each with its character and tint."""
    line, end, total = [], 0, 0.0
    for share, char, tint in shares:
        total += share
        begin, end = end, min(width, round(total * width))
        line.append((char * (end - begin), tint))
    return tuple(line)


def sparkline(values: Sequence[float], width: int, *, glyphs: Glyphs, from_zero: bool) -> str:
    """The course of a number, as high as its range; from zero if zero means something."""
    points = squeezed(values, width)
    if not points:
        return ""
    low, high = min(points), max(points)
    if from_zero:
        low = min(low, 0.0)
    most = len(glyphs.levels) - 1
    if high / 2 - low / 2 <= 0:
        return glyphs.levels[0 if from_zero else most // 2] * len(points)
    # Halved, as the distance of two finite numbers may not be finite.
    return "".join(
        glyphs.levels[round((value / 2 - low / 2) / (high / 2 - low / 2) * most)]
        for value in points
    )


def strip(
    shares: Sequence[float | None], width: int, *, rows: int, glyphs: Glyphs, is_rollout: bool
) -> list[Line]:
    """The slots in at most `rows` lines: how much each has written, and which are idle.

    Few slots have a bar each, many a cell each, in the order of their numbers. If even cells do
    not suffice, one cell holds several slots; they are then sorted, so that a cell holds slots
    that are alike and the idle ones stand together.
    """
    idle = (glyphs.idle, "idle" if is_rollout else "faint")
    if width // max(1, len(shares)) > _BAR_LEAST:
        return [_bars(shares, width, glyphs=glyphs, idle=idle)]
    per_cell = -(-len(shares) // (width * rows))
    cells = shares if per_cell == 1 else _joined(shares, per_cell)
    lines = -(-len(cells) // width)
    per_line = -(-len(cells) // lines)
    return [
        _cells(cells[begin : begin + per_line], glyphs=glyphs, idle=idle)
        for begin in range(0, len(cells), per_line)
    ]


def _bars(shares: Sequence[float | None], width: int, *, glyphs: Glyphs, idle: Piece) -> Line:
    size = min(_BAR_MOST, width // max(1, len(shares))) - 1
    line: list[Piece] = []
    for share in shares:
        if share is None:
            line.append((idle[0] * size, idle[1]))
        else:
            line.extend(bar(share, size, glyphs=glyphs))
        line.append((" ", ""))
    return tuple(line)


def _joined(shares: Sequence[float | None], per_cell: int) -> list[float | None]:
    """Cells of several slots, the longest answers first: their mean, or idle where most are."""
    busy = sorted((share for share in shares if share is not None), reverse=True)
    in_order: list[float | None] = [*busy, *[None] * (len(shares) - len(busy))]
    cells: list[float | None] = []
    for begin in range(0, len(in_order), per_cell):
        held = in_order[begin : begin + per_cell]
        written = [share for share in held if share is not None]
        is_idle = 2 * len(written) < len(held)
        cells.append(None if is_idle else sum(written) / len(written))
    return cells


def _cells(shares: Sequence[float | None], *, glyphs: Glyphs, idle: Piece) -> Line:
    most = len(glyphs.levels) - 1
    drawn = [
        idle if share is None else (glyphs.levels[min(most, int(share * (most + 1)))], "busy")
        for share in shares
    ]
    return tuple(
        ("".join(char for char, _ in alike), tint)
        for tint, alike in groupby(drawn, key=lambda piece: piece[1])
    )
