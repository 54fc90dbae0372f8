"""The settings of a simulated run: the real schedule and engine settings, and a made-up world."""

from __future__ import annotations

from dataclasses import dataclass, field

from sortedrl.config import EngineSettings, Schedule, check_values, require
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.pool_settings import PoolSettings

_MOST_ANSWERS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated run."""

    groups: int = 10
    """How many groups of prompts the run has."""
    prompts: int | None = None
    """Prompts of the whole run, in place of whole groups; the last group may be smaller."""
    seed: int = 0
    """Decides every length; the same seed gives the same run."""
    schedule: Schedule = field(default_factory=Schedule)
    engine: EngineSettings = field(default_factory=EngineSettings)
    lengths: LengthSettings = field(default_factory=LengthSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_values(self)
        require(self.groups >= 1, f"groups must be at least 1, got {self.groups}")
        require(
            self.prompts is None or self.prompts >= 1,
            f"prompts must be at least 1, got {self.prompts}",
        )
        require(
            self.pool.engines <= self.engine.slots,
            f"pool.engines must be at most engine.slots ({self.engine.slots}), so that each has a "
            f"slot, got {self.pool.engines}; lower engines or raise slots",
        )

        answers = self.num_prompts * self.schedule.samples_per_prompt
        require(
            answers <= _MOST_ANSWERS,
            f"a simulated run may have {_MOST_ANSWERS:,} answers at most, got {answers:,}; lower "
            "groups, prompts or schedule.group_prompts",
        )

    @property
    def num_prompts(self) -> int:
        """Prompts of the whole run."""
        if self.prompts is not None:
            return self.prompts
        return self.groups * self.schedule.group_prompts
