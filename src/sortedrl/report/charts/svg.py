"""SVG as a string: a canvas with a light and a dark palette, and axes.

Colours are set only by classes, so that the embedded style can follow the reader's theme, or fix
one of the two for programs without themes. The palette is Okabe and Ito's with one blue ramp, which
stay distinct with any kind of colour vision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar
from xml.sax.saxutils import escape, quoteattr

from sortedrl.report.html import visible

Anchor = Literal["start", "middle", "end"]
Scheme = Literal["auto", "light", "dark"]
"""Colours: light, dark, or the reader's theme."""

SHADES = 6
"""Steps of the blue ramp: the classes `shade0` (short) to `shade5` (long)."""
SERIES = 6
"""Series with their own colour: the classes `series0` to `series5`."""

_LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "muted": "#59636e",
    "rule": "#d1d9e0",
    "idle": "#fce5c8",
    "waiting": "#e69f00",
    "update": "#59636e",
    "discarded": "#d55e00",
    "good": "#007a5a",
    "plain": "#0072b2",
    "faint": "#9aa4ae",
}
_DARK = {
    "paper": "#0d1117",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "rule": "#30363d",
    "idle": "#40300f",
    "waiting": "#e69f00",
    "update": "#8b949e",
    "discarded": "#ff8a3d",
    "good": "#2fbf93",
    "plain": "#56b4e9",
    "faint": "#5b646e",
}
_LIGHT_RAMP = ("#a6d5f2", "#74b9e6", "#429ad3", "#1478b8", "#0f5993", "#0c3b6b")
_DARK_RAMP = ("#1b4f7c", "#2269a3", "#2f86c8", "#4fa5e3", "#80c3f2", "#b9defa")
_LIGHT_SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_DARK_SERIES = ("#3f9fd8", "#e69f00", "#2fbf93", "#d98fb8", "#ff8a3d", "#9fd4f5")
_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
_LAYOUT = (
    f"text{{font:12px {_FONT}}}"
    "text.title{font-size:15px;font-weight:600}"
    "text.head,text.best{font-weight:600}"
    "text.small{font-size:11px}"
    ".tail{font-size:13px;font-weight:400}"
    ".rule,.guide{stroke-width:1}"
    ".guide{stroke-dasharray:2 3}"
    ".hatch,.hatched{fill:url(#hatch)}"
    ".hatched{stroke-width:.6}"
    ".front{fill:none;stroke-width:1.5}"
    ".ring{fill:none;stroke-width:2}"
)
_SERIES_LAYOUT = (
    ".curve{stroke-width:2}"
    ".band{fill-opacity:.18}"
    ".axis{stroke-width:1}"
    ".whisker{stroke-width:1.25}"
    "text.head{paint-order:stroke;stroke-width:4px}"
)
_HATCH = (
    '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="discarded" width="1.7" height="4"/>'
    "</pattern></defs>"
)


def number(value: float) -> str:
    """A coordinate, to a hundredth of a pixel.

    >>> number(3.0), number(0.129), number(-0.001)
    ('3', '0.13', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


class Canvas:
    """A drawing; `svg` returns it as a string."""

    def __init__(self, width: float, height: float, *, label: str) -> None:
        """An empty canvas; `label` is its text for screen readers."""
        self._size = (width, height)
        self._label = label
        self._parts: list[str] = []
        self._classes: set[str] = set()

    def rect(
        self,
        x: float,
        y: float,
        *,
        width: float,
        height: float,
        css: str,
        radius: float = 0,
        title: str = "",
    ) -> None:
        """A rectangle; `title` is its tooltip."""
        self._use(css)
        corner = f' rx="{number(radius)}"' if radius else ""
        shape = (
            f'<rect class="{css}" x="{number(x)}" y="{number(y)}" '
            f'width="{number(width)}" height="{number(height)}"{corner}'
        )
        self._add(shape, element="rect", title=title)

    def circle(self, x: float, y: float, *, radius: float, css: str, title: str = "") -> None:
        """A dot; `title` is its tooltip."""
        self._use(css)
        shape = f'<circle class="{css}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
        self._add(shape, element="circle", title=title)

    def line(self, x1: float, y1: float, *, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self._use(css)
        self._parts.append(
            f'<line class="{css}" x1="{number(x1)}" y1="{number(y1)}" '
            f'x2="{number(x2)}" y2="{number(y2)}"/>'
        )

    def path(
        self, points: Sequence[tuple[float, float]], *, css: str, is_closed: bool = False
    ) -> None:
        """A polyline through the points."""
        if not points:
            return
        self._use(css)
        steps = [f"M{number(points[0][0])} {number(points[0][1])}"]
        for (x0, y0), (x, y) in pairwise(points):
            if number(y) == number(y0):
                steps.append(f"H{number(x)}")
            elif number(x) == number(x0):
                steps.append(f"V{number(y)}")
            else:
                steps.append(f"L{number(x)} {number(y)}")
        end = "Z" if is_closed else ""
        self._parts.append(f'<path class="{css}" d="{"".join(steps)}{end}"/>')

    def text(
        self,
        x: float,
        y: float,
        *,
        content: str,
        css: str = "ink",
        anchor: Anchor = "start",
        tail: str = "",
        is_upright: bool = False,
    ) -> None:
        """A line of text, followed by a muted `tail`."""
        self._use(css)
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        if is_upright:
            place += f' transform="rotate(-90 {number(x)} {number(y)})"'
        more = f'<tspan class="tail" dx="10">{_clean(tail)}</tspan>' if tail else ""
        self._parts.append(
            f'<text class="{css}" x="{number(x)}" y="{number(y)}"{place}>'
            f"{_clean(content)}{more}</text>"
        )

    @contextmanager
    def group(self, *, title: str = "") -> Iterator[None]:
        """Group what is drawn inside, with a shared tooltip."""
        self._parts.append(f"<g>{_title(title)}")
        yield
        self._parts.append("</g>")

    def svg(self, *, scheme: Scheme = "auto") -> str:
        """The content of an SVG file, with the rules of the classes it uses."""
        width, height = (number(side) for side in self._size)
        return "\n".join(
            [
                self._opening(),
                f"<style>{stylesheet(scheme=scheme, has_series=self._has_series)}</style>",
                _HATCH,
                f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def inline(self) -> str:
        """Inline SVG for a page with `stylesheet` in its head."""
        hatch = [_HATCH] if self._classes & {"hatch", "hatched"} else []
        return "\n".join([self._opening(), *hatch, *self._parts, "</svg>"])

    @property
    def _has_series(self) -> bool:
        lines = self._classes & {"curve", "band", "axis", "whisker"}
        return bool(lines) or any(name.startswith("series") for name in self._classes)

    def _use(self, css: str) -> None:
        self._classes.update(css.split())

    def _opening(self) -> str:
        width, height = (number(side) for side in self._size)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            f"aria-label={quoteattr(visible(self._label))}>"
        )

    def _add(self, shape: str, *, element: str, title: str) -> None:
        self._parts.append(f"{shape}>{_title(title)}</{element}>" if title else f"{shape}/>")


def text_width(text: str, *, size: float = 12) -> float:
    """Approximate width of a text; fonts differ, so leave some room."""
    return 0.54 * size * len(text)


def clipped(text: str, width: float, *, size: float = 12) -> str:
    """The text, truncated with an ellipsis if wider than `width` pixels."""
    room = max(1, int(width / text_width("x", size=size)))
    return text if len(text) <= room else text[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _clean(text: str) -> str:
    return escape(visible(text))


def _title(text: str) -> str:
    return f"<title>{_clean(text)}</title>" if text else ""


def series_class(index: int) -> str:
    """The class of a series; colours repeat after the last."""
    return f"series{index % SERIES}"


def stylesheet(*, scheme: Scheme = "auto", has_series: bool = True) -> str:
    """The styles of all charts; without `has_series`, of those without lines or bands."""
    layout, day, night = _LAYOUT, _colours(_LIGHT, _LIGHT_RAMP), _colours(_DARK, _DARK_RAMP)
    if has_series:
        layout += _SERIES_LAYOUT
        day += _series_colours(_LIGHT, _LIGHT_SERIES)
        night += _series_colours(_DARK, _DARK_SERIES)
    if scheme == "auto":
        return f"{layout}{day}@media (prefers-color-scheme:dark){{{night}}}"
    return layout + (day if scheme == "light" else night)


def _colours(palette: dict[str, str], ramp: Sequence[str]) -> str:
    """Plain rules without CSS variables, which not every SVG viewer supports."""
    fills = palette | {f"shade{step}": colour for step, colour in enumerate(ramp)}
    rules = [f".{name}{{fill:{colour}}}" for name, colour in fills.items()]
    strokes = {
        "rule": "rule",
        "guide": "muted",
        "hatched": "discarded",
        "front": "plain",
        "ring": "discarded",
    }
    rules += [f".{name}{{stroke:{palette[colour]}}}" for name, colour in strokes.items()]
    rules.append(
        f"text{{fill:{palette['ink']}}}"
        f"text.muted,text.small,.tail{{fill:{palette['muted']}}}"
        f"text.best{{fill:{palette['discarded']}}}"
    )
    return "".join(rules)


def _series_colours(palette: dict[str, str], colours: Sequence[str]) -> str:
    """Stroke lines in the colour of their series, and outline the text at their ends."""
    rules = [
        f".series{place}{{fill:{colour};color:{colour}}}.series{place}.curve{{stroke:{colour}}}"
        for place, colour in enumerate(colours)
    ]
    # after the fills above, so that a line has no area
    rules.append(".curve{fill:none}")
    strokes = {"axis": "muted", "whisker": "ink"}
    rules += [f".{name}{{stroke:{palette[colour]}}}" for name, colour in strokes.items()]
    rules.append(f"text.head{{stroke:{palette['paper']}}}")
    return "".join(rules)


WIDTH = 860
"""Width of a chart in pixels."""
NARROW = 400
"""Width of a chart on a phone in pixels."""
HEADING = 26
"""Space above a panel for its name, in pixels."""
FOOT = 46
"""Space below the last panel for ticks and axis label, in pixels."""

Value = TypeVar("Value")

_SWATCH, _LEAST = 18, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotArea:
    """A plot area: its edges in pixels, and the values there; by default shares from 0 to 1."""

    left: float
    right: float
    top: float
    floor: float
    inset: float = 0.0
    """Pixels between the left edge and the least value."""
    x_start: float = 0.0
    x_end: float = 1.0
    y_start: float = 0.0
    y_end: float = 1.0

    def x(self, value: float) -> float:
        """The pixel of a value on the x axis."""
        share = (value - self.x_start) / (self.x_end - self.x_start)
        return self.left + self.inset + (self.right - self.left - self.inset) * share

    def y(self, value: float) -> float:
        """The pixel of a value on the y axis."""
        share = (value - self.y_start) / (self.y_end - self.y_start)
        return self.floor - (self.floor - self.top) * share

    def draw_name(self, canvas: Canvas, name: str, *, note: str, css: str) -> None:
        """The name in its colour above the area, with a note after it."""
        y = self.top - 10
        room = self.right - self.left - _SWATCH - 10 - text_width(note, size=13)
        shown = clipped(name, max(_LEAST, room), size=14)
        with canvas.group(title=f"{name}: {note}" if note else name):
            canvas.rect(self.left, y - 9, width=11, height=10, css=css)
            canvas.text(self.left + _SWATCH, y, content=shown, css="head", tail=note)

    def draw_heights(
        self,
        canvas: Canvas,
        marks: Iterable[tuple[float, str]],
        *,
        zero_css: str = "axis",
        gap: float = 8,
    ) -> None:
        """A horizontal rule at each mark, with its label on the left."""
        for value, label in marks:
            y = self.y(value)
            canvas.line(self.left, y, x2=self.right, y2=y, css="rule" if value else zero_css)
            canvas.text(self.left - gap, y + 4, content=label, css="small", anchor="end")
        if self.y_start > 0:
            canvas.line(self.left, self.floor, x2=self.right, y2=self.floor, css="rule")

    def draw_places(
        self, canvas: Canvas, marks: Iterable[tuple[float, str]], *, label: str
    ) -> None:
        """Ticks with their labels below the area, and the axis label below them."""
        for value, text in marks:
            x = self.x(value)
            canvas.line(x, self.floor, x2=x, y2=self.floor + 4, css="rule")
            canvas.text(x, self.floor + 18, content=text, css="small", anchor="middle")
        middle = (self.left + self.right) / 2
        canvas.text(middle, self.floor + 40, content=label, css="muted", anchor="middle")

    def draw_y_label(self, canvas: Canvas, label: str) -> None:
        """The label of the y axis, rotated, at the left edge of the chart."""
        middle = (self.top + self.floor) / 2
        canvas.text(18, middle, content=label, css="muted", anchor="middle", is_upright=True)


def round_steps(end: float, *, count: int) -> list[float]:
    """About `count` round numbers from 0 to at most `end`.

    >>> round_steps(2475, count=6)
    [0.0, 500.0, 1000.0, 1500.0, 2000.0]
    >>> round_steps(0.9, count=5)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    if end <= 0:
        return [0.0]
    rough = end / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [round(index * step, 10) for index in range(int(end / step * (1 + 1e-9)) + 1)]


def round_marks(start: float, end: float, *, count: int) -> list[float]:
    """About `count` round numbers from `start` to `end`."""
    steps = round_steps(end - start, count=count)
    if not start or len(steps) < 2:
        return steps
    first, last = math.ceil(start / steps[1] - 1e-9), math.floor(end / steps[1] + 1e-9)
    return [round(index * steps[1], 10) for index in range(first, last + 1)]


def round_width(count: int, *, bins: int) -> int:
    """The smallest of 1, 2, 5, 10, 20 and so on with which `bins` bins hold `count` values.

    >>> round_width(48, bins=48), round_width(49, bins=48), round_width(1000, bins=12)
    (1, 2, 100)
    """
    widths = (digit * int(10**power) for power in range(9) for digit in (1, 2, 5))
    return next(width for width in widths if count <= bins * width)


def short(value: float) -> str:
    """Format a number for a label: grouped thousands, no needless digits.

    >>> short(12345.6), short(37.28), short(4.0), short(0.7), short(0.07374), short(2.5e-6)
    ('12,346', '37.3', '4', '0.7', '0.074', '2.5e-06')
    """
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.2g}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def stride(count: int, *, most: int) -> int:
    """How many neighbours to combine, so that `count` values give at most `most`."""
    return math.ceil(count / most) or 1


def neighbours(values: Sequence[Value], *, most: int) -> list[tuple[int, Sequence[Value]]]:
    """The values in at most `most` even parts, each with the index of its first value.

    >>> neighbours("abcde", most=3)
    [(0, 'a'), (1, 'bc'), (3, 'de')]
    """
    count = min(most, len(values))
    edges = [part * len(values) // count for part in range(count + 1)] if count else []
    return [(start, values[start:end]) for start, end in pairwise(edges)]


def each_column(one: str, most: int) -> str:
    """What a column of a chart stands for: one item, or up to `most` neighbours together.

    >>> each_column("an update", 1), each_column("an update", 4)
    ('an update', 'up to 4 updates together')
    """
    return one if most == 1 else f"up to {most:,} {one.split()[-1]}s together"


def span_of(what: str, first: int, last: int) -> str:
    """A number of a kind, or a range.

    >>> span_of("round", 3, 3), span_of("round", 3, 5)
    ('round 3', 'rounds 3 to 5')
    """
    return f"{what} {first:,}" if first == last else f"{what}s {first:,} to {last:,}"
