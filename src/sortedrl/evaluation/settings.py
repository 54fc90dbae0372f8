"""The settings of an evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sortedrl.config import check_values, require, require_temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How answers are drawn for an evaluation."""

    samples: int = 1
    """Answers per prompt: k of mean@k, and the most of pass@k."""
    temperature: float | None = None
    """By default 0 (greedy) for one answer per prompt, and 0.6 for several."""
    top_p: float = 1.0
    """Choose among the most likely tokens that together have this probability."""
    max_tokens: int = 1024
    """Tokens after which an answer is cut off."""
    slots: int = 32
    """Answers written at the same time."""
    seed: int = 0
    """The same seed gives the same answers, whatever else is evaluated."""
    limit: int | None = None
    """Only the first rows of every task."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name, count in (
            ("samples", self.samples),
            ("max_tokens", self.max_tokens),
            ("slots", self.slots),
        ):
            require(count >= 1, f"{name} must be at least 1, got {count}")
        require(
            self.temperature is None or 0 <= self.temperature < math.inf,
            f"temperature must be 0 (greedy) or more, got {self.temperature}",
        )
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}")
        require(
            self.samples == 1 or self.temperature != 0,
            f"{self.samples} answers per prompt at temperature 0 would all be the same; "
            "leave the temperature out, or ask for one answer",
        )
        require_temperature("temperature", self.sampling_temperature, is_greedy_allowed=True)
        require(
            self.limit is None or self.limit >= 1, f"limit must be at least 1, got {self.limit}"
        )
        check_values(self)

    @property
    def sampling_temperature(self) -> float:
        """The temperature answers are drawn with."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else 0.6
