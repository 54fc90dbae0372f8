"""Rows of reasoning-gym: any of its tasks by name, generated from a seed.

The same settings always give the same rows. Some tasks of the library iterate over a set, whose
order differs between Python processes, so entries are generated in a child process with a fixed
hash seed. One task adds today's date to a time of day; it is removed.

The library seeds its entries with `seed + index`, so its seeds 0 and 1 share all entries but one;
our seeds are hashed first, so rows of two seeds differ.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import asdict, dataclass, fields
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sortedrl.config.checks import require
from sortedrl.config.parsing import options_from
from sortedrl.core.randomness import mix
from sortedrl.data.rows import Row
from sortedrl.errors import ConfigError, SortedRLError, unknown_name
from sortedrl.rewards.gym import packed, rule_of, unpacked

INSTRUCTION = (
    "Think it through first. Then give the final answer, and nothing else, inside "
    "<answer></answer>, in the form that was asked for."
)
_SEED_KEY = 0x67796D
_OURS = ("size", "seed")
_MOST_DRAWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GymSettings:
    """One task of reasoning-gym."""

    name: str = "countdown"
    """The name of the task in the library."""
    count: int = 100
    """Number of rows."""
    seed: int = 0
    """Seed of the rows."""
    options: tuple[str, ...] = ()
    """Options of the task, written name=value, such as min_numbers=3; values are JSON, and
    anything else is text."""
    instruction: str = INSTRUCTION
    """Text appended to the question; may be empty."""

    def __post_init__(self) -> None:
        require(self.count >= 1, f"gym.count must be at least 1, got {self.count}")
        options_from(self.options)


def gym_rows(settings: GymSettings) -> list[Row]:
    """The rows of these settings, generated in a child process."""
    _dataset(settings, options_from(settings.options))  # invalid settings are refused at once
    return _rows(_child_entries(settings), settings)


def _child_entries(settings: GymSettings) -> list[dict[str, Any]]:
    """The entries, generated in a child process with a fixed hash seed."""
    path = [str(Path(part).absolute()) for part in sys.path]  # also "", which is this folder
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(path=path)],
        input=json.dumps(asdict(settings)),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise ConfigError(
            f"reasoning-gym cannot generate {settings.count} rows of {settings.name} with these "
            f"options: {said[-1]}; change gym.options, or use another task"
        )
    result = json.loads(done.stdout)
    if "refused" in result:
        raise ConfigError(result["refused"])
    return [_unpacked_entry(entry) for entry in result["entries"]]


_CHILD = "import sys; sys.path[:] = {path!r}; from sortedrl.data.gym import be_child; be_child()"


def be_child() -> None:
    """Main function of the child process: settings on standard input, entries on output."""
    given = json.load(sys.stdin)
    settings = GymSettings(**{**given, "options": tuple(given["options"])})
    random.seed(settings.seed)
    try:
        answer: dict[str, object] = {"entries": [packed(entry) for entry in _entries(settings)]}
    except SortedRLError as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer))


def _unpacked_entry(entry: object) -> dict[str, Any]:
    found = unpacked(entry)
    assert isinstance(found, dict)
    return found


def _entries(settings: GymSettings) -> list[Mapping[str, Any]]:
    dataset = _dataset(settings, options_from(settings.options))
    # One task prints dots, and one runs programs that write files to the current folder.
    with redirect_stdout(StringIO()), TemporaryDirectory() as folder, chdir(folder):
        entries = list(_fair_entries(dataset, settings))
    if settings.name == "time_intervals":
        for entry in entries:
            _remove_today(entry["metadata"])
    return entries


def _remove_today(metadata: dict[str, Any]) -> None:
    """Remove the date where the question has only a time of day."""
    if metadata["task_type"].startswith("time"):
        for name in ("start_time", "end_time"):
            metadata[name] = metadata[name].partition(" ")[2]


def _fair_entries(dataset: Any, settings: GymSettings) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401
    """The first entries that have a right answer."""
    is_fair = rule_of(settings.name).is_fair
    if is_fair is None:
        yield from (dataset[number] for number in range(settings.count))
        return
    drawn = (dataset[number] for number in range(_MOST_DRAWS * settings.count + _MOST_DRAWS))
    entries = list(islice(filter(is_fair, drawn), settings.count))
    require(
        len(entries) == settings.count,
        f"gym.options must give {settings.name} rows that have a right answer, but "
        f"only {len(entries)} of {_MOST_DRAWS * settings.count + _MOST_DRAWS} had one; "
        "change the options",
    )
    yield from entries


def _dataset(settings: GymSettings, options: Mapping[str, object]) -> Any:  # noqa: ANN401
    name = settings.name
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"the task {name} needs reasoning-gym; pip install 'sortedrl[gym]'"
        ) from error
    # A composite takes other tasks as options: combine the rows of several settings instead.
    names = sorted(set(DATASETS) - {"composite"})
    require(name in names, unknown_name("reasoning-gym task", name, names))
    rule_of(name)
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in _OURS]
    for option in options:
        require(option in known, f"{name}: {unknown_name('option', option, known)}")
    seed = mix(_SEED_KEY, settings.seed) >> 33  # the library wants 32 bits, and adds to it
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=settings.count, **options)
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{option}={value}" for option, value in options.items()) or "none"
        raise ConfigError(
            f"reasoning-gym refuses the options of {name}: {error}; given: {given}"
        ) from error


def _rows(entries: Sequence[Mapping[str, Any]], settings: GymSettings) -> list[Row]:
    options = options_from(settings.options)
    return [
        _row(entry, number, settings=settings, options=options)
        for number, entry in enumerate(entries)
    ]


def _row(
    entry: Mapping[str, Any],
    number: int,
    *,
    settings: GymSettings,
    options: Mapping[str, object],
) -> Row:
    question = entry["question"].strip()
    content = f"{question}\n\n{settings.instruction}" if settings.instruction else question
    found: dict[str, object] = {
        "task": settings.name,
        "options": packed(options),
        "entry": packed(entry),
    }
    # Some tasks have many right answers, and no gold.
    if entry["answer"] is not None:
        found["answer"] = entry["answer"]
    for level in _levels(entry["metadata"].get("difficulty")):
        found["level"] = level
    return Row(
        prompt=({"role": "user", "content": content},),
        fields=found,
        place=f"reasoning_gym/{settings.name}, seed {settings.seed}: {number + 1}",
        question=question,
    )


def _levels(difficulty: object) -> Iterator[float]:
    """The difficulty of the entry, if the library gives it as a number."""
    if isinstance(difficulty, Mapping):
        difficulty = difficulty.get("difficulty")
    if isinstance(difficulty, int | float):
        yield difficulty
