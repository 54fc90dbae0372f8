"""`sortedrl demo`: warm start, SortedRL and the synchronous baseline, on a laptop CPU."""

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

A model with 0.6 million parameters learns to solve Knights-and-Knaves puzzles by trying every
assignment in turn, so answer lengths vary widely. It first imitates traces that give up one time in
four after a failed try. It is then trained with rewards from that warm start, once with SortedRL
(sorted, partial mode, lookahead 1) and once with the synchronous baseline, on the same puzzles.
The two runs alternate in halves, so that both see the same machine load. The simulator predicts the
baseline from the log of the SortedRL run.
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
"""Everything that the commands write to a run folder."""
_SORTED, _SYNC = "SortedRL", "synchronous"
_TURNS = (_SORTED, _SYNC, _SYNC, _SORTED)
"""The halves of both runs, ordered so that a machine that slows down favours neither."""
_GROUP = 64
_BATCH = 16
_MAX_TOKENS = 512
_SAMPLED_LENGTHS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """How long to train, and where."""

    out: Path = Path("runs/demo")
    """Folder for the runs and the report. Those of an earlier demo are replaced; other files are
    never overwritten."""
    seed: int = 0
    """Seed of the weights, the puzzles and every answer."""
    warm_steps: int = 1200
    """Optimiser steps of the warm start."""
    answers: int = _NUM_PUZZLES
    """Answers that each of the two runs trains on."""
    held_out: int = 160
    """Held-out puzzles for the score."""
    threads: int = 1
    """CPU threads. The model is too small to gain much from a second one, and slows down if other
    processes compete for the cores."""

    def __post_init__(self) -> None:
        for name in ("warm_steps", "answers", "held_out", "threads"):
            value = asdict(self)[name]
            require(value >= 1, f"{name} must be at least 1, got {value}")
        require(
            self.answers <= _NUM_PUZZLES,
            f"answers must be at most {_NUM_PUZZLES:,}, about all puzzles of this kind, "
            f"got {self.answers:,}",
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
    print(f"\nReport: {page}; total time {duration(time.monotonic() - began)}.")


def warm_settings(given: Arguments) -> SupervisedSettings:
    """The warm start on the traces."""
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
    """The two schedules to compare."""
    group = min(_GROUP, given.answers)
    sync = Schedule(
        strategy="sync",
        mode="on_policy",
        group_prompts=group,
        update_batch=min(_BATCH, group),
    )
    return {_SORTED: replace(sync, strategy="sorted", mode="partial", lookahead=1), _SYNC: sync}


def _make_room(out: Path) -> None:
    """Remove an earlier demo, and mark the folders of this one.

    Everything is checked before anything is removed. A folder without the mark, or with a file that
    no run writes, is refused.
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
    tell(f"1 of {1 + len(_TURNS)}: warm start")
    if not warm_start(warm_settings(given)).is_complete:
        raise KeyboardInterrupt


def _both_trained(given: Arguments) -> dict[str, Ending]:
    endings: dict[str, Ending] = {}
    for number, name in enumerate(_TURNS, start=2):
        schedule = schedules(given)[name]
        is_first = name not in endings
        half = max(1, given.answers // schedule.update_batch // 2) if is_first else None
        which = "first" if is_first else "second"
        tell(f"{number} of {1 + len(_TURNS)}: {name}, {which} half")
        settings = train_settings(given, schedule, max_updates=half)
        endings[name] = train(settings, is_resumed=not is_first)
        if endings[name].reason == "asked":
            raise KeyboardInterrupt
    return endings


def predicted(given: Arguments) -> Figures | None:
    """Simulate the baseline with the costs and lengths fitted to the log of the SortedRL run.

    `None` where that log is too short to fit costs to.
    """
    from sortedrl.simulate.compare import simulate
    from sortedrl.simulate.costs import CostSettings
    from sortedrl.simulate.fit import fit
    from sortedrl.simulate.lengths import LengthSettings, length_observations, written_lengths
    from sortedrl.simulate.settings import Simulation

    events = list(read_events(given.out / "sorted" / "events.jsonl"))
    try:
        costs = fit(events).costs
    except DataError:
        return None
    prompts = [event.prompt_tokens for event in events if isinstance(event, Start)]
    lengths = LengthSettings(
        values=written_lengths(length_observations(events)).sample_lengths(_SAMPLED_LENGTHS),
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
    write_text(page, runs_page(runs, title="SortedRL vs the synchronous baseline"))
    return page


def _print(sync: Ending, ours: Ending, forecast: Figures | None) -> None:
    """Print the closing table: idle slots, speed and scores."""
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
    """A row with the speeds and the speedup of SortedRL over the baseline."""
    base, ours = speed(arms[0]), speed(arms[2])
    shown = ["" if f is None else _number(speed(f)) for f in arms]
    return [name, *shown, f"{ours / base:.1f} x" if base else ""]


def _number(value: float) -> str:
    return thousands(value) if value >= 100 else f"{value:.1f}"


def _score(scores: Scores | None) -> str:
    return "" if scores is None else percent(scores.mean)
