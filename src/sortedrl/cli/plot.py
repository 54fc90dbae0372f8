"""`sortedrl plot`: pictures of runs for docs and papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.core.files import refuse_foreign, write_whole
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.charts.svg import Scheme
from sortedrl.report.pictures import (
    MAX_WIDTH,
    Look,
    Per,
    bubble_picture,
    learning_picture,
    lengths_picture,
    pareto_picture,
    png,
    rewards_picture,
    slots_picture,
)
from sortedrl.report.record import By, Run, measured, read_runs
from sortedrl.report.terminal import refuse_unwritable, tell, write_text

WIDTH = 860
"""Pixels from left to right of every SVG; a PNG has twice as many."""

Kind = Literal["slots", "bubble", "learning", "rewards", "lengths", "pareto"]

HELP = """Draw runs as SVG or PNG, for docs and papers.

  sortedrl plot slots runs/sync runs/sorted --groups 2 --out slots.svg
  sortedrl plot slots events.jsonl --seconds 100 160 --out zoom.png
  sortedrl plot bubble runs/* --per group --out bubble.svg
  sortedrl plot learning runs/* --by seconds --out learning.svg
  sortedrl plot pareto runs/* --out pareto.png --scheme dark --width 2400

slots: what every slot did; bubble: idle share of the slots; learning: score on held-out prompts;
rewards, lengths: means of every update; pareto: cost and gain of runs, with the Pareto front.
Runs that differ only in the seed are drawn as one line with a band, from minimum to maximum.
An SVG follows the reader's theme unless --scheme fixes it. PNG: pip install 'sortedrl[plot]'.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to draw and how."""

    kind: tyro.conf.Positional[Kind]
    """What to draw."""
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or their events.jsonl."""
    out: Path
    """The picture: an .svg or a .png."""
    title: str = ""
    """In place of the picture's own title."""
    scheme: Scheme = "auto"
    """Colours: for a light page, for a dark one, or as the reader's theme asks (PNG: light)."""
    width: int | None = None
    """PNG: pixels from left to right; by default 1720, twice the size of the SVG."""
    seconds: tuple[float, float] | None = None
    """slots: draw only what lies between these seconds of the run."""
    groups: int | None = None
    """slots: draw until this many groups of prompts are trained on."""
    per: Per | None = None
    """bubble: of every round, or of every group; by default rounds."""
    by: By | None = None
    """learning: what the score is drawn against; by default answers."""


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl plot", description=HELP)
    _check(given)
    runs = [measured(record) for record in read_runs(given.runs)]
    if given.out.suffix == ".svg":
        write_text(given.out, _draw(given, runs, scheme=given.scheme))
        return
    scheme: Scheme = "light" if given.scheme == "auto" else given.scheme
    refuse_foreign(given.out, mark=b"\x89PNG")
    content = png(_draw(given, runs, scheme=scheme), width=_width(given))
    try:
        write_whole(given.out, content)
    except OSError as error:
        raise DataError(given.out, f"cannot be written ({error.strerror})") from error
    tell(f"wrote {given.out}")


def _check(given: Arguments) -> None:
    """Refuse what cannot be drawn before anything is read."""
    if given.out.suffix not in (".svg", ".png"):
        raise ConfigError(f"--out must end in .svg or .png, got {str(given.out)!r}")
    refuse_unwritable(given.out)
    if given.width is not None and given.out.suffix != ".png":
        raise ConfigError("--width is for .png; an .svg is drawn at any size")
    belongs = {"slots": ("seconds", "groups"), "bubble": ("per",), "learning": ("by",)}
    values = {"seconds": given.seconds, "groups": given.groups, "per": given.per, "by": given.by}
    for kind, flags in belongs.items():
        for flag in flags:
            if values[flag] is not None and kind != given.kind:
                raise ConfigError(f"--{flag} is for {kind}, but {given.kind} was asked for")
    if given.seconds is not None and given.groups is not None:
        raise ConfigError("give --seconds or --groups, not both")
    if given.groups is not None and given.groups < 1:
        raise ConfigError(f"--groups must be at least 1, got {given.groups}")
    if given.width is not None and not 1 <= given.width <= MAX_WIDTH:
        raise ConfigError(f"--width must lie in 1..{MAX_WIDTH} pixels, got {given.width}")
    if given.seconds is not None and not 0 <= given.seconds[0] < given.seconds[1]:
        first, last = given.seconds
        raise ConfigError(
            f"--seconds must be two numbers from 0 on, the first one smaller, got {first} {last}"
        )


def _draw(given: Arguments, runs: Sequence[Run], *, scheme: Scheme) -> str:
    look = Look(title=given.title, scheme=scheme)
    match given.kind:
        case "slots":
            return slots_picture(runs, look, seconds=given.seconds, groups=given.groups)
        case "bubble":
            return bubble_picture(runs, look, per=given.per or "round")
        case "learning":
            return learning_picture(runs, look, by=given.by or "answers")
        case "rewards":
            return rewards_picture(runs, look)
        case "lengths":
            return lengths_picture(runs, look)
        case "pareto":
            return pareto_picture(runs, look)


def _width(given: Arguments) -> int:
    return 2 * WIDTH if given.width is None else given.width
