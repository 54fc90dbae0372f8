"""`sortedrl plot`: draws runs as pictures for docs and papers.

Every picture is a standalone SVG. Runs that differ only in the seed are one line with a band.
PNG needs the package resvg_py, imported only on demand. It ignores themes, so a PNG has one colour
scheme, and it finds fonts only by name, so the installed ones are probed first: with an unknown
font it would drop the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.core.events import Update
from sortedrl.core.files import refuse_foreign, write_whole
from sortedrl.errors import ConfigError, os_errors
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.comparison import Point, pareto
from sortedrl.report.charts.curves import curves
from sortedrl.report.charts.svg import Scheme
from sortedrl.report.charts.timeline import timelines
from sortedrl.report.record import (
    By,
    LineChart,
    Run,
    counted,
    length_chart,
    measured,
    read_runs,
    reward_chart,
    score_chart,
    seed_groups,
    seed_series,
)
from sortedrl.report.terminal import refuse_unwritable, tell, write_text

Per = Literal["round", "group"]

FONTS = (
    "Arial",
    "Helvetica",
    "Liberation Sans",
    "Segoe UI",
    "Roboto",
    "Noto Sans",
    "Open Sans",
    "Ubuntu",
    "Cantarell",
    "DejaVu Sans",
    "Verdana",
)
"""Fonts to try, narrow ones first: the layout leaves room for letters of Arial's width."""
MAX_WIDTH = 20_000
"""Larger pictures take gigabytes of memory."""
_SHEET = '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16">{}</svg>'
_WORD = _SHEET.format('<text y="12" font-family="sans-serif" font-size="9">Wag1</text>')
_NO_FONT = "no font has this name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Options that all pictures share."""

    title: str = ""
    """Replaces the picture's default title."""
    scheme: Scheme = "auto"


def slots_picture(
    runs: Sequence[Run],
    look: Look,
    *,
    seconds: tuple[float, float] | None = None,
    groups: int | None = None,
) -> str:
    """The slot timelines of whole runs, of a time window, or of the first `groups` groups."""
    window = seconds
    if groups is not None:
        window = (0.0, max(_closing_second(run, groups) for run in runs))
    longest = max(run.lanes.end - run.lanes.start for run in runs)
    if window is not None and window[0] >= longest:
        raise ConfigError(
            f"--seconds must begin before the end of the runs, at {longest:.1f} s, "
            f"got {window[0]}; choose an earlier window"
        )
    part = "" if window is None else " in the whole run"
    panels = [
        (
            run.name,
            f"{run.metrics.schedule}, bubble {percent(run.metrics.run.bubble)}{part}",
            run.lanes,
        )
        for run in runs
    ]
    return timelines(panels, title=look.title, scheme=look.scheme, window=window)


def bubble_picture(runs: Sequence[Run], look: Look, *, per: Per = "round") -> str:
    """The idle share of the slots per round or group."""
    if per == "round":
        lines = [[figures.bubble for figures in run.metrics.rounds] for run in runs]
    else:
        lines = [[group.figures.bubble for group in run.metrics.groups] for run in runs]
    chart = LineChart(
        title=f"Bubble per {per}: idle share of the slots",
        x_label=per,
        y_label="bubble",
        lines=tuple(map(counted, lines)),
        is_share=True,
    )
    return _curves(runs, chart, look=look)


def learning_picture(runs: Sequence[Run], look: Look, *, by: By = "answers") -> str:
    """The score on held-out prompts against answers, seconds or updates."""
    chart = score_chart(runs, by=by)
    if chart.is_empty:
        raise ConfigError(
            "plot learning needs a run with held-out scores, but none of these has any; "
            "train with [evaluation] tasks, or plot rewards, lengths or bubble"
        )
    return _curves(runs, chart, look=look)


def rewards_picture(runs: Sequence[Run], look: Look) -> str:
    """The mean reward of each update."""
    chart = reward_chart(runs)
    if chart.is_empty:
        raise ConfigError(
            "plot rewards needs a run with rewards, but none of these has any; "
            "simulated runs have none: plot lengths or bubble"
        )
    return _curves(runs, chart, look=look)


def lengths_picture(runs: Sequence[Run], look: Look) -> str:
    """The mean answer length of each update."""
    return _curves(runs, length_chart(runs), look=look)


def pareto_picture(runs: Sequence[Run], look: Look) -> str:
    """Final score against seconds; without scores, speed against staleness."""
    if all(run.scores for run in runs):
        values = [(run.metrics.run.seconds, 100 * run.scores[-1].score) for run in runs]
        x_label, y_label = "seconds of training", "final accuracy, %"
    else:
        figures = [run.metrics.run for run in runs]
        values = [(part.mean_staleness, part.trained_per_second) for part in figures]
        x_label, y_label = "mean staleness, versions", "trained tokens per second"
    points = [
        Point(x=x, y=y, label=_described(run), on_front=not _is_beaten((x, y), values))
        for run, (x, y) in zip(runs, values, strict=True)
    ]
    return pareto(
        points,
        x_label=x_label,
        y_label=y_label,
        title=look.title or f"{len(runs)} runs: {y_label.partition(',')[0]} against {x_label}",
        scheme=look.scheme,
        names_all=True,
        is_cropped=True,
    )


def _curves(runs: Sequence[Run], chart: LineChart, *, look: Look) -> str:
    drawn = seed_series(seed_groups([run.record for run in runs]), chart.lines)
    labelled = [
        replace(line, note=f"{line.note}, band: minimum to maximum") if line.band else line
        for line in drawn
    ]
    return curves(
        labelled,
        x_label=chart.x_label,
        y_label=chart.y_label,
        title=look.title or chart.title,
        is_share=chart.is_share,
        scheme=look.scheme,
    )


def _closing_second(run: Run, groups: int) -> float:
    """When this many groups are trained; the last close if there are fewer."""
    closed = 0
    for event in run.record.events:
        if isinstance(event, Update):
            closed += len(event.closed)
            if closed >= groups:
                return event.seconds - run.lanes.start
    return run.lanes.end - run.lanes.start


def _described(run: Run) -> str:
    schedule = run.metrics.schedule
    return run.name if schedule in run.name else f"{run.name}: {schedule}"


def _is_beaten(point: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Whether another point costs no more, gives no less, and is strictly better in one."""
    return any(x <= point[0] and y >= point[1] and (x, y) != point for x, y in others)


def png(svg: str, *, width: int) -> bytes:
    """The picture as PNG, `width` pixels wide."""
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigError(f"the width of a PNG must lie in 1..{MAX_WIDTH} pixels, got {width}")
    renderer = _renderer()
    font = _font(renderer)
    drawn: bytes = renderer.svg_to_bytes(
        svg_string=svg, width=width, sans_serif_family=font, font_family=font
    )
    return drawn


def _renderer() -> ModuleType:
    try:
        import resvg_py
    except ImportError as error:
        raise ConfigError(
            "a .png needs the package resvg_py, which is not installed; "
            "write an .svg, or run: pip install 'sortedrl[plot]'"
        ) from error
    return resvg_py


def _font(renderer: ModuleType) -> str:
    """The first installed font."""
    otherwise = renderer.svg_to_bytes(svg_string=_WORD, sans_serif_family=_NO_FONT)
    for name in FONTS:
        # an unknown name renders like any other unknown name: in a fallback font, or blank
        if renderer.svg_to_bytes(svg_string=_WORD, sans_serif_family=name) != otherwise:
            return name
    if otherwise != renderer.svg_to_bytes(svg_string=_SHEET.format("")):
        return FONTS[0]
    raise ConfigError(
        "a .png needs a font for its text, but none of these is installed: "
        f"{', '.join(FONTS)}; install one (the Debian package fonts-dejavu has one), "
        "or write an .svg"
    )


WIDTH = 860
"""Width of every SVG in pixels; a PNG is twice as wide by default."""

Kind = Literal["slots", "bubble", "learning", "rewards", "lengths", "pareto"]

HELP = """Draw runs as SVG or PNG, for docs and papers.

  sortedrl plot slots runs/sync runs/sorted --groups 2 --out slots.svg
  sortedrl plot slots events.jsonl --seconds 100 160 --out zoom.png
  sortedrl plot bubble runs/* --per group --out bubble.svg
  sortedrl plot learning runs/* --by seconds --out learning.svg
  sortedrl plot pareto runs/* --out pareto.png --scheme dark --width 2400

slots: slot timelines; bubble: idle share of the slots; learning: score on held-out prompts;
rewards, lengths: means of each update; pareto: cost against gain, with the Pareto front.
Runs that differ only in the seed are drawn as one line with a band, from minimum to maximum.
An SVG follows the reader's theme unless --scheme fixes it. PNG: pip install 'sortedrl[plot]'.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to draw, and how."""

    kind: tyro.conf.Positional[Kind]
    """What to draw."""
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or their events.jsonl."""
    out: Path
    """The picture to write: .svg or .png."""
    title: str = ""
    """Title, instead of the default one."""
    scheme: Scheme = "auto"
    """Colours: light, dark, or the reader's theme (auto; a PNG is then light)."""
    width: int | None = None
    """PNG: width in pixels; by default 1720, twice that of the SVG."""
    seconds: tuple[float, float] | None = None
    """slots: draw only this time window, in seconds of the run."""
    groups: int | None = None
    """slots: draw until this many prompt groups are trained."""
    per: Per | None = None
    """bubble: one value per round or per group; by default per round."""
    by: By | None = None
    """learning: the x axis; by default answers."""


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
    with os_errors(given.out, "cannot be written"):
        write_whole(given.out, content)
    tell(f"wrote {given.out}")


def _check(given: Arguments) -> None:
    """Check the options before anything is read."""
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
                raise ConfigError(f"--{flag} is for {kind}, got it with {given.kind}")
    if given.seconds is not None and given.groups is not None:
        raise ConfigError("give --seconds or --groups, not both")
    if given.groups is not None and given.groups < 1:
        raise ConfigError(f"--groups must be at least 1, got {given.groups}")
    if given.width is not None and not 1 <= given.width <= MAX_WIDTH:
        raise ConfigError(f"--width must lie in 1..{MAX_WIDTH} pixels, got {given.width}")
    if given.seconds is not None and not 0 <= given.seconds[0] < given.seconds[1]:
        first, last = given.seconds
        raise ConfigError(f"--seconds must be two numbers, 0 <= first < second, got {first} {last}")


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
