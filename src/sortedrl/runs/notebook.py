"""A run inside a notebook: the same view as on a terminal, as a table that is redrawn in place.

It needs nothing but IPython, which every notebook has, and does nothing where there is none.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from importlib import import_module

from sortedrl.core.events import End, Event
from sortedrl.core.logs import Value
from sortedrl.report.live.state import Source
from sortedrl.report.live.view import View, activity

_SECONDS_PER_FRAME = 0.5
_SHOWN_ROWS = 8
_SHOWN_LINES = 6
_COLUMNS = {
    "update": "update",
    "reward/mean": "reward",
    "length/mean": "length",
    "rollout/bubble": "bubble",
    "rollout/goodput": "tokens/s",
    "evaluation/score": "score",
}
"""What a row of the table has, by the names in metrics.jsonl."""
_FRAME = '<div><iframe srcdoc="{}" style="width: 100%; height: {}px; border: 0"></iframe></div>'
"""Inside a div: IPython warns of HTML that is a frame and nothing else."""

Show = Callable[[str], None]
"""Shows HTML in the place that belongs to it."""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


def show_page(html: str, *, height: int = 900) -> None:
    """Show a whole page under the cell, in a frame of its own; outside of a notebook, nothing."""
    if is_notebook():
        _shown(_FRAME.format(escape(html), height))


def _shown(html: str) -> Show:
    """Show HTML under the cell; what is given afterwards takes its place."""
    display = import_module("IPython.display")
    handle = display.display(display.HTML(html), display_id=True)
    return lambda changed: handle.update(display.HTML(changed))


@contextmanager
def notebook_view() -> Iterator[View]:
    """A view under the cell that runs."""
    view = NotebookView(_shown("loading"))
    try:
        yield view
    finally:
        view.draw()


class NotebookView:
    """The last updates as a table, what goes on above it, and the last lines below."""

    def __init__(self, show: Show) -> None:
        """Draw with `show`, at most twice a second."""
        self._show = show
        self._rows: deque[Mapping[str, Value]] = deque(maxlen=_SHOWN_ROWS)
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._what, self._done = "", 0.0
        self._drawn = 0.0

    def watch(self, source: Source) -> None:
        """The run is loaded; its events follow."""
        self._what = f"{source.schedule}, {source.slots} slots, on {source.device}"

    def __call__(self, event: Event) -> None:
        """Take in the next event."""
        self._what = activity(event) or self._what
        if isinstance(event, End):
            self._what, self._done = f"finished: {event.trained:,} answers trained", 1.0
        self._draw_soon()

    def updated(self, row: Mapping[str, Value]) -> None:
        """Take in a row of metrics, of an update or of an evaluation."""
        self._rows.append(row)
        self._draw_soon()

    def advance(self, what: str, done: float) -> None:
        """Show what goes on, and the share of the run that is behind."""
        self._what, self._done = what, done
        self._draw_soon()

    def tell(self, line: str) -> None:
        """Show a line; the line of an update stands in the table already."""
        if not line.startswith("update "):
            self._lines.append(line)
        self._draw_soon()

    def draw(self) -> None:
        """Draw now."""
        self._drawn = time.monotonic()
        self._show(self._html())

    def _draw_soon(self) -> None:
        if time.monotonic() - self._drawn >= _SECONDS_PER_FRAME:
            self.draw()

    def _html(self) -> str:
        used = [name for name in _COLUMNS if any(name in row for row in self._rows)]
        head = "".join(f"<th>{_COLUMNS[name]}</th>" for name in used)
        body = "".join(
            "<tr>" + "".join(f"<td>{_cell(row.get(name))}</td>" for name in used) + "</tr>"
            for row in self._rows
        )
        lines = escape("\n".join(self._lines))
        return (
            f'<div>{escape(self._what)}<br><progress value="{self._done:.4f}" max="1" '
            f'style="width: 100%"></progress><table><tr>{head}</tr>{body}</table>'
            f"<pre>{lines}</pre></div>"
        )


def _cell(value: Value | None) -> str:
    if value is None:
        return ""
    return f"{value:,.3g}" if isinstance(value, float) else escape(str(value))
