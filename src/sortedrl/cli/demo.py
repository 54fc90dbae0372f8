"""`sortedrl demo`: the main job on a laptop, start to end: warm start, SortedRL, the baseline."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.cli.arguments import parse
from sortedrl.config.algorithm import Optimisation
from sortedrl.config.checks import require, require_native
from sortedrl.config.data import PeriodicEvaluation
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Saving, SupervisedSettings, TrainSettings
from sortedrl.core.events import Start, read_events
from sortedrl.core.files import refuse_foreign
from sortedrl.core.meter import Figures
from sortedrl.errors import ConfigError, DataError, os_errors
from sortedrl.evaluation.tables import percent
from sortedrl.report.terminal import (
    PAGE,
    refuse_unwritable_folder,
    table,
    tell,
    thousands,
    write_text,
)
from sortedrl.runs.output import duration
from sortedrl.runs.start import train, warm_start

if TYPE_CHECKING:
    from sortedrl.runs.training import Ending, Scores

HELP = """Train a tiny model on the CPU: warm start, SortedRL, and the synchronous baseline.

A model of 0.6 million weights learns to solve Knights-and-Knaves puzzles by trying every
assignment in turn, so answers differ much in length. First it imitates a hasty teacher, who after
a failed try gives up one time in four. Then it is trained with rewards, once with SortedRL
(sorted, partial mode, lookahead 1) and once with the synchronous baseline, on the same puzzles
from the same warm start. Each run is made in two halves, which take turns, so that both see the
same machine; the simulator predicts the baseline from the log of SortedRL.
"""
_PUZZLES = "knights_knaves:people=3-4,forms=claim+and+or,style=compact"
_NUM_PUZZLES = 1280
_HASTE = 0.25
_RIGHT_OR_NOT = (
    "right=1",
    "partly_right=0",
    "wrong=0",
    "unparsable=0",
    "format_right=0",
    "format_wrong=0",
)
_FOLDERS = ("warm", "sorted", "sync")
_MARK = "demo.json"
_MARKED = {"format": "sortedrl-demo", "version": 1}
_WRITTEN = (
    *(_MARK, "run.json", "config.toml", "events.jsonl", "metrics.jsonl", "answers.jsonl"),
    *("checkpoints", "model", "report.html", "trace.json", "reward-failures.jsonl"),
    "reward-error.json",
)
"""What the commands write into the folder of a run."""
_SORTED, _SYNC = "SortedRL", "synchronous"
_TURNS = (_SORTED, _SYNC, _SYNC, _SORTED)
"""The halves of both runs, in an order that favours neither on a machine that gets slower."""
_GROUP = 64
_BATCH = 16
_MAX_TOKENS = 512
_SAMPLED_LENGTHS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """How much of everything."""

    out: Path = Path("runs/demo")
    """Where the runs and the report go; what an older demo left there is replaced, and anything
    else is left alone."""
    seed: int = 0
    """Decides the weights, the puzzles and every answer."""
    warm_steps: int = 1200
    """Optimiser steps of the warm start."""
    answers: int = _NUM_PUZZLES
    """Answers that each of the two runs is trained on."""
    held_out: int = 160
    """Puzzles that the score is measured on, none of which is trained on."""
    threads: int = 1
    """CPU threads; so small a model gains little from a second, and loses much if others want
    the cores too."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("warm_steps", "answers", "held_out", "threads"):
            value = asdict(self)[name]
            require(value >= 1, f"{name} must be at least 1, got {value}")
        require(
            self.answers <= _NUM_PUZZLES,
            f"answers must be at most {_NUM_PUZZLES:,}, as there are hardly more puzzles of the "
            f"demo's kind, got {self.answers:,}",
        )


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl demo", description=HELP)
    require_native("sortedrl demo")
    refuse_unwritable_folder(given.out)
    began = time.monotonic()
    _make_room(given.out)
    _warm_start(given)
    endings = _both_trained(given)
    page = _report(given)
    _print(endings[_SYNC], endings[_SORTED], predicted(given))
    print(f"\nReport: {page}; everything took {duration(time.monotonic() - began)}.")


def warm_settings(given: Arguments) -> SupervisedSettings:
    """The warm start on a hasty teacher's traces."""
    return SupervisedSettings(
        model=f"tiny:seed={given.seed}",
        task=f"{_PUZZLES},count={_NUM_PUZZLES},seed={given.seed},haste={_HASTE}",
        out=given.out / "warm",
        seed=given.seed,
        epochs=max(1, given.warm_steps // 20),
        max_steps=given.warm_steps,
        batch_tokens=1024,
        threads=given.threads,
        optimiser=Optimisation(
            learning_rate=2e-3, schedule="cosine", warmup_steps=20, weight_decay=0.01, beta2=0.98
        ),
    )


def train_settings(
    given: Arguments, schedule: Schedule, *, max_updates: int | None = None
) -> TrainSettings:
    """Training with rewards, from the warm start."""
    return TrainSettings(
        model=str(given.out / "warm" / "model"),
        task=f"{_PUZZLES},count={given.answers},seed={given.seed + 1}",
        out=given.out / schedule.strategy,
        seed=given.seed,
        threads=given.threads,
        max_updates=max_updates,
        reward_options=_RIGHT_OR_NOT,
        schedule=schedule,
        engine=EngineSettings(slots=_BATCH, max_tokens=_MAX_TOKENS),
        optimiser=Optimisation(learning_rate=1e-4),
        evaluation=PeriodicEvaluation(
            tasks=(f"{_PUZZLES},count={given.held_out},split=test,seed={given.seed}",),
            every=1000,
            temperature=1.0,
        ),
        saving=Saving(every=1000, keep_last=1, keep_best=False),
    )


def schedules(given: Arguments) -> dict[str, Schedule]:
    """What is compared."""
    group = min(_GROUP, given.answers)
    sync = Schedule(
        strategy="sync",
        mode="on_policy",
        group_prompts=group,
        update_batch=min(_BATCH, group),
    )
    return {_SORTED: replace(sync, strategy="sorted", mode="partial", lookahead=1), _SYNC: sync}


def _make_room(out: Path) -> None:
    """Remove what an older demo left, and mark the folders of this one as a demo's.

    Everything is looked at before anything is removed: a folder without the mark, and a file in a
    marked one that no run writes, are not ours to remove.
    """
    folders = [out / name for name in _FOLDERS]
    page = out / "report.html"
    refuse_foreign(page, mark=PAGE)
    for folder in folders:
        _refuse_foreign_folder(folder)
    for folder in folders:
        with os_errors(folder, "cannot be replaced"):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            (folder / _MARK).write_text(json.dumps(_MARKED) + "\n")


def _refuse_foreign_folder(folder: Path) -> None:
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    advice = "choose another --out, or move it away"
    try:
        is_ours = json.loads((folder / _MARK).read_bytes()) == _MARKED and not folder.is_symlink()
    except (OSError, ValueError):
        is_ours = False
    if not is_ours:
        raise ConfigError(f"{folder} already exists and was not made by the demo; {advice}")
    others = sorted(path.name for path in folder.iterdir() if path.name not in _WRITTEN)
    if others:
        raise ConfigError(
            f"{folder} would be replaced, but holds files that the demo did not write: "
            f"{', '.join(others)}; {advice}"
        )


def _warm_start(given: Arguments) -> None:
    tell(f"1 of {1 + len(_TURNS)}: a warm start by imitation")
    if not warm_start(warm_settings(given)).is_complete:
        raise KeyboardInterrupt


def _both_trained(given: Arguments) -> dict[str, Ending]:
    endings: dict[str, Ending] = {}
    for number, name in enumerate(_TURNS, start=2):
        schedule = schedules(given)[name]
        is_first = name not in endings
        half = max(1, given.answers // schedule.update_batch // 2) if is_first else None
        which = "first" if is_first else "second"
        tell(f"{number} of {1 + len(_TURNS)}: rewards, {name}, {which} half")
        settings = train_settings(given, schedule, max_updates=half)
        endings[name] = train(settings, is_resumed=not is_first)
        if endings[name].reason == "asked":
            raise KeyboardInterrupt
    return endings


def predicted(given: Arguments) -> Figures | None:
    """The baseline as the simulator sees it, with the costs and the lengths of SortedRL's log.

    `None` where that log is too short to fit costs to.
    """
    from sortedrl.simulate.compare import simulate
    from sortedrl.simulate.costs import CostSettings
    from sortedrl.simulate.fit import fit
    from sortedrl.simulate.lengths import LengthSettings, stretches, written_lengths
    from sortedrl.simulate.settings import Simulation

    events = list(read_events(given.out / "sorted" / "events.jsonl"))
    try:
        costs = fit(events).costs
    except DataError:
        return None
    prompts = [event.prompt_tokens for event in events if isinstance(event, Start)]
    lengths = LengthSettings(
        values=written_lengths(stretches(events)).sample_lengths(_SAMPLED_LENGTHS),
        prompt_tokens=round(sum(prompts) / len(prompts)),
    )
    simulation = Simulation(
        prompts=given.answers,
        seed=given.seed,
        schedule=schedules(given)[_SYNC],
        engine=EngineSettings(slots=_BATCH, max_tokens=_MAX_TOKENS),
        costs=CostSettings(hardware="ticks", **asdict(costs)),
        lengths=lengths,
    )
    return simulate(simulation).metrics.run


def _report(given: Arguments) -> Path:
    from sortedrl.report.page import runs_page
    from sortedrl.report.record import read_runs

    runs = read_runs([given.out / strategy for strategy in ("sorted", "sync")])
    page = given.out / "report.html"
    write_text(page, runs_page(runs, title="SortedRL beside the synchronous baseline"))
    return page


def _print(sync: Ending, ours: Ending, forecast: Figures | None) -> None:
    """The closing table: what was idle, how fast, and what was learned."""
    arms = (sync.figures, forecast, ours.figures)
    rows = [
        ["idle slots", *("" if f is None else percent(f.bubble) for f in arms), ""],
        _speed("answers per second", arms, lambda figures: figures.trajectories / figures.seconds),
        _speed("tokens per second of rollout", arms, lambda figures: figures.goodput),
        ["time", *("" if f is None else duration(f.seconds) for f in arms), ""],
        ["answers trained", f"{sync.figures.trajectories:,}", "", f"{arms[2].trajectories:,}", ""],
        ["right answers, before", _score(sync.first_scores), "", _score(ours.first_scores), ""],
        ["right answers, after", _score(sync.last_scores), "", _score(ours.last_scores), ""],
    ]
    table(("", _SYNC, "predicted", _SORTED, "gain"), rows)


def _speed(
    name: str,
    arms: tuple[Figures, Figures | None, Figures],
    speed: Callable[[Figures], float],
) -> list[str]:
    """The speeds, and how many times as fast SortedRL is as the baseline."""
    base, ours = speed(arms[0]), speed(arms[2])
    shown = ["" if f is None else _number(speed(f)) for f in arms]
    return [name, *shown, f"{ours / base:.1f} x" if base else ""]


def _number(value: float) -> str:
    return thousands(value) if value >= 100 else f"{value:.1f}"


def _score(scores: Scores | None) -> str:
    return "" if scores is None else percent(scores.mean)
