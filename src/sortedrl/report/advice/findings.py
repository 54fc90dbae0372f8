"""What is known of a run before any remedy is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.config import EngineSettings, Schedule
from sortedrl.report.advice.forecast import Forecast
from sortedrl.report.advice.idle import Idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The run's settings and its measured numbers."""

    schedule: Schedule
    engine: EngineSettings
    measured: Forecast
    discarded_per_trained: float
    idle: Idle
    num_prompts: int
    is_group_known: bool
    """Whether `schedule.group_prompts` is the run's own, or a guess."""
    truncated_share: float
    """Share of the answers that ended at the token limit."""
    update_seconds: float
    """Mean seconds of an update."""
    sample_size: float | None
    """Effective sample size as a share, over the later half of the updates; `None`: not logged."""
    is_mismatch_measured: bool
    step_share: float
    """Share of a decode step of full slots that does not grow with the answers in it."""


def mean_sample_size(rows: Sequence[Mapping[str, object]]) -> float | None:
    """The effective sample size over the later half of the updates."""
    sizes = [row.get("correction/ess") for row in rows]
    known = [float(size) for size in sizes if isinstance(size, int | float)]
    later = known[len(known) // 2 :]
    return sum(later) / len(later) if later else None
