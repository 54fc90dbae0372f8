"""A tiny canvas: SVG as a string, one palette, readable by day and by night.

Colours live in classes only, so that the embedded style can swap them with the reader's theme.
They are those of Okabe and Ito and one blue ramp, told apart with any kind of colour vision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

Anchor = Literal["start", "middle", "end"]

SHADES = 6
"""Steps of the blue ramp: the classes `shade0` (short) to `shade5` (long)."""

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
_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def number(value: float) -> str:
    """A coordinate, to a hundredth of a pixel.

    >>> number(3.0), number(0.129), number(-0.001)
    ('3', '0.13', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


class Canvas:
    """A drawing under way; `svg` gives it as a string."""

    def __init__(self, width: float, height: float, *, label: str) -> None:
        """An empty sheet; `label` is read to those who cannot see it."""
        self._size = (width, height)
        self._label = label
        self._parts: list[str] = []

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
        corner = f' rx="{number(radius)}"' if radius else ""
        shape = (
            f'<rect class="{css}" x="{number(x)}" y="{number(y)}" '
            f'width="{number(width)}" height="{number(height)}"{corner}'
        )
        self._add(shape, element="rect", title=title)

    def circle(self, x: float, y: float, *, radius: float, css: str, title: str = "") -> None:
        """A dot; `title` is its tooltip."""
        shape = f'<circle class="{css}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
        self._add(shape, element="circle", title=title)

    def line(self, x1: float, y1: float, *, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self._parts.append(
            f'<line class="{css}" x1="{number(x1)}" y1="{number(y1)}" '
            f'x2="{number(x2)}" y2="{number(y2)}"/>'
        )

    def path(
        self, points: Sequence[tuple[float, float]], *, css: str, is_closed: bool = False
    ) -> None:
        """Straight lines through the points."""
        if not points:
            return
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
        """A line of text; `tail` follows it in a quieter voice."""
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
        """What is drawn inside belongs together and shares a tooltip."""
        self._parts.append(f"<g>{_title(title)}")
        yield
        self._parts.append("</g>")

    def svg(self) -> str:
        """The picture as a file's content."""
        width, height = (number(side) for side in self._size)
        return "\n".join(
            [
                self._opening(),
                f"<style>{stylesheet()}</style>",
                '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" '
                'patternTransform="rotate(45)"><rect class="discarded" width="1.7" height="4"/>'
                "</pattern></defs>",
                f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def inline(self) -> str:
        """The picture as part of a page that has `stylesheet` in its head."""
        return "\n".join([self._opening(), *self._parts, "</svg>"])

    def _opening(self) -> str:
        width, height = (number(side) for side in self._size)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            f"aria-label={quoteattr(_NOT_XML.sub('', self._label))}>"
        )

    def _add(self, shape: str, *, element: str, title: str) -> None:
        self._parts.append(f"{shape}>{_title(title)}</{element}>" if title else f"{shape}/>")


def text_width(text: str, *, size: float = 12) -> float:
    """About how wide a text will be: fonts differ, so leave some room."""
    return 0.54 * size * len(text)


def _clean(text: str) -> str:
    return escape(_NOT_XML.sub("", text))


def _title(text: str) -> str:
    return f"<title>{_clean(text)}</title>" if text else ""


def stylesheet() -> str:
    """The look of all pictures."""
    layout = (
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
    dark = _colours(_DARK, _DARK_RAMP)
    return f"{layout}{_colours(_LIGHT, _LIGHT_RAMP)}@media (prefers-color-scheme:dark){{{dark}}}"


def _colours(palette: dict[str, str], ramp: Sequence[str]) -> str:
    """Plain rules, no variables: not every viewer of SVG knows those."""
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
