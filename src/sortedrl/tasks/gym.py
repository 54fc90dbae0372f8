"""Rows of reasoning-gym: any of its tasks by name, generated from a seed.

The same settings give the same rows. The library numbers its entries `seed + index`, so that its
seeds 0 and 1 share all entries but one; ours are spread out, and rows of two seeds differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, fields
from io import StringIO
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

from sortedrl.config.checks import require
from sortedrl.config.spec import options_from
from sortedrl.core.randomness import mix
from sortedrl.data.rows import Row
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.rewards.gym import packed, rule_of

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
    """The task, by the library's name for it."""
    count: int = 100
    """How many rows."""
    seed: int = 0
    """Another seed gives other rows."""
    options: tuple[str, ...] = ()
    """Options of the task, written name=value, such as min_numbers=3; values are JSON, and what is
    no JSON is text."""
    instruction: str = INSTRUCTION
    """What is asked after the question; empty for nothing."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.count >= 1, f"gym.count must be at least 1, got {self.count}")
        options_from(self.options)


def gym_rows(settings: GymSettings) -> list[Row]:
    """The rows of these settings."""
    options = options_from(settings.options)
    dataset = _dataset(settings, options)
    # One of the tasks prints dots, and one runs programs that write files where they are run.
    with redirect_stdout(StringIO()), TemporaryDirectory() as folder, chdir(folder):
        entries = list(_entries(dataset, settings))
    return [
        _row(entry, number, settings=settings, options=options)
        for number, entry in enumerate(entries)
    ]


def _entries(dataset: Any, settings: GymSettings) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401
    """The first entries that have a right answer."""
    is_fair = rule_of(settings.name).is_fair
    if is_fair is None:
        yield from (dataset[number] for number in range(settings.count))
        return
    drawn = (dataset[number] for number in range(_MOST_DRAWS * settings.count + _MOST_DRAWS))
    entries = list(islice(filter(is_fair, drawn), settings.count))
    require(
        len(entries) == settings.count,
        f"gym.options must give {settings.name} rows that have a right answer; "
        f"{len(entries)} of {_MOST_DRAWS * settings.count + _MOST_DRAWS} had one; "
        "change the options",
    )
    yield from entries


def _dataset(settings: GymSettings, options: Mapping[str, object]) -> Any:  # noqa: ANN401
    """The library's generator of the task."""
    name = settings.name
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"the task {name} needs reasoning-gym; pip install 'sortedrl[gym]'"
        ) from error
    # A composite has other tasks for options: join the rows of several settings instead.
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
    """How hard the entry is, if the library says it in a number; mostly it repeats the options."""
    if isinstance(difficulty, Mapping):
        difficulty = difficulty.get("difficulty")
    if isinstance(difficulty, int | float):
        yield difficulty
