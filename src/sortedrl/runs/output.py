"""How a run is shown in a terminal and to a script: a line per update, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.core.metrics import Figures, numbers
from sortedrl.evaluation.tables import percent
from sortedrl.report.terminal import thousands

if TYPE_CHECKING:
    from sortedrl.runs.training import Ending


_COLUMNS = 80


def update_line(
    update: int,
    *,
    numbers: Mapping[str, float],
    figures: Figures,
    done: float,
    seconds: float,
) -> str:
    """What one update did and the time left, in 80 columns; `done` is the share of the run so far.

    The speed is goodput: tokens trained on per second of rollout.
    """
    parts = [f"update {update:4d}"]
    if "reward/mean" in numbers:
        parts.append(f"reward {numbers['reward/mean']:6.3f}")
        parts.append(f"length {numbers['length/mean']:4.0f}")
    elif "held" in numbers:
        parts.append(f"held {numbers['held']:.0f} answers")
    parts += [f"bubble {100 * figures.bubble:2.0f} %", f"{thousands(figures.goodput):>6}/s"]
    if figures.staleness_max:
        parts.append(f"stale {figures.mean_staleness:.1f}")
    line = "  ".join(parts)
    for end in _endings(done, seconds):
        if len(line) + 2 + len(end) <= _COLUMNS:
            line += f"  {end}"
            break
    if numbers.get("skipped_steps"):
        line += "\n  skipped: the gradients were not finite"
    if numbers.get("unusable_answers"):
        line += f"\n  left out: {numbers['unusable_answers']:.0f} answers that were not finite"
    return line


def _endings(done: float, seconds: float) -> list[str]:
    """How far the run is and when it will be over, the longest wording first."""
    if not done > 0:
        return []
    left = f"{duration(seconds * (1 - done) / done)} left"
    return [f"{100 * done:3.0f} %, {left}", left, f"{100 * done:3.0f} %"]


def evaluation_line(update: int, scores: Mapping[str, float]) -> str:
    """What an evaluation found: a line for each task; long names are cut."""
    lines = (f"after update {update}: {percent(score)}  {task}" for task, score in scores.items())
    return "\n".join(
        line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 3]}..." for line in lines
    )


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> [duration(s) for s in (8, 100, 7300)]
    ['8 s', '1 min 40 s', '2 h 1 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


_REASONS = {
    "data": "Finished: reached the end of the data",
    "updates": "Finished: reached max_updates",
    "target": "Finished: reached the target score",
    "asked": "Stopped on request",
}


def rows(ending: Ending) -> list[tuple[str, str]]:
    """The closing table."""
    figures, ledger = ending.figures, ending.figures.ledger
    table = [
        ("updates", f"{ending.updates:,}"),
        ("answers trained on", f"{figures.trajectories:,}"),
        ("tokens decoded / trained", f"{ledger.decoded:,} / {ledger.trained:,}"),
        ("bubble", percent(figures.bubble)),
        ("goodput", f"{thousands(figures.goodput)} tokens/s"),
        ("staleness, mean / max", f"{figures.mean_staleness:.2f} / {figures.staleness_max}"),
        ("time", duration(figures.seconds)),
    ]
    if ending.first_scores is not None and ending.last_scores is not None:
        for task, score in ending.last_scores.by_task.items():
            before = ending.first_scores.by_task.get(task)
            began = "" if before is None else f"{percent(before)} -> "
            table.append((f"accuracy, {task}", began + percent(score)))
    return table


def words(ending: Ending, folder: Path) -> list[str]:
    """Why it ended, and what to do next."""
    lines = [f"{_REASONS[ending.reason]}."]
    if ending.reason == "asked":
        lines.append(f"Saved; resume with: sortedrl train {folder} --resume")
    else:
        lines.append(
            f"The model is in {folder / 'model'}; resume with: sortedrl train {folder} --resume"
        )
    return lines


def as_row(ending: Ending, folder: Path) -> dict[str, object]:
    """One JSON object."""
    return {
        "folder": str(folder),
        "reason": ending.reason,
        "updates": ending.updates,
        **numbers(ending.figures),
        "first_scores": None if ending.first_scores is None else ending.first_scores.by_task,
        "last_scores": None if ending.last_scores is None else ending.last_scores.by_task,
    }
