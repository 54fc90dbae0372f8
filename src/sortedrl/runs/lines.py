"""A training run in lines: one for each update, short enough for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from sortedrl.metrics import Figures
from sortedrl.terminal import percent, thousands


def update_line(
    update: int,
    *,
    numbers: Mapping[str, float],
    figures: Figures,
    done: float,
    seconds: float,
) -> str:
    """What one update did, and when the run will be over; `done` is the share behind it."""
    words = [f"update {update:4d}"]
    if "reward/mean" in numbers:
        words.append(f"reward {numbers['reward/mean']:6.3f}")
        words.append(f"length {numbers['length/mean']:5.0f}")
    elif "held" in numbers:
        words.append(f"held {numbers['held']:.0f} answers")
    words += [
        f"bubble {percent(figures.bubble):>6}",
        f"goodput {thousands(figures.goodput):>6}/s",
        f"stale {figures.mean_staleness:.1f}/{figures.staleness_max}",
    ]
    if numbers.get("skipped_steps"):
        words.append("SKIPPED: not finite")
    if numbers.get("unusable_answers"):
        words.append(f"LEFT OUT: {numbers['unusable_answers']:.0f} answers, not finite")
    if done > 0:
        words.append(f"{percent(done):>6}, {duration(seconds * (1 - done) / done)} left")
    return "  ".join(words)


def evaluation_line(update: int, scores: Mapping[str, float]) -> str:
    """What an evaluation found."""
    found = ", ".join(f"{task} {percent(score)}" for task, score in scores.items())
    return f"after update {update}: {found}"


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
