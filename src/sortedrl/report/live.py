"""The live view of a run: a panel in a terminal, plain lines elsewhere.

    events -> state -> snapshot -> panel -> frame -> terminal

The run reports events; a separate thread draws them, at most twice a second and only if the frame
changed. The run never waits for the terminal, at most for copying a few lists.

The panel fits any terminal size: if there are too few lines, the least important are left out. A
frame is plain data that can be compared, so an unchanged one is not written. Text is never parsed
as markup, and control characters are replaced.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from sortedrl.core.events import Event, Harvest, Score, Update
from sortedrl.core.files import Value
from sortedrl.core.meter import Figures
from sortedrl.evaluation.tables import percent
from sortedrl.report.live_state import LiveState, Memory, Snapshot, Source, squeezed, used_memory
from sortedrl.report.terminal import Advance, one_line, progress, tell, thousands

StyledText = tuple[str, str]
"""Text without control characters, and the name of its style."""
Line = tuple[StyledText, ...]

_TINTS = {
    "": Style(),
    "name": Style(bold=True),
    "label": Style(dim=True),
    "faint": Style(dim=True),
    "busy": Style(color="#56b4e9"),
    "idle": Style(color="#e69f00", bold=True),
    "good": Style(color="#009e73"),
    "bad": Style(color="#d55e00"),
}
"""Okabe and Ito's colours, distinct with any colour vision, on dark and light backgrounds."""

_SLOT_BAR_LEAST = 4
_SLOT_BAR_MOST = 16
_LABEL = 10
_BAR_LEAST, _BAR_MOST = 8, 60
_TWO_COLUMNS = 56
_STRIP_ROWS = 4
_VALUE = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters of the panel."""

    levels: str
    """Levels of a cell, low to high."""
    parts: str
    """Levels of a bar cell filled from the left, low to full."""
    rest: str
    """The empty part of a bar."""
    idle: str
    trained: str
    discarded: str
    cached: str
    cut: str
    """Marks truncated text."""


BLOCKS = Glyphs(
    levels="▁▂▃▄▅▆▇█",
    parts="╸━",
    rest="─",
    idle="·",
    trained="█",
    discarded="▒",
    cached="░",
    cut="…",
)
ASCII = Glyphs(
    levels="12345678",
    parts="#",
    rest="-",
    idle=".",
    trained="#",
    discarded="x",
    cached=":",
    cut="~",
)


def glyphs_for(encoding: str) -> Glyphs:
    """Block characters if the encoding has them, otherwise ASCII."""
    try:
        "".join(astuple(BLOCKS)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def shown(text: str, glyphs: Glyphs) -> str:
    """The text as one line without control characters."""
    return one_line(text, is_ascii=glyphs is ASCII)


def fitted(pieces: Iterable[StyledText], width: int, *, cut: str) -> Line:
    """Truncate the pieces to the width, ending with `cut`; trailing blanks are removed."""
    line: list[StyledText] = []
    left = width
    for text, tint in pieces:
        size = cell_len(text)
        if size > left:
            if left > 0:
                line.append((set_cell_size(text, left - 1) + cut, tint))
            break
        line.append((text, tint))
        left -= size
    while line and not line[-1][0].rstrip():
        line.pop()
    if line:
        line[-1] = (line[-1][0].rstrip(), line[-1][1])
    return tuple(piece for piece in line if piece[0])


@dataclass(frozen=True, slots=True)
class Frame:
    """Lines that fit the terminal they were made for."""

    lines: Sequence[Line]

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line) for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield segments directly: rich would wrap and restyle text."""
        new_line = Segment.line()
        for number, line in enumerate(self.lines):
            if number:
                yield new_line
            for text, tint in line:
                yield Segment(text, _TINTS[tint])


def bar(share: float, width: int, *, glyphs: Glyphs) -> Line:
    """A share as a bar, filled from the left."""
    steps = len(glyphs.parts)
    filled = min(width * steps, max(0, int(share * width * steps)))
    whole, part = divmod(filled, steps)
    text = glyphs.parts[-1] * whole + (glyphs.parts[part - 1] if part else "")
    return (text, "busy"), (glyphs.rest * (width - len(text)), "faint")


def stacked(shares: Sequence[tuple[float, str, str]], width: int) -> Line:
    """Shares side by side, each with its character and style."""
    line, end, total = [], 0, 0.0
    for share, char, tint in shares:
        total += share
        begin, end = end, min(width, round(total * width))
        line.append((char * (end - begin), tint))
    return tuple(line)


def sparkline(values: Sequence[float], width: int, *, glyphs: Glyphs, from_zero: bool) -> str:
    """A number over time, scaled to its range; starting at zero if `from_zero`."""
    points = squeezed(values, width)
    if not points:
        return ""
    low, high = min(points), max(points)
    if from_zero:
        low = min(low, 0.0)
    most = len(glyphs.levels) - 1
    if high / 2 - low / 2 <= 0:
        return glyphs.levels[0 if from_zero else most // 2] * len(points)
    # Halved, as the difference of two finite numbers may overflow.
    return "".join(
        glyphs.levels[round((value / 2 - low / 2) / (high / 2 - low / 2) * most)]
        for value in points
    )


def strip(
    shares: Sequence[float | None], width: int, *, rows: int, glyphs: Glyphs, is_rollout: bool
) -> list[Line]:
    """The slots in at most `rows` lines: tokens generated so far, and idle slots.

    Few slots have a bar each, more have a cell each, in order. If there are more slots than cells,
    a cell shows several; they are sorted, so that similar slots share a cell and idle ones are
    together.
    """
    idle = (glyphs.idle, "idle" if is_rollout else "faint")
    if width // max(1, len(shares)) > _SLOT_BAR_LEAST:
        return [_slot_bars(shares, width, glyphs=glyphs, idle=idle)]
    per_cell = -(-len(shares) // (width * rows))
    cells = shares if per_cell == 1 else _joined(shares, per_cell)
    lines = -(-len(cells) // width)
    per_line = -(-len(cells) // lines)
    return [
        _cells(cells[begin : begin + per_line], glyphs=glyphs, idle=idle)
        for begin in range(0, len(cells), per_line)
    ]


def _slot_bars(
    shares: Sequence[float | None], width: int, *, glyphs: Glyphs, idle: StyledText
) -> Line:
    size = min(_SLOT_BAR_MOST, width // max(1, len(shares))) - 1
    line: list[StyledText] = []
    for share in shares:
        if share is None:
            line.append((idle[0] * size, idle[1]))
        else:
            line.extend(bar(share, size, glyphs=glyphs))
        line.append((" ", ""))
    return tuple(line)


def _joined(shares: Sequence[float | None], per_cell: int) -> list[float | None]:
    """Combine slots into cells, longest answers first: their mean, or idle if most are."""
    busy = sorted((share for share in shares if share is not None), reverse=True)
    in_order: list[float | None] = [*busy, *[None] * (len(shares) - len(busy))]
    cells: list[float | None] = []
    for begin in range(0, len(in_order), per_cell):
        held = in_order[begin : begin + per_cell]
        written = [share for share in held if share is not None]
        is_idle = 2 * len(written) < len(held)
        cells.append(None if is_idle else sum(written) / len(written))
    return cells


def _cells(shares: Sequence[float | None], *, glyphs: Glyphs, idle: StyledText) -> Line:
    most = len(glyphs.levels) - 1
    drawn = [
        idle if share is None else (glyphs.levels[min(most, int(share * (most + 1)))], "busy")
        for share in shares
    ]
    return tuple(
        ("".join(char for char, _ in alike), tint)
        for tint, alike in groupby(drawn, key=lambda piece: piece[1])
    )


class _Ranked(NamedTuple):
    """A line and its rank; low ranks are kept."""

    rank: int
    pieces: Line


class _Figure(NamedTuple):
    """A named number and its course over the run."""

    name: str
    value: str
    values: tuple[float, ...] = ()
    from_zero: bool = False


def panel(snapshot: Snapshot, *, width: int, height: int, glyphs: Glyphs = BLOCKS) -> Frame:
    """The snapshot in at most `height` lines of at most `width` cells."""
    lines = [
        *_heading(snapshot, glyphs=glyphs),
        *_strip(snapshot, width, rows=max(1, min(_STRIP_ROWS, height - 9)), glyphs=glyphs),
        *_bars(snapshot, width, glyphs=glyphs),
        *_figures(snapshot, width, glyphs=glyphs),
        *_ledger(snapshot, width, glyphs=glyphs),
    ]
    kept = sorted(range(len(lines)), key=lambda number: lines[number].rank)[:height]
    return Frame(
        tuple(fitted(lines[number].pieces, width, cut=glyphs.cut) for number in sorted(kept))
    )


def _heading(snapshot: Snapshot, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    if snapshot.shares:
        pieces: list[StyledText] = [
            (shown(snapshot.schedule, glyphs), "name"),
            (f"  update {snapshot.updates + 1:,}", ""),
            (f", {snapshot.skipped:,} skipped" if snapshot.skipped else "", "bad"),
            (f"  round {snapshot.round + 1:,}", ""),
            (f"  {snapshot.running:,} of {len(snapshot.shares):,} slots busy", ""),
        ]
        yield _Ranked(3, tuple(pieces))
    yield _Ranked(1, ((shown(snapshot.activity, glyphs), "name" if not snapshot.shares else ""),))


def _strip(snapshot: Snapshot, width: int, *, rows: int, glyphs: Glyphs) -> Iterator[_Ranked]:
    if not snapshot.shares or width <= _LABEL:
        return
    is_rollout = snapshot.is_rollout
    lines = strip(snapshot.shares, width - _LABEL, rows=rows, glyphs=glyphs, is_rollout=is_rollout)
    for number, line in enumerate(lines):
        yield _Ranked(0, (_label("" if number else "slots"), *line))


def _bars(snapshot: Snapshot, width: int, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    bars: list[tuple[int, str, float, str]] = []
    if snapshot.update_batch:
        ready = f"{snapshot.ready:,} ready, {snapshot.update_batch:,} needed"
        bars.append((5, "update", snapshot.ready / snapshot.update_batch, ready))
    if (group := snapshot.group) is not None:
        text = f"{group.trained:,} of {group.total:,} trained"
        if group.num_younger:
            text += f", {group.num_younger} more open"
        bars.append((7, f"group {group.number + 1}", group.trained / group.total, text))
    bars.append((2, "run", snapshot.done, _progress_text(snapshot)))
    size = min(_BAR_MOST, width - _LABEL - 1 - max(len(text) for *_, text in bars))
    for rank, name, share, text in bars:
        drawn = (*bar(share, size, glyphs=glyphs), (" ", "")) if size >= _BAR_LEAST else ()
        yield _Ranked(rank, (_label(name), *drawn, (text, "")))


def _progress_text(snapshot: Snapshot) -> str:
    text = f"{percent(snapshot.done)}, {_clock(snapshot.seconds)}"
    if snapshot.done > 0:
        text += f", {_clock(snapshot.seconds * (1 - snapshot.done) / snapshot.done)} left"
    return text


def _figures(snapshot: Snapshot, width: int, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    """Numbers side by side, as many as fit."""
    figures = list(_of_updates(snapshot))
    columns = 2 if width >= _TWO_COLUMNS else 1
    each = width // columns
    size = min(_BAR_MOST // 2, each - _LABEL - _VALUE - 1)
    for begin in range(0, len(figures), columns):
        line: list[StyledText] = []
        for figure in figures[begin : begin + columns]:
            drawn = ""
            if size >= _BAR_LEAST and figure.values:
                drawn = sparkline(figure.values, size, glyphs=glyphs, from_zero=figure.from_zero)
            value = figure.value.ljust(_VALUE)
            drawn = drawn.ljust(each - _LABEL - len(value))
            line += [_label(figure.name), (value, ""), (drawn, "busy")]
        yield _Ranked(4 + begin, tuple(line))


def _of_updates(snapshot: Snapshot) -> Iterator[_Figure]:
    trends, run = snapshot.trends, snapshot.figures
    for name, digits in (("reward", 3), ("length", 0)):
        if name in trends:
            yield _Figure(name, f"{trends[name].last:,.{digits}f}", trends[name].values)
    if run is not None:
        past = {name: trend.values for name, trend in trends.items()}
        yield _Figure("bubble", percent(run.bubble), past.get("bubble", ()), True)
        goodput = f"{thousands(run.goodput)}/s"
        yield _Figure("goodput", goodput, past.get("goodput", ()), True)
        stale = f"{run.mean_staleness:.2f} max {run.staleness_max}"
        yield _Figure("staleness", stale, past.get("staleness", ()), True)
    if "score" in trends:
        yield _Figure("score", percent(trends["score"].last), trends["score"].values)
    if snapshot.memory is not None:
        yield _Figure("memory", _memory_text(snapshot.memory))


def _ledger(snapshot: Snapshot, width: int, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    if snapshot.figures is None:
        return
    ledger = snapshot.figures.ledger
    whole = max(1, ledger.decoded)
    parts = (
        ("trained", ledger.trained, glyphs.trained, "good"),
        ("discarded", ledger.discarded, glyphs.discarded, "bad"),
        ("cached", ledger.cached, glyphs.cached, "faint"),
    )
    pieces: list[StyledText] = [(_short(ledger.decoded), "")]
    for sign, (name, tokens, _, tint) in zip("=++", parts, strict=True):
        pieces += [(f" {sign} ", ""), (f"{_short(tokens)} {name}", tint)]
    size = min(_BAR_MOST, width - _LABEL - 1 - sum(len(text) for text, _ in pieces))
    drawn: Line = ()
    if size >= _BAR_LEAST:
        shares = [(tokens / whole, char, tint) for _, tokens, char, tint in parts]
        drawn = (*stacked(shares, size), (" ", ""))
    yield _Ranked(9, (_label("decoded"), *drawn, *pieces))


def _label(name: str) -> StyledText:
    return name.ljust(_LABEL), "label"


def _clock(seconds: float) -> str:
    """Format seconds as a clock, at a constant width.

    >>> [_clock(s) for s in (8, 100, 7300)]
    ['0:08', '1:40', '2:01:40']
    """
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _short(count: int) -> str:
    """Format a count in few characters.

    >>> [_short(count) for count in (950, 12_345, 6_789_000, 12_000_000_000)]
    ['950', '12.3k', '6.8M', '12.0G']
    """
    if count < 1000:
        return f"{count}"
    for unit, size in (("k", 1e3), ("M", 1e6)):
        if count < 1000 * size:
            return f"{count / size:.1f}{unit}"
    return f"{count / 1e9:.1f}G"


def _memory_text(memory: Memory) -> str:
    used = f"{memory.used / 2**30:.1f}"
    if memory.total is None:
        return f"{used} GiB"
    return f"{used} of {memory.total / 2**30:.0f} GiB"


_SECONDS_PER_FRAME = 0.5
_SECONDS_PER_MEMORY = 2.0


class View(Protocol):
    """Shows the progress of a run."""

    def watch(self, source: Source) -> None:
        """Set the run to show; its events follow."""

    def __call__(self, event: Event) -> None:
        """Process the next event."""

    def updated(self, row: Mapping[str, Value]) -> None:
        """Process a row of metrics, of an update or an evaluation."""

    def advance(self, what: str, done: float) -> None:
        """Show the current activity, and the share of the run that is done."""

    def tell(self, line: str) -> None:
        """Print a line that stays."""


@contextmanager
def opened_view() -> Iterator[View]:
    """A view on standard error for the duration of the block."""
    console = Console(stderr=True)
    # FORCE_COLOR makes a file look like a terminal: it may get colours, but no panel.
    if console.is_interactive and console.file.isatty():
        with LiveView(console) as view:
            yield view
        return
    with progress(1.0) as advance:
        yield PlainView(advance)


class PlainView:
    """Plain lines only."""

    def __init__(self, advance: Advance) -> None:
        """`advance` shows the current activity."""
        self._advance = advance

    def watch(self, source: Source) -> None:
        """Nothing to prepare."""

    def __call__(self, event: Event) -> None:
        """Do nothing: events are not printed."""

    def updated(self, row: Mapping[str, Value]) -> None:
        """Do nothing: the run prints updates itself."""

    def advance(self, what: str, done: float) -> None:
        """Show the current activity from time to time."""
        self._advance(what, done)

    def tell(self, line: str) -> None:
        """Print the line."""
        tell(line)


class LiveView:
    """A panel at the bottom of the terminal, with permanent lines above it."""

    def __init__(
        self, console: Console, *, seconds_per_frame: float | None = _SECONDS_PER_FRAME
    ) -> None:
        """Draw on the console; without `seconds_per_frame` only on `refresh`."""
        self._console = console
        self._glyphs = glyphs_for(console.encoding)
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # Standard output may be a file while the panel is on the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        # Held by the run while it folds an event and by the thread while it copies, but never
        # during output: a signal handler may print in the middle of a fold.
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
        """Start drawing."""
        self._live.start()
        if self._seconds_per_frame is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the panel; the lines above it stay."""
        self._is_over.set()
        if self._seconds_per_frame is not None:
            self._thread.join()
        self._live.stop()

    def watch(self, source: Source) -> None:
        """Set the run to show; its events follow."""
        with self._lock:
            self._state = LiveState(source)

    def __call__(self, event: Event) -> None:
        """Process the next event."""
        with self._lock:
            assert self._state is not None, "events come after the run is loaded"
            self._state(event)
            self._activity = activity(event) or self._activity
            # An update is long and has no events, so it must not start with stale numbers.
            if self._is_figures_due or isinstance(event, Score | Update):
                self._figures = self._state.source.figures()
                self._is_figures_due = False

    def updated(self, row: Mapping[str, Value]) -> None:
        """Process a row of metrics, of an update or an evaluation."""
        with self._lock:
            assert self._state is not None, "rows come after the run is loaded"
            self._state.updated(row)

    def advance(self, what: str, done: float) -> None:
        """Show the current activity, and the share of the run that is done."""
        self._activity, self._done = what, done

    def tell(self, line: str) -> None:
        """Print a line above the panel."""
        text = Text("\n".join(shown(part, self._glyphs) for part in line.split("\n")))
        self._console.print(text, soft_wrap=True)

    def refresh(self) -> None:
        """Draw the panel if it changed."""
        snapshot = self._snapshot()
        size = self._console.size
        # One line is left free for printed lines above the panel.
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
    """The activity that starts with this event, if it is a long one."""
    if isinstance(event, Harvest):
        return f"waiting for the rewards of {event.ready:,} answers"
    if isinstance(event, Score):
        return f"training on {len(event.scored):,} answers"
    if isinstance(event, Update):
        return f"trained on {len(event.trained):,} answers"
    return None
