"""How a run ended, for a person and for a script."""

from __future__ import annotations

from pathlib import Path

from sortedrl.metrics import numbers
from sortedrl.runs.lines import duration
from sortedrl.runs.training import Ending
from sortedrl.terminal import percent, thousands

_REASONS = {
    "data": "the data is used up",
    "updates": "max_updates is reached",
    "target": "the target score is reached",
    "asked": "a stop was asked for",
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
        ("staleness, mean / most", f"{figures.mean_staleness:.2f} / {figures.staleness_max}"),
        ("time", duration(figures.seconds)),
    ]
    if ending.first_scores is not None and ending.last_scores is not None:
        for task, score in ending.last_scores.by_task.items():
            before = ending.first_scores.by_task.get(task)
            began = "" if before is None else f"{percent(before)} -> "
            table.append((f"right answers, {task}", began + percent(score)))
    return table


def words(ending: Ending, folder: Path) -> list[str]:
    """Why it ended, and what to do next."""
    lines = [f"Ended because {_REASONS[ending.reason]}."]
    if ending.reason == "asked":
        lines.append(f"Saved; go on with: sortedrl train {folder} --resume")
    else:
        lines.append(f"The model is in {folder / 'model'}; the run can be gone on with (--resume).")
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
