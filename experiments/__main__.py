"""`python -m experiments TABLE`: measure a table, or write the page of all of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.pieces import (
    ROOT,
    Deadline,
    Piece,
    Setup,
    run_at_once,
    run_in_turn,
    this_command,
)
from experiments.record import Results
from experiments.settings import assigned, merged
from experiments.tables import TABLES
from sortedrl.cli.arguments import parse
from sortedrl.config.checks import require
from sortedrl.config.parsing import read_toml
from sortedrl.errors import ConfigError, SortedRLError, unknown_name
from sortedrl.report.terminal import tell
from sortedrl.runs.folder import commit

HELP = """Measure a table of docs/results.md, piece by piece.

A piece that is done has its result under the folder of the results, and is not measured again:
after a cut, --resume goes on with the rest. What a laptop can do in minutes is measured with
--small on --device cpu.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure, and how long."""

    device: str = "cuda"
    """cuda or cpu."""
    small: bool = False
    """Smaller sizes, for a try on a laptop: the section [small] of the table's TOML."""
    resume: bool = False
    """Go on where results are there already."""
    only: tuple[str, ...] = ()
    """Pieces whose name contains one of these words; by default all."""
    budget: float | None = None
    """Seconds there are: a piece that is not expected to end in time is not begun."""
    results: Path = Path("runs/experiments/results")
    """Folder of the results."""
    scratch: Path = Path("runs/experiments/work")
    """Folder of the logs and models that the results do not hold."""
    settings: Path | None = None
    """Another TOML file than the table's own."""
    set: tuple[str, ...] = ()
    """Values that replace those of the TOML, such as workload.seed=1."""
    list: bool = False
    """Only say what would be measured, and how long it is expected to take."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code."""
    names = (*TABLES, "page")
    if not arguments or arguments[0] in ("-h", "--help"):
        tell(f"usage: python -m experiments {{{','.join(names)}}} [--help]")
        return 0 if arguments else 2
    table, rest = arguments[0], arguments[1:]
    try:
        require(table in names, unknown_name("table", table, names))
        if table == "page":
            from experiments.page import main as write_page

            code: int = write_page(rest)
            return code
        description = f"{TABLES[table]}\n\n{HELP}"
        given = parse(
            Arguments, rest, prog=f"python -m experiments {table}", description=description
        )
        return _measure(table, given)
    except SortedRLError as error:
        tell(f"error: {error}")
        return 1


def _measure(table: str, given: Arguments) -> int:
    setup = Setup(
        table=table,
        device=given.device,
        is_small=given.small,
        settings=_settings(table, given),
        results=Results(given.results),
        scratch=given.scratch / table,
        changes=given.set,
        commit=commit(ROOT) or "unknown",
    )
    pieces = chosen(importlib.import_module(f"experiments.{table}").pieces(setup), given.only)
    done = [piece.name for piece in pieces if setup.results.has(table, piece.name)]
    if given.list:
        for piece in pieces:
            first = f", {piece.opening_seconds:,.0f} s more for the first"
            note = f"about {piece.seconds:,.0f} s{first if piece.opening_seconds else ''}"
            tell(f"{piece.name:<40} {'done' if piece.name in done else note}")
        return 0
    require(
        given.resume or not done,
        f"{setup.results.folder / table} has results of {len(done)} pieces already; continue with "
        "--resume, or give another folder (--results)",
    )
    waiting = [piece for piece in pieces if piece.name not in done]
    left = _run(waiting, setup, given)
    if left:
        tell(f"no time for {len(left)} pieces ({', '.join(left)}); continue with --resume")
    return 3 if left else 0


def _run(pieces: Sequence[Piece], setup: Setup, given: Arguments) -> list[str]:
    deadline = Deadline.after(given.budget)
    most = setup.settings.get("at_once", 1)
    if most <= 1 or len(pieces) == 1:
        return run_in_turn(pieces, setup, deadline=deadline, tell=tell)
    words = ["--device", given.device, "--resume", "--results", str(given.results)]
    words += ["--scratch", str(given.scratch), *(["--small"] if given.small else [])]
    words += [] if given.settings is None else ["--settings", str(given.settings)]
    words += ["--set", *given.set] if given.set else []
    return run_at_once(
        pieces,
        setup,
        most=most,
        command=lambda name: this_command(setup.table, *words, "--only", name),
        deadline=deadline,
        tell=tell,
    )


def _settings(table: str, given: Arguments) -> Mapping[str, Any]:
    path = ROOT / "experiments" / f"{table}.toml" if given.settings is None else given.settings
    settings = read_toml(path)
    small = settings.pop("small", None)
    if given.small and small is None:
        raise ConfigError(f"{path} has no section [small]; leave --small out")
    whole = merged(settings, small or {}) if given.small else settings
    for assignment in given.set:
        whole = merged(whole, assigned(assignment))
    return whole


def chosen(pieces: Sequence[Piece], words: Sequence[str]) -> list[Piece]:
    """The pieces of these names; a word that is no name stands for all names that contain it."""
    names = {piece.name for piece in pieces}
    exact, parts = {w for w in words if w in names}, [w for w in words if w not in names]
    found = [p for p in pieces if not words or p.name in exact or any(w in p.name for w in parts)]
    require(bool(found), f"no piece is called like {' or '.join(words)}; see --list")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
