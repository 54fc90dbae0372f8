"""Learning curves: the same warm start and the same prompts under several schedules.

A trial is one training run: an algorithm, an arm (a schedule) and a seed. The warm start of a seed
is created by its first arm, under a file lock, and shared by the others. An interrupted run resumes
from its checkpoint, and so does its clock.

The TOML of a table has the settings of `sortedrl sft` in [warm] and those of `sortedrl train` in
[train]. [algorithms.NAME] overrides [train], and [arms.NAME] overrides its schedule; an algorithm
may restrict its schedules with `arms`. A table without [warm] starts from `model`.
Strings may contain {seed}, {rows} (the folder of the rows generated from [sums.NAME] and
[questions.NAME]), {model} and {root} (the project folder).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.arithmetic import SumSettings, sum_rows
from experiments.curves import run_numbers
from experiments.questions import QuestionSettings, question_rows
from experiments.trials import ROOT, Setup, Trial, merged
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
    """The name of the schedule in the TOML."""
    seed: int

    @property
    def trial(self) -> str:
        """The name of its trial."""
        return f"{self.algorithm}-{self.name}-{self.seed}"


def trials(setup: Setup) -> list[Trial]:
    """Warm starts first, then the runs, grouped by seed.

    Runs that are compared then share the device with the same neighbours.
    """
    seconds = setup.settings["seconds"]
    made = [
        Trial(name=f"warm-{seed}", seconds=seconds["warm"], run=partial(warm_numbers, setup, seed))
        for seed in setup.settings["seeds"]
        if "warm" in setup.settings
    ]
    for arm in arms(setup.settings):
        run = partial(arm_numbers, setup, arm)
        made.append(Trial(name=arm.trial, seconds=seconds["run"], run=run))
    return made


def arms(settings: Mapping[str, Any]) -> list[Arm]:
    """The runs of a table, in order."""
    return [
        Arm(algorithm=algorithm, name=name, seed=seed)
        for seed in settings["seeds"]
        for algorithm, laid_over in settings["algorithms"].items()
        for name in laid_over.get("arms", settings["arms"])
    ]


def warm_numbers(setup: Setup, seed: int) -> dict[str, Any]:
    """The numbers of the warm start of a seed."""
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
    """The numbers of a run, which is started, resumed, or only read if complete."""
    model = warmed(setup, arm.seed)
    settings = train_settings(setup, arm, model=model)
    folder = RunFolder(settings.out)
    # A finished run has exported its model.
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
    """The settings of a run that starts with this model."""
    given = setup.settings
    algorithm = {k: v for k, v in given["algorithms"][arm.algorithm].items() if k != "arms"}
    table = merged(given["train"], algorithm)
    table = merged(table, {"schedule": given["arms"][arm.name]})
    fixed = {
        "model": str(model),
        "out": str(setup.scratch / arm.trial),
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
    """The warm-started model of a seed; trains it and generates the rows if missing."""
    with _alone(setup.scratch / f"warm-{seed}.lock"):
        _write_rows(setup, seed)
        if "warm" not in setup.settings:
            return Path(setup.settings["model"])
        settings = warm_settings(setup, seed)
        is_done = settings.out / "is_done"
        if not is_done.exists():
            # One that was interrupted cannot be resumed.
            shutil.rmtree(settings.out, ignore_errors=True)
            _leave_uncompiled(setup)
            if not warm_start(settings).is_complete:
                raise KeyboardInterrupt
            write_whole(is_done, b"")
    return RunFolder(settings.out).model


def filled(table: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """Replace the placeholders in the strings of settings.

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
    """The placeholders of the TOML."""
    return {
        "seed": str(seed),
        "rows": str(_rows_folder(setup, seed)),
        "model": setup.settings.get("model", ""),
        "root": str(ROOT),
    }


def _rows_folder(setup: Setup, seed: int) -> Path:
    return setup.scratch / f"rows-{seed}"


def _write_rows(setup: Setup, seed: int) -> None:
    """Generate the rows of a seed, if the table has any; `seed` in the TOML is an offset."""
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
    """Hold a file lock; it is released if the process dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _leave_uncompiled(setup: Setup) -> None:
    """Disable torch.compile unless the table enables it: each short run would compile again."""
    if not setup.settings.get("compiled", False):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _toml(setup: Setup) -> Path:
    return ROOT / "experiments" / f"{setup.table}.toml"


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise DataError("warm start", f"its metrics must be numbers, got {value!r}")
    return float(value)
