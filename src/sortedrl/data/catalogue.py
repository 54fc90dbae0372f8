"""All tasks by name: a spec such as `gsm8k:split=train` becomes rows with their reward.

knights_knaves    generated puzzles                people=3-7,count=1000,seed=0,split=train
logic_rl          the published puzzles            path=FOLDER,split=train
gsm8k, math, math500, aime24, amc23, minerva, olympiadbench, svamp, asdiv, mawps
                  maths questions                  split=train
reasoning_gym     a task of reasoning-gym          name=countdown,count=100
rows.jsonl        a file of the user (.jsonl, .json, .parquet)
owner/name        a data set of the user by its hub name, or its folder: split=train

If a spec names no split, training uses train and evaluation uses test. A set without that split is
refused, so that nobody trains on test rows by accident.

Held-out rows must not overlap the training rows. Rows are compared by their questions, ignoring
white space, system message and appended instruction, and the names of people in puzzles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from sortedrl.config.checks import is_utf8, require
from sortedrl.config.data import DataSettings
from sortedrl.config.parsing import parsed, settings_from
from sortedrl.data.gym import GymSettings, gym_rows
from sortedrl.data.knights_puzzle import Split, canonical_key, parse_puzzle
from sortedrl.data.knights_rows import MAX_PEOPLE, KnightsSettings, knights_rows, published_rows
from sortedrl.data.maths import MATHS_SETS, MathsSettings, maths_rows
from sortedrl.data.rows import SUFFIXES, Row, read_hub, read_records, rows_of, with_system
from sortedrl.errors import ConfigError, DataError, unknown_name
from sortedrl.rewards.functions import OBJECT, RewardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rows and their reward under one name."""

    name: str
    rows: Sequence[Row]
    reward: RewardSource
    correct_from: float = 1.0
    """Lowest reward of a right answer, if the reward has no part `correct`."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of two tasks with the same question: their indices in each, from 0."""

    trained: frozenset[int]
    asked: tuple[int, ...]


def shared_rows(trained: Sequence[Row], asked: Sequence[Row]) -> SharedRows:
    """The training rows that also occur in an evaluation, and vice versa."""
    places: dict[str, list[int]] = {}
    for number, row in enumerate(trained):
        for key in _keys(row):
            places.setdefault(key, []).append(number)
    found: set[int] = set()
    again = []
    for number, row in enumerate(asked):
        duplicates = [place for key in _keys(row) for place in places.get(key, ())]
        if duplicates:
            again.append(number)
            found.update(duplicates)
    return SharedRows(frozenset(found), tuple(again))


def _keys(row: Row) -> Iterator[str]:
    """The normalised questions of a row, by which duplicates are found."""
    if isinstance(row.prompt, str):
        yield _spaced(row.prompt)
    else:
        said = [message for message in row.prompt if message["role"] != "system"]
        while said and said[-1]["role"] == "assistant":  # the beginning of an answer
            said.pop()
        yield _spaced("\n".join(message["content"] for message in said))
    if row.question is not None:
        yield _spaced(row.question)
    statements = row.fields.get("statements")
    if isinstance(statements, str):
        try:
            puzzle = parse_puzzle(statements)
        except ValueError:
            return  # a column of the user with the same name
        if puzzle.people <= MAX_PEOPLE:
            yield canonical_key(puzzle)


def _spaced(text: str) -> str:
    """The text with single spaces; case is kept, since it matters in compact puzzles."""
    return " ".join(text.split())


REWARDS: Mapping[str, RewardSource] = MappingProxyType(
    {
        "logic": RewardSource("sortedrl.rewards.knights:logic_reward"),
        "compact": RewardSource("sortedrl.rewards.knights:logic_reward", {"is_compact": True}),
        "maths": RewardSource("sortedrl.rewards.maths:math_reward"),
        "reasoning_gym": RewardSource("sortedrl.rewards.gym:gym_reward"),
        "code": RewardSource("sortedrl.rewards.code:code_reward"),
        "judge": RewardSource("sortedrl.rewards.judge:judge_reward"),
    }
)
"""The rewards of the built-in tasks, by short names."""

TASKS = ("knights_knaves", "logic_rl", *MATHS_SETS, "reasoning_gym")
"""The built-in tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSettings:
    """Published Knights-and-Knaves puzzles in Parquet files."""

    path: Path
    """A file, or a folder with files at any depth."""
    split: Split | None = None
    """In a folder, skip files whose names start with another split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """A data set of the `datasets` library."""

    split: str = "train"
    """The split to load."""
    subset: str | None = None
    """The subset to load."""


def open_task(
    spec: str,
    *,
    split: Split | None = None,
    folder: Path | None = None,
    reward: RewardSource | None = None,
    data: DataSettings | None = None,
    advance: Callable[[float], None] | None = None,
) -> Task:
    """Open the task of a spec.

    `split` is used if the spec names none, and refused if the set does not have it; by default it
    is `train` if there is one. `folder` has the files of the maths sets and of the published
    puzzles. `reward` replaces the reward of the task; rows of the user need one. `data` names the
    columns of the user's rows, and a system message for all prompts. `advance` receives the share
    of the rows that are generated.
    """
    require(is_utf8(spec), f"a task must be written in UTF-8, got {spec!a}; rename the file")
    data = data if data is not None else DataSettings()
    is_file = spec.lower().endswith(SUFFIXES) and Path(spec).is_file()
    name, options = (spec, {}) if is_file else parsed(spec)
    if name in TASKS:
        task = _built_in(spec, name, options, split=split, folder=folder, advance=advance)
        task = task if reward is None else replace(task, reward=reward)
    else:
        task = _own(spec, name, options, split=split, reward=reward, data=data)
    if not task.rows:
        raise DataError(spec, "must hold at least one row, has none; check the path and the split")
    if data.system is None:
        return task
    return replace(task, rows=[with_system(row, data.system) for row in task.rows])


def reward_from(address: str) -> RewardSource:
    """A reward by its short name or by its address."""
    if address in REWARDS:
        return REWARDS[address]
    if address.startswith(OBJECT):
        raise ConfigError(
            f"the reward of this run was the Python object {address.removeprefix(OBJECT)!r}, which "
            "exists only in the process that created it; in Python, pass it again: "
            "sortedrl.Run(FOLDER, reward=...).resume()"
        )
    if ":" not in address and not address.endswith(".py"):
        raise ConfigError(
            unknown_name("reward", address, REWARDS)
            + "; or give my_module:my_function or my_file.py:my_function"
        )
    return RewardSource(address)


def described() -> Iterator[tuple[str, str]]:
    """Every built-in task with one line about it."""
    yield "knights_knaves", "generated puzzles of 2 to 8 people, train and test never overlap"
    yield "logic_rl", "the published puzzles, 3 to 7 people, from Parquet files"
    for name, found in MATHS_SETS.items():
        yield name, f"maths questions, {' and '.join(found.hub_splits)} ({found.hub})"
    yield "reasoning_gym", "any task of reasoning-gym by its name"


def _own(
    spec: str,
    name: str,
    options: Mapping[str, str],
    *,
    split: Split | None,
    reward: RewardSource | None,
    data: DataSettings,
) -> Task:
    """Rows of the user."""
    if name.lower().endswith(SUFFIXES) or Path(name).is_file():
        require(not options, f"task {spec!r}: a file has no options")
        records = read_records(Path(name))
    elif "/" in name or Path(name).is_dir():
        hub = settings_from(HubSettings, {"split": split or "train", **options}, spec=spec)
        records = read_hub(name, subset=hub.subset, split=hub.split)
    else:
        raise ConfigError(
            unknown_name("task", name, TASKS)
            + f"; or give a file ({', '.join(SUFFIXES)}) or a hub name (owner/name)"
        )
    if reward is None:
        raise ConfigError(
            f"task {spec!r} has your own rows, which need a reward: give "
            f"my_module:my_function, my_file.py:my_function or one of {', '.join(REWARDS)}"
        )
    return Task(name=spec, rows=list(rows_of(records, data)), reward=reward)


def _built_in(
    spec: str,
    name: str,
    options: Mapping[str, str],
    *,
    split: Split | None,
    folder: Path | None,
    advance: Callable[[float], None] | None,
) -> Task:
    if split is not None and name in ("knights_knaves", "logic_rl"):
        options = {"split": split, **options}
    if name == "knights_knaves":
        knights = settings_from(KnightsSettings, options, spec=spec)
        reward = REWARDS["compact" if knights.style == "compact" else "logic"]
        rows = knights_rows(knights, advance=advance)
        return Task(name=spec, rows=rows, reward=reward)
    if name == "logic_rl":
        if "path" not in options and folder is not None:
            options = {**options, "path": str(folder / "kk_logic_rl")}
        if "path" not in options:
            raise ConfigError("task logic_rl needs the path of its files: logic_rl:path=FOLDER")
        published = settings_from(PublishedSettings, options, spec=spec)
        rows = published_rows(published.path, split=published.split)
        return Task(name=spec, rows=rows, reward=REWARDS["logic"])
    if name == "reasoning_gym":
        gym = settings_from(GymSettings, options, spec=spec)
        return Task(name=spec, rows=gym_rows(gym), reward=REWARDS["reasoning_gym"])
    if "folder" in options:
        folder = Path(options["folder"])
    elif folder is not None:
        options = {"folder": str(folder), **options}
    if "split" not in options:
        options = {"split": _maths_split(spec, name, split, folder=folder), **options}
    maths = settings_from(MathsSettings, options, spec=spec, name=name)
    return Task(name=spec, rows=maths_rows(maths), reward=REWARDS["maths"])


def _maths_split(spec: str, name: str, split: Split | None, *, folder: Path | None) -> str:
    """The split of a maths set if none is named."""
    found = MATHS_SETS[name]
    splits = found.hub_splits if folder is None else found.files
    if split is None:
        return next(iter(splits))  # train comes first
    if split in splits:
        return split
    other = next(iter(splits))
    where = "" if folder is None or split not in found.hub_splits else f" in {folder}"
    hub = f", leave out the folder ({found.hub} on the hub has one)" if where else ""
    if split == "train":
        raise ConfigError(
            f"task {spec!r}: training uses the split 'train', and {name} has none{where}, only "
            f"rows for evaluation; train on another set, such as gsm8k or math{hub}, or write "
            f"{name}:split={other} to train on its test rows anyway"
        )
    raise ConfigError(
        f"task {spec!r}: evaluation uses the split 'test', and {name} has none{where}; evaluate "
        f"on another set, such as gsm8k or math500{hub}, or write {name}:split={other}"
    )
