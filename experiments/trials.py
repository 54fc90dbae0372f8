"""Runs the trials of a table, one after another or in parallel, within a time budget.

A trial is started only if it is expected to finish within the budget, so that no machine time is
wasted on a run that will be killed. Finished trials are never repeated.
"""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.record import Record, Results, machine
from sortedrl.config.checks import require

ROOT = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run with one result."""

    name: str
    seconds: float
    """Expected time."""
    run: Callable[[], Mapping[str, Any]]
    """Measures, and returns the numbers as JSON values."""
    opens: str | None = None
    """What it shares with other trials, such as a model and its engine; the first one opens it."""
    opening_seconds: float = 0.0
    """Expected time of opening it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a table is measured, and where results go."""

    table: str
    device: str
    is_small: bool
    settings: Mapping[str, Any]
    """The table's TOML, merged with its section `small` if requested."""
    results: Results
    scratch: Path
    """Folder for logs and models."""
    changes: tuple[str, ...] = ()
    """Overrides given with `--set`."""
    commit: str = "unknown"
    """Commit of the tree at the start."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the time budget."""

    at: float | None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """`seconds` from now; `None` for no limit."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    def has_room_for(self, seconds: float) -> bool:
        """Whether work of this duration would end in time."""
        return self.at is None or time.monotonic() + seconds <= self.at


def run_in_turn(
    trials: Sequence[Trial], setup: Setup, *, deadline: Deadline, tell: Callable[[str], None]
) -> list[str]:
    """Run trials one after another; returns the names of those skipped for lack of time."""
    left = []
    opened: set[str | None] = {None}
    for trial in trials:
        expected = trial.seconds + (0 if trial.opens in opened else trial.opening_seconds)
        if not deadline.has_room_for(expected):
            left.append(trial.name)
            continue
        tell(f"{setup.table}: {trial.name}, about {expected:,.0f} s")
        opened.add(trial.opens)
        began = time.monotonic()
        numbers = trial.run()
        seconds = time.monotonic() - began
        setup.results.write(_record(setup, trial.name, numbers=numbers, seconds=seconds))
        tell(f"{setup.table}: {trial.name} took {seconds:,.1f} s")
    return left


def run_at_once(
    trials: Sequence[Trial],
    setup: Setup,
    *,
    most: int,
    command: Callable[[str], Sequence[str]],
    deadline: Deadline,
    tell: Callable[[str], None],
) -> list[str]:
    """Run up to `most` trials in parallel, each in its own process.

    `command` returns the command line of one trial. Returns the names of trials skipped for lack
    of time; raises after all have ended if one failed.
    """
    left, failed = [], []
    waiting, running = list(trials), dict[str, subprocess.Popen[bytes]]()
    setup.scratch.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                tell(f"{setup.table}: {name} {'is done' if code == 0 else f'failed ({code})'}")
                failed += [name] if code else []
            while waiting and len(running) < most:
                trial = waiting.pop(0)
                if deadline.has_room_for(trial.seconds):
                    running[trial.name] = _started(command(trial.name), setup, trial.name)
                else:
                    left.append(trial.name)
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


def _record(setup: Setup, trial: str, *, numbers: Mapping[str, Any], seconds: float) -> Record:
    return Record(
        table=setup.table,
        trial=trial,
        command=_command(setup),
        commit=setup.commit,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine(setup.device),
        seconds=round(seconds, 2),
        numbers=numbers,
    )


def _command(setup: Setup) -> str:
    """The command line that repeats the measurement."""
    words = ["python", "-m", "experiments", setup.table, "--device", setup.device]
    words += ["--small"] if setup.is_small else []
    # Local paths mean nothing to a reader.
    changes = [change for change in setup.changes if "/" not in change]
    return shlex.join([*words, *(["--set", *changes] if changes else [])])


def this_command(*words: str) -> list[str]:
    """The command line of a child process of this program."""
    return [sys.executable, "-m", "experiments", *words]


def assigned(assignment: str) -> dict[str, Any]:
    """Parse a dotted assignment into nested tables.

    >>> assigned("workload.seed=1")
    {'workload': {'seed': 1}}
    """
    name, equals, value = assignment.partition("=")
    require(bool(equals and name), f"--set takes name=value, got {assignment!r}")
    try:
        read: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        read = value
    for key in reversed(name.split(".")):
        read = {key: read}
    table: dict[str, Any] = read
    return table


def merged(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; values of `part` override those of `whole`.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(whole)
    for name, value in part.items():
        old = result.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            result[name] = merged(old, value)
        else:
            result[name] = value
    return result
