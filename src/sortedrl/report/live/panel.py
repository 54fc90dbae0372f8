"""What a moment of a run looks like: a panel that fits the terminal, whatever its size.

Where there are too few lines, the least important ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sortedrl.report.live.drawing import bar, sparkline, stacked, strip
from sortedrl.report.live.frame import BLOCKS, Frame, Glyphs, Line, Piece, fitted, shown
from sortedrl.report.live.memory import Memory
from sortedrl.report.live.state import Moment
from sortedrl.terminal import percent, thousands

_LABEL = 10
_BAR_LEAST, _BAR_MOST = 8, 60
_TWO_COLUMNS = 56
_STRIP_ROWS = 4
_VALUE = 11


class _Ranked(NamedTuple):
    """A line and its rank; the lowest ranks are kept."""

    rank: int
    pieces: Line


class _Figure(NamedTuple):
    """A number with a name, and its course over the run."""

    name: str
    value: str
    values: tuple[float, ...] = ()
    from_zero: bool = False


def panel(moment: Moment, *, width: int, height: int, glyphs: Glyphs = BLOCKS) -> Frame:
    """The moment in at most `height` lines of at most `width` cells."""
    lines = [
        *_heading(moment, glyphs=glyphs),
        *_strip(moment, width, rows=max(1, min(_STRIP_ROWS, height - 9)), glyphs=glyphs),
        *_bars(moment, width, glyphs=glyphs),
        *_figures(moment, width, glyphs=glyphs),
        *_ledger(moment, width, glyphs=glyphs),
    ]
    kept = sorted(range(len(lines)), key=lambda number: lines[number].rank)[:height]
    return Frame(
        tuple(fitted(lines[number].pieces, width, cut=glyphs.cut) for number in sorted(kept))
    )


def _heading(moment: Moment, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    if moment.shares:
        words: list[Piece] = [
            (shown(moment.schedule, glyphs), "name"),
            (f"  update {moment.updates + 1:,}", ""),
            (f", {moment.skipped:,} skipped" if moment.skipped else "", "bad"),
            (f"  round {moment.round + 1:,}", ""),
            (f"  {moment.running:,} of {len(moment.shares):,} writing", ""),
        ]
        yield _Ranked(3, tuple(words))
    yield _Ranked(1, ((shown(moment.activity, glyphs), "name" if not moment.shares else ""),))


def _strip(moment: Moment, width: int, *, rows: int, glyphs: Glyphs) -> Iterator[_Ranked]:
    if not moment.shares or width <= _LABEL:
        return
    lines = strip(
        moment.shares,
        width - _LABEL,
        rows=rows,
        glyphs=glyphs,
        is_rollout=moment.is_rollout,
    )
    for number, line in enumerate(lines):
        yield _Ranked(0, (_label("" if number else "slots"), *line))


def _bars(moment: Moment, width: int, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    bars: list[tuple[int, str, float, str]] = []
    if moment.update_batch:
        ready = f"{moment.ready:,} ready, {moment.update_batch:,} needed"
        bars.append((5, "update", moment.ready / moment.update_batch, ready))
    if (group := moment.group) is not None:
        words = f"{group.trained:,} of {group.total:,} trained"
        if group.num_younger:
            words += f", {group.num_younger} more open"
        bars.append((7, f"group {group.number + 1}", group.trained / group.total, words))
    bars.append((2, "run", moment.done, _run_words(moment)))
    size = min(_BAR_MOST, width - _LABEL - 1 - max(len(words) for *_, words in bars))
    for rank, name, share, words in bars:
        drawn = (*bar(share, size, glyphs=glyphs), (" ", "")) if size >= _BAR_LEAST else ()
        yield _Ranked(rank, (_label(name), *drawn, (words, "")))


def _run_words(moment: Moment) -> str:
    words = f"{percent(moment.done)}, {_clock(moment.seconds)}"
    if moment.done > 0:
        words += f", {_clock(moment.seconds * (1 - moment.done) / moment.done)} left"
    return words


def _figures(moment: Moment, width: int, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    """Numbers side by side, as many as the width allows."""
    figures = list(_of_updates(moment))
    columns = 2 if width >= _TWO_COLUMNS else 1
    each = width // columns
    size = min(_BAR_MOST // 2, each - _LABEL - _VALUE - 1)
    for begin in range(0, len(figures), columns):
        line: list[Piece] = []
        for figure in figures[begin : begin + columns]:
            drawn = ""
            if size >= _BAR_LEAST and figure.values:
                drawn = sparkline(figure.values, size, glyphs=glyphs, from_zero=figure.from_zero)
            value = figure.value.ljust(_VALUE)
            drawn = drawn.ljust(each - _LABEL - len(value))
            line += [_label(figure.name), (value, ""), (drawn, "busy")]
        yield _Ranked(4 + begin, tuple(line))


def _of_updates(moment: Moment) -> Iterator[_Figure]:
    courses, run = moment.courses, moment.figures
    for name, digits in (("reward", 3), ("length", 0)):
        if name in courses:
            yield _Figure(name, f"{courses[name].last:,.{digits}f}", courses[name].values)
    if run is not None:
        past = {name: course.values for name, course in courses.items()}
        yield _Figure("bubble", percent(run.bubble), past.get("bubble", ()), True)
        goodput = f"{thousands(run.goodput)}/s"
        yield _Figure("goodput", goodput, past.get("goodput", ()), True)
        stale = f"{run.mean_staleness:.2f} max {run.staleness_max}"
        yield _Figure("staleness", stale, past.get("staleness", ()), True)
    if "score" in courses:
        yield _Figure("score", percent(courses["score"].last), courses["score"].values)
    if moment.memory is not None:
        yield _Figure("memory", _memory_words(moment.memory))


def _ledger(moment: Moment, width: int, *, glyphs: Glyphs) -> Iterator[_Ranked]:
    if moment.figures is None:
        return
    ledger = moment.figures.ledger
    whole = max(1, ledger.decoded)
    parts = (
        ("trained", ledger.trained, glyphs.trained, "good"),
        ("discarded", ledger.discarded, glyphs.discarded, "bad"),
        ("cached", ledger.cached, glyphs.cached, "faint"),
    )
    words: list[Piece] = [(_short(ledger.decoded), "")]
    for sign, (name, tokens, _, tint) in zip("=++", parts, strict=True):
        words += [(f" {sign} ", ""), (f"{_short(tokens)} {name}", tint)]
    size = min(_BAR_MOST, width - _LABEL - 1 - sum(len(text) for text, _ in words))
    drawn: Line = ()
    if size >= _BAR_LEAST:
        shares = [(tokens / whole, char, tint) for _, tokens, char, tint in parts]
        drawn = (*stacked(shares, size), (" ", ""))
    yield _Ranked(9, (_label("decoded"), *drawn, *words))


def _label(name: str) -> Piece:
    return name.ljust(_LABEL), "label"


def _clock(seconds: float) -> str:
    """Seconds as a clock shows them: always as wide, so that the picture stands still.

    >>> [_clock(s) for s in (8, 100, 7300)]
    ['0:08', '1:40', '2:01:40']
    """
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _short(count: int) -> str:
    """A count in few letters.

    >>> [_short(count) for count in (950, 12_345, 6_789_000, 12_000_000_000)]
    ['950', '12.3k', '6.8M', '12.0G']
    """
    if count < 1000:
        return f"{count}"
    for unit, size in (("k", 1e3), ("M", 1e6)):
        if count < 1000 * size:
            return f"{count / size:.1f}{unit}"
    return f"{count / 1e9:.1f}G"


def _memory_words(memory: Memory) -> str:
    used = f"{memory.used / 2**30:.1f}"
    if memory.total is None:
        return f"{used} GiB"
    return f"{used} of {memory.total / 2**30:.0f} GiB"
