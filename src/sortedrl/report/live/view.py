"""The live view of a run on a terminal, and plain lines elsewhere, behind the same few calls.

The run tells what happens; a thread of its own draws it, at most twice a second and only when the
picture changed. The run never waits for the terminal: it waits at most for the copy of a few lists.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sortedrl.core.events import Event, Harvest, Score, Update
from sortedrl.core.logs import Value
from sortedrl.core.metrics import Figures
from sortedrl.report.live.panel import Frame, glyphs_for, panel, shown
from sortedrl.report.live.state import LiveState, Memory, Snapshot, Source, used_memory
from sortedrl.report.terminal import Advance, progress, tell

_SECONDS_PER_FRAME = 0.5
_SECONDS_PER_MEMORY = 2.0


class View(Protocol):
    """Shows a run to the person who waits."""

    def watch(self, source: Source) -> None:
        """The run is loaded; its events follow."""

    def __call__(self, event: Event) -> None:
        """Take in the next event."""

    def updated(self, row: Mapping[str, Value]) -> None:
        """Take in a row of metrics, of an update or of an evaluation."""

    def advance(self, what: str, done: float) -> None:
        """Show what goes on, and the share of the run that is behind."""

    def tell(self, line: str) -> None:
        """Show a line that stays."""


@contextmanager
def opened_view() -> Iterator[View]:
    """A view on standard error, until the block is left."""
    console = Console(stderr=True)
    # A file may be made to pass for a terminal to get colours; it must not get pictures.
    if console.is_interactive and console.file.isatty():
        with LiveView(console) as view:
            yield view
        return
    with progress(1.0) as advance:
        yield PlainView(advance)


class PlainView:
    """Lines, and nothing but lines."""

    def __init__(self, advance: Advance) -> None:
        """`advance` shows what goes on."""
        self._advance = advance

    def watch(self, source: Source) -> None:
        """Nothing to prepare."""

    def __call__(self, event: Event) -> None:
        """Events have no lines of their own."""

    def updated(self, row: Mapping[str, Value]) -> None:
        """The run tells the line of an update itself."""

    def advance(self, what: str, done: float) -> None:
        """Show what goes on, now and then."""
        self._advance(what, done)

    def tell(self, line: str) -> None:
        """Print the line."""
        tell(line)


class LiveView:
    """A panel at the foot of the terminal, with the lines that stay above it."""

    def __init__(
        self, console: Console, *, seconds_per_frame: float | None = _SECONDS_PER_FRAME
    ) -> None:
        """Draw on the console; without `seconds_per_frame` only when `refresh` is called."""
        self._console = console
        self._glyphs = glyphs_for(console.encoding)
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # Results may go to a file while the picture goes to the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        # Taken by the run for a fold and by the thread for a copy, never while something is
        # written: a signal's handler may write in the middle of a fold.
        self._lock = threading.Lock()
        self._state: LiveState | None = None
        self._activity, self._done = "", 0.0
        self._figures: Figures | None = None
        self._is_figures_due = True
        self._memory: Memory | None = None
        self._memory_since = -_SECONDS_PER_MEMORY
        self._frame: Frame | None = None
        self._seconds_per_frame = seconds_per_frame
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live view", daemon=True)

    def __enter__(self) -> LiveView:
        """Begin to draw."""
        self._live.start()
        if self._seconds_per_frame is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the panel away; the lines above it stay."""
        self._is_over.set()
        if self._seconds_per_frame is not None:
            self._thread.join()
        self._live.stop()

    def watch(self, source: Source) -> None:
        """The run is loaded; its events follow."""
        with self._lock:
            self._state = LiveState(source)

    def __call__(self, event: Event) -> None:
        """Take in the next event."""
        with self._lock:
            assert self._state is not None, "events come after the run is loaded"
            self._state(event)
            self._activity = activity(event) or self._activity
            # An update is long and without events, so it must not begin with old numbers.
            if self._is_figures_due or isinstance(event, Score | Update):
                self._figures = self._state.source.figures()
                self._is_figures_due = False

    def updated(self, row: Mapping[str, Value]) -> None:
        """Take in a row of metrics, of an update or of an evaluation."""
        with self._lock:
            assert self._state is not None, "rows come after the run is loaded"
            self._state.updated(row)

    def advance(self, what: str, done: float) -> None:
        """Show what goes on, and the share of the run that is behind."""
        self._activity, self._done = what, done

    def tell(self, line: str) -> None:
        """Write a line above the panel."""
        text = Text("\n".join(shown(part, self._glyphs) for part in line.split("\n")))
        self._console.print(text, soft_wrap=True)

    def refresh(self) -> None:
        """Draw the panel, unless it would look as it does."""
        snapshot = self._snapshot()
        size = self._console.size
        # One line is left free, so that a printed line can be seen above the panel.
        frame = panel(
            snapshot, width=size.width, height=max(1, size.height - 1), glyphs=self._glyphs
        )
        if frame != self._frame:
            self._frame = frame
            self._live.update(frame, refresh=True)

    def _snapshot(self) -> Snapshot:
        with self._lock:
            state = self._state
            if state is None:
                return Snapshot(activity=self._activity, done=self._done)
            self._is_figures_due = True
            snapshot = state.snapshot(
                activity=self._activity,
                done=self._done,
                figures=self._figures,
                memory=self._memory,
            )
        now = time.monotonic()
        if now - self._memory_since >= _SECONDS_PER_MEMORY:
            self._memory, self._memory_since = used_memory(state.source.device), now
        return snapshot

    def _draw(self) -> None:
        while not self._is_over.wait(self._seconds_per_frame):
            self.refresh()


def activity(event: Event) -> str | None:
    """What goes on from this event on, where it begins something long."""
    if isinstance(event, Harvest):
        return f"waiting for the rewards of {event.ready:,} answers"
    if isinstance(event, Score):
        return f"training on {len(event.scored):,} answers"
    if isinstance(event, Update):
        return f"trained on {len(event.trained):,} answers"
    return None
