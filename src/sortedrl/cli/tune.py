"""`sortedrl tune`: searches for the best schedule for given lengths and hardware."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sortedrl.cli.arguments import parse_over_settings
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.comparison import Point, pareto
from sortedrl.report.terminal import (
    progress,
    refuse_other_picture,
    thousands,
    write_text,
)
from sortedrl.simulate.compare import PREDICTION_ERROR, SimulationResult, row
from sortedrl.simulate.settings import Simulation, simulation_to_toml
from sortedrl.simulate.tune import Search, Tuned, tune

HELP = """Search update batch, group size, lookahead and mode by simulation.

  sortedrl tune paper                                the paper's lengths and hardware
  sortedrl tune mine.toml --on-policy-only           never train on stale tokens
  sortedrl tune paper --max-staleness 2 --max-length-bias 0.02
  sortedrl tune paper --length-file my.csv --hardware h200-qwen-2.5-1.5b --plot front.svg
  sortedrl tune paper > best.toml                    ready for simulate, compare and tune

Prints the best settings as TOML; comments at the top show their gain.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to search, and what to show."""

    search: Search = field(default_factory=Search)
    workers: int = os.cpu_count() or 1
    """Processes that simulate in parallel."""
    json: bool = False
    """Print one JSON object instead of TOML."""
    plot: Path | None = None
    """Plot speed against staleness of all candidates to this SVG file."""
    simulation: Simulation = field(default_factory=Simulation)


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse_over_settings(
        lambda base: Arguments(simulation=base), arguments, name="tune", description=HELP
    )
    refuse_other_picture(given.plot)
    with progress(1.0) as advance:
        tuned = tune(
            given.simulation,
            given.search,
            workers=given.workers,
            on_done=lambda done, total: advance(f"{done} of {total} settings", done / total),
        )
    if given.plot is not None:
        write_text(given.plot, _picture(tuned))
    if given.json:
        print(json.dumps(_as_json(tuned), indent=2))
    else:
        print("\n".join(f"# {line}".rstrip() for line in _summary(tuned)))
        print(simulation_to_toml(tuned.best.simulation), end="")


def _summary(tuned: Tuned) -> list[str]:
    words = [
        f"{len(tuned.tried)} settings simulated, {len(tuned.allowed)} meet the constraints",
        f"best:  {_describe(tuned.best)}",
        f"yours: {_describe(tuned.current)}"
        + ("" if tuned.is_current_allowed else "; does not meet the constraints"),
        f"gain:  {tuned.gain:.2f} x trained tokens per second of the whole run"
        + (
            f", within the error of such predictions ({100 * PREDICTION_ERROR:.0f} %)"
            if abs(tuned.gain - 1) < PREDICTION_ERROR
            else ""
        ),
        "",
        "Pareto front of speed and mean token staleness, least stale first:",
    ]
    words += [f"  {_describe(result)}" for result in tuned.front]
    return words


def _describe(result: SimulationResult) -> str:
    schedule, figures = result.simulation.schedule, result.metrics.run
    return (
        f"{result.name}, groups of {schedule.group_prompts}, update batch "
        f"{schedule.update_batch}: {thousands(figures.trained_per_second)} tokens/s, "
        f"bubble {percent(figures.bubble)}, staleness {figures.mean_staleness:.2f}, "
        f"length bias {result.bias.ratio:.2f}"
    )


def _picture(tuned: Tuned) -> str:
    points = [
        Point(
            x=result.metrics.run.mean_staleness,
            y=result.metrics.run.trained_per_second,
            label=_label(result),
            is_best=result is tuned.best,
            on_front=result in tuned.front,
        )
        for result in tuned.allowed
    ]
    return pareto(
        points,
        x_label="mean staleness, versions",
        y_label="trained tokens per second",
        title=f"{len(tuned.allowed)} settings, the best {tuned.gain:.2f} x the current one",
    )


def _label(result: SimulationResult) -> str:
    schedule = result.simulation.schedule
    return f"{result.name}, {schedule.group_prompts} in batches of {schedule.update_batch}"


def _as_json(tuned: Tuned) -> dict[str, object]:
    def described(result: SimulationResult) -> dict[str, object]:
        schedule = result.simulation.schedule
        return row(result) | {
            "group_prompts": schedule.group_prompts,
            "update_batch": schedule.update_batch,
        }

    return {
        "gain": tuned.gain,
        "best": described(tuned.best),
        "current": described(tuned.current),
        "front": [described(result) for result in tuned.front],
        "tried": [described(result) for result in tuned.tried],
        "toml": simulation_to_toml(tuned.best.simulation),
    }
