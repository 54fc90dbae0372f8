"""Learning curves: the same warm start and the same prompts under several schedules.

A piece is one training run: an algorithm, an arm (a schedule) and a seed. The warm start of a seed
is made once and reused by all its arms; whoever comes first makes it, the others wait for it.
A run that was cut goes on from its checkpoint, and its clock with it.

The TOML of a table has the settings of `sortedrl sft` in [warm] and those of `sortedrl train` in
[train]; each of [algorithms.NAME] is laid over [train], each of [arms.NAME] over its schedule. An
algorithm that is not for all schedules names those it is for in `arms`.
A table without [warm] starts from `model`.
In texts {seed} stands for the seed, {rows} for the folder of the generated rows, which [sums.NAME]
and [questions.NAME] describe, {model} for `model`, and {root} for the folder of the project.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.arithmetic import SumSettings, sum_rows
from experiments.curves import run_numbers
from experiments.pieces import ROOT, Piece, Setup
from experiments.questions import QuestionSettings, question_rows
from experiments.settings import merged
from sortedrl.config.parsing import settings_over
from sortedrl.config.train import SupervisedSettings, TrainSettings
from sortedrl.core.files import read_metrics, write_whole
from sortedrl.errors import DataError
from sortedrl.runs.folder import RunFolder
from sortedrl.runs.start import train, warm_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run of a table."""

    algorithm: str
    name: str
    """The schedule, as the TOML calls it."""
    seed: int

    @property
    def piece(self) -> str:
        """The name of its piece."""
        return f"{self.algorithm}-{self.name}-{self.seed}"


def pieces(setup: Setup) -> list[Piece]:
    """The warm starts first, then the runs, those of a seed together.

    So runs that are compared have the same neighbours on the device.
    """
    seconds = setup.settings["seconds"]
    made = [
        Piece(name=f"warm-{seed}", seconds=seconds["warm"], run=partial(warm_numbers, setup, seed))
        for seed in setup.settings["seeds"]
        if "warm" in setup.settings
    ]
    for arm in arms(setup.settings):
        run = partial(arm_numbers, setup, arm)
        made.append(Piece(name=arm.piece, seconds=seconds["run"], run=run))
    return made


def arms(settings: Mapping[str, Any]) -> list[Arm]:
    """The runs of a table, in the order in which they are made."""
    return [
        Arm(algorithm=algorithm, name=name, seed=seed)
        for seed in settings["seeds"]
        for algorithm, laid_over in settings["algorithms"].items()
        for name in laid_over.get("arms", settings["arms"])
    ]


def warm_numbers(setup: Setup, seed: int) -> dict[str, Any]:
    """The warm start of a seed in numbers."""
    folder = warmed(setup, seed).parent
    rows = read_metrics(folder / "metrics.jsonl")
    tenth = rows[-max(1, len(rows) // 10) :]
    return {
        "kind": "warm",
        "seed": seed,
        "steps": len(rows),
        "tokens": sum(_number(row["tokens"]) for row in rows),
        "seconds": sum(_number(row["seconds"]) for row in rows),
        "loss": sum(_number(row["loss"]) for row in tenth) / len(tenth),
    }


def arm_numbers(setup: Setup, arm: Arm) -> dict[str, Any]:
    """A run in numbers: made, gone on with where it was cut, or only read where it is complete."""
    model = warmed(setup, arm.seed)
    settings = train_settings(setup, arm, model=model)
    folder = RunFolder(settings.out)
    # A run that came to its end has exported its model.
    if not folder.model.exists():
        _leave_uncompiled(setup)
        ending = train(settings, is_resumed=folder.holds_run)
        if ending.reason == "asked":
            raise KeyboardInterrupt
    return {
        "kind": "run",
        "algorithm": arm.algorithm,
        "arm": arm.name,
        "schedule": settings.schedule.name,
        "seed": arm.seed,
        "runs_at_once": setup.settings.get("at_once", 1),
        **run_numbers(settings.out, targets=setup.settings["targets"]),
    }


def train_settings(setup: Setup, arm: Arm, *, model: Path) -> TrainSettings:
    """The settings of a run that begins with this model."""
    given = setup.settings
    algorithm = {k: v for k, v in given["algorithms"][arm.algorithm].items() if k != "arms"}
    table = merged(given["train"], algorithm)
    table = merged(table, {"schedule": given["arms"][arm.name]})
    fixed = {
        "model": str(model),
        "out": str(setup.scratch / arm.piece),
        "seed": arm.seed,
        "device": setup.device,
    }
    table = filled(table, _places(setup, arm.seed)) | fixed
    return settings_over(TrainSettings(), table, path=_toml(setup))


def warm_settings(setup: Setup, seed: int) -> SupervisedSettings:
    """The settings of the warm start of a seed."""
    fixed = {"out": str(setup.scratch / f"warm-{seed}"), "seed": seed, "device": setup.device}
    table = filled(setup.settings["warm"], _places(setup, seed)) | fixed
    return settings_over(SupervisedSettings(), table, path=_toml(setup))


def warmed(setup: Setup, seed: int) -> Path:
    """The model that the runs of a seed start from; it and the rows are made where missing."""
    with _alone(setup.scratch / f"warm-{seed}.lock"):
        _write_rows(setup, seed)
        if "warm" not in setup.settings:
            return Path(setup.settings["model"])
        settings = warm_settings(setup, seed)
        folder = RunFolder(settings.out)
        is_done = settings.out / "is_done"
        if not is_done.exists():
            # One that was cut begins anew, and must not be taken for a second one.
            folder.config.unlink(missing_ok=True)
            _leave_uncompiled(setup)
            if not warm_start(settings).is_complete:
                raise KeyboardInterrupt
            write_whole(is_done, b"")
    return folder.model


def filled(table: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """The settings with their texts filled in.

    >>> filled({"model": "tiny:seed={seed}", "epochs": 2}, {"seed": "7"})
    {'model': 'tiny:seed=7', 'epochs': 2}
    """
    return {name: _filled(value, places) for name, value in table.items()}


def _filled(value: object, places: Mapping[str, str]) -> object:
    if isinstance(value, str):
        return value.format_map(places)
    if isinstance(value, Mapping):
        return filled(value, places)
    return [_filled(part, places) for part in value] if isinstance(value, list) else value


def _places(setup: Setup, seed: int) -> dict[str, str]:
    """What texts of the TOML can name."""
    return {
        "seed": str(seed),
        "rows": str(_rows_folder(setup, seed)),
        "model": setup.settings.get("model", ""),
        "root": str(ROOT),
    }


def _rows_folder(setup: Setup, seed: int) -> Path:
    return setup.scratch / f"rows-{seed}"


def _write_rows(setup: Setup, seed: int) -> None:
    """Generate the rows of a seed, where the table has any; `seed` in the TOML is added to it."""
    makers: dict[str, Callable[[dict[str, Any]], list[dict[str, object]]]] = {
        "sums": lambda given: sum_rows(SumSettings(**given)),
        "questions": lambda given: question_rows(QuestionSettings(**given)),
    }
    for kind, rows_of in makers.items():
        for name, given in setup.settings.get(kind, {}).items():
            path = _rows_folder(setup, seed) / f"{name}.jsonl"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                rows = rows_of({**given, "seed": 1000 * seed + given.get("seed", 0)})
                lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
                write_whole(path, "".join(lines).encode())


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process is here; a process that dies lets the next one in."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _leave_uncompiled(setup: Setup) -> None:
    """Leave torch.compile out, unless the table wants it: each of many short runs would compile."""
    if not setup.settings.get("compiled", False):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _toml(setup: Setup) -> Path:
    return ROOT / "experiments" / f"{setup.table}.toml"


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise DataError("warm start", f"its metrics must be numbers, got {value!r}")
    return float(value)
