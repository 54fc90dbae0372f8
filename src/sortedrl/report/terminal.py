"""Text, tables and progress in the terminal.

Results go to standard output; progress goes to standard error, live in a terminal and as occasional
plain lines elsewhere. Nothing is parsed as markup, and control characters are replaced: names come
from users and from files of others.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sortedrl.core.files import refuse_foreign, write_whole
from sortedrl.errors import DataError, os_errors

Advance = Callable[[str, float], None]
"""Report the current activity, and how much of the total is done."""

_PLAIN_SECONDS = 5.0
_FOLDED_WIDTH = 12
"""A folded name of a table is not narrower."""
PAGE = b'<meta name="generator" content="sortedrl">'
"""What every page of ours has near its beginning."""
_PICTURE = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 '


@contextmanager
def progress(total: float) -> Iterator[Advance]:
    """Show the progress of long work."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(total)
        return
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("", total=total)

        def advance(what: str, done: float) -> None:
            live.update(task, description=one_line(what), completed=done)

        yield advance


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings, the first column left-aligned and the others right-aligned.

    A terminal that is too narrow gets one space between columns, then a folded first column; lines
    that are still too long are left to the terminal to wrap.
    """
    lines = [[one_line(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    gap = 2 if sum(widths) + 2 * len(widths[1:]) <= console.width else 1
    first = min(widths[0], max(_FOLDED_WIDTH, cell_len(lines[0][0])))
    console.width = max(console.width, first + sum(widths[1:]) + gap * len(widths[1:]))
    grid = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for number, name in enumerate(lines[0]):
        # Names are folded and numbers are not.
        if number:
            grid.add_column(Text(name), justify="right", no_wrap=True)
        else:
            grid.add_column(Text(name), overflow="fold", min_width=first)
    for row in lines[1:]:
        grid.add_row(*map(Text, row))
    console.print(grid)


def one_line(text: str, *, is_ascii: bool = False) -> str:
    """The text as one line without control characters, for a terminal that may support only ASCII.

    >>> one_line("[easy]" + chr(27) + "[2J" + chr(10)), one_line("é" + chr(27), is_ascii=True)
    ('[easy]�[2J�', '??')
    """
    unknown = "?" if is_ascii else "\N{REPLACEMENT CHARACTER}"
    return "".join(
        c if c.isprintable() and (c.isascii() or not is_ascii) else unknown for c in text
    )


def line_width() -> int:
    """Columns of a line: those of the terminal, at most 100."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def tell(line: str) -> None:
    """Print a status line to standard error."""
    print(line, file=sys.stderr, flush=True)


def thousands(value: float) -> str:
    """Format with separators; small numbers with a decimal."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def refuse_other_picture(path: Path | None) -> None:
    """Refuse a path that cannot be written, or has anything but a picture of ours, beforehand."""
    if path is not None:
        refuse_unwritable(path)
        refuse_foreign(path, mark=_PICTURE)


def refuse_unwritable(path: Path) -> None:
    """Refuse a file that cannot be written, before its content is computed."""
    if path.is_dir():
        raise DataError(path, "cannot be written (Is a directory); give the name of a file")
    if not path.parent.is_dir():
        raise DataError(path, f"cannot be written (there is no folder {path.parent})")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DataError(path, "cannot be written (Permission denied)")


def refuse_unwritable_folder(path: Path) -> None:
    """Refuse a folder that cannot be created or written to; nothing is created yet."""
    nearest = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
    if not nearest.is_dir():
        raise DataError(path, f"must be a folder, but {nearest} is a file; give another name")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DataError(path, f"cannot be created (no permission to write in {nearest})")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, and print its path.

    A page replaces a page of ours, a picture a picture of ours; other files are refused.
    """
    marks = {"<!DOCTYPE html>": PAGE, "<svg": _PICTURE}
    found = [mark for beginning, mark in marks.items() if text.startswith(beginning)]
    refuse_foreign(path, mark=found[0] if found else None)
    with os_errors(path, "cannot be written"):
        # A lone surrogate, in a path or an answer, has no UTF-8.
        write_whole(path, text.encode(errors="backslashreplace"))
    print(f"wrote {path}", file=sys.stderr)


def _plain(total: float) -> Advance:
    last = time.monotonic()

    def advance(what: str, done: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PLAIN_SECONDS:
            last = now
            print(f"{100 * done / total:.0f} % {what}", file=sys.stderr, flush=True)

    return advance
