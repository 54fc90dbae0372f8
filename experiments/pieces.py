"""The pieces of a table, one after another or several at once, within the time there is.

A piece is begun only if it is expected to end within the budget, so that what a lent machine has
left is not spent on a run that will be cut. What is done is never done again.
"""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.machine import machine
from experiments.record import Record, Results

ROOT = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One run with one result."""

    name: str
    seconds: float
    """How long it is expected to take."""
    run: Callable[[], Mapping[str, Any]]
    """Measures; gives the numbers, which JSON can hold."""
    opens: str | None = None
    """What it shares with others, such as a model and its engine: the first of them opens it."""
    opening_seconds: float = 0.0
    """How long that is expected to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where and how a table is measured."""

    table: str
    device: str
    is_small: bool
    settings: Mapping[str, Any]
    """The table's TOML, with its section `small` laid over it where that is asked for."""
    results: Results
    scratch: Path
    """For logs and runs that the result does not hold."""
    changes: tuple[str, ...] = ()
    """What `--set` has replaced."""
    commit: str = "unknown"
    """Of the tree as it was at the start."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the time is used up."""

    at: float | None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """So many seconds from now; never if none are given."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    def has_room_for(self, seconds: float) -> bool:
        """Whether what takes so long would end in time."""
        return self.at is None or time.monotonic() + seconds <= self.at


def run_in_turn(
    pieces: Sequence[Piece], setup: Setup, *, deadline: Deadline, tell: Callable[[str], None]
) -> list[str]:
    """Measure one piece after another; gives the names of those there was no time for."""
    left = []
    opened: set[str | None] = {None}
    for piece in pieces:
        expected = piece.seconds + (0 if piece.opens in opened else piece.opening_seconds)
        if not deadline.has_room_for(expected):
            left.append(piece.name)
            continue
        tell(f"{setup.table}: {piece.name}, about {expected:,.0f} s")
        opened.add(piece.opens)
        began = time.monotonic()
        numbers = piece.run()
        seconds = time.monotonic() - began
        setup.results.write(_record(setup, piece.name, numbers=numbers, seconds=seconds))
        tell(f"{setup.table}: {piece.name} took {seconds:,.1f} s")
    return left


def run_at_once(
    pieces: Sequence[Piece],
    setup: Setup,
    *,
    most: int,
    command: Callable[[str], Sequence[str]],
    deadline: Deadline,
    tell: Callable[[str], None],
) -> list[str]:
    """Measure up to `most` pieces at the same time, each in a process of its own.

    `command` gives the command line that measures one piece. Gives the names of the pieces that
    there was no time for; raises if one failed, when all others have ended.
    """
    left, failed = [], []
    waiting, running = list(pieces), dict[str, subprocess.Popen[bytes]]()
    setup.scratch.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                tell(f"{setup.table}: {name} {'is done' if code == 0 else f'failed ({code})'}")
                failed += [name] if code else []
            while waiting and len(running) < most:
                piece = waiting.pop(0)
                if deadline.has_room_for(piece.seconds):
                    running[piece.name] = _started(command(piece.name), setup, piece.name)
                else:
                    left.append(piece.name)
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.terminate()
    if failed:
        names = ", ".join(failed)
        raise RuntimeError(f"{names} failed: see {setup.scratch}/{failed[0]}.log")
    return left


def _started(command: Sequence[str], setup: Setup, name: str) -> subprocess.Popen[bytes]:
    with (setup.scratch / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def _record(setup: Setup, piece: str, *, numbers: Mapping[str, Any], seconds: float) -> Record:
    return Record(
        table=setup.table,
        piece=piece,
        command=_command(setup),
        commit=setup.commit,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine(setup.device),
        seconds=round(seconds, 2),
        numbers=numbers,
    )


def _command(setup: Setup) -> str:
    """What a reader types to measure the same."""
    words = ["python", "-m", "experiments", setup.table, "--device", setup.device]
    words += ["--small"] if setup.is_small else []
    # Where a file lies says nothing to a reader.
    changes = [change for change in setup.changes if "/" not in change]
    return shlex.join([*words, *(["--set", *changes] if changes else [])])


def this_command(*words: str) -> list[str]:
    """The command line of another process of this program."""
    return [sys.executable, "-m", "experiments", *words]
