"""A picture in characters: lines of pieces, each a text and the name of its tint.

A frame is plain data that can be compared, so one that shows nothing new is not written.
Text is never read as markup, and what would move the cursor is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

Piece = tuple[str, str]
"""A text without control characters, and the name of its tint."""
Line = tuple[Piece, ...]

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
"""Okabe and Ito's colours, which differ for colour-blind eyes, on a dark and a light ground."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters of a picture."""

    levels: str
    """From little to much, in one cell."""
    parts: str
    """A cell of a bar that is filled from the left, from little to all of it."""
    rest: str
    """The part of a bar that is still to come."""
    idle: str
    trained: str
    discarded: str
    cached: str
    cut: str
    """Stands where a text was cut."""
    unknown: str
    """Stands for a character that cannot be shown."""


BLOCKS = Glyphs(
    levels="▁▂▃▄▅▆▇█",
    parts="╸━",
    rest="─",
    idle="·",
    trained="█",
    discarded="▒",
    cached="░",
    cut="…",
    unknown="�",
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
    unknown="?",
)


def glyphs_for(encoding: str) -> Glyphs:
    """Blocks where the encoding has them, plain letters elsewhere."""
    try:
        (BLOCKS.levels + BLOCKS.parts + BLOCKS.rest + BLOCKS.idle).encode(encoding)
        (BLOCKS.trained + BLOCKS.discarded + BLOCKS.cached + BLOCKS.cut + BLOCKS.unknown).encode(
            encoding
        )
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def shown(text: str, glyphs: Glyphs) -> str:
    """The text as one line that only shows and does nothing else.

    >>> shown("[bold]" + chr(27) + "[2J" + chr(10), ASCII)
    '[bold]?[2J?'
    """
    is_shown = str.isascii if glyphs is ASCII else _always
    return "".join(
        char if char.isprintable() and is_shown(char) else glyphs.unknown for char in text
    )


def fitted(pieces: Iterable[Piece], width: int, *, cut: str) -> Line:
    """The pieces as far as the line has room, without blanks at the end; `cut` ends what is cut."""
    line: list[Piece] = []
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
    """Lines that fit on the terminal they were made for."""

    lines: Sequence[Line]

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line) for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give segments, without a detour through text that would be wrapped and styled anew."""
        new_line = Segment.line()
        for number, line in enumerate(self.lines):
            if number:
                yield new_line
            for text, tint in line:
                yield Segment(text, _TINTS[tint])


def _always(char: str) -> bool:
    return True
