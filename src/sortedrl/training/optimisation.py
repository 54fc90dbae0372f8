"""The settings of the optimiser: how gradients become steps, and how fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sortedrl.config import require
from sortedrl.errors import unknown_name

RateSchedule = Literal["constant", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """AdamW, the course of its learning rate, and how an update batch is gone through."""

    learning_rate: float = 1e-6
    """The learning rate after the warm-up; 0 leaves the weights as they are."""
    schedule: RateSchedule = "constant"
    """The learning rate after the warm-up.
    constant: stays.
    cosine: falls along half a cosine until the last step of the run."""
    warmup_steps: int = 0
    """Steps during which the learning rate rises linearly before it is reached."""
    final_share: float = 0.1
    """Schedule cosine only: the share of the learning rate that the last step has."""
    weight_decay: float = 0.0
    """Pull towards zero, on matrices only: biases and norms are left alone."""
    beta1: float = 0.9
    """How much of the mean gradient is kept from step to step."""
    beta2: float = 0.999
    """How much of the mean squared gradient is kept from step to step. Update batches come
    sorted by length, so it should remember longer than a group has updates."""
    epsilon: float = 1e-8
    """Keeps steps small where gradients are tiny."""
    max_norm: float | None = 1.0
    """Gradients whose norm over all weights is larger are scaled down to it."""
    steps: int = 1
    """Optimiser steps per update batch: it is cut into that many mini-batches."""
    epochs: int = 1
    """How often an update batch is gone through."""
    max_bad_updates: int = 5
    """Stop after so many updates in a row whose loss or gradient is not finite."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        schedules = get_args(RateSchedule)
        require(
            self.schedule in schedules,
            unknown_name("learning rate schedule", self.schedule, schedules),
        )
        for field, rate in (
            ("learning_rate", self.learning_rate),
            ("weight_decay", self.weight_decay),
        ):
            require(0 <= rate < math.inf, f"optimiser.{field} must be 0 or more, got {rate}")
        for field, share in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= share < 1, f"optimiser.{field} must lie in [0, 1), got {share}")
        require(
            0 <= self.final_share <= 1,
            f"optimiser.final_share must lie in 0..1, got {self.final_share}",
        )
        require(
            0 < self.epsilon < math.inf,
            f"optimiser.epsilon must be positive, got {self.epsilon}",
        )
        require(
            self.max_norm is None or 0 < self.max_norm < math.inf,
            f"optimiser.max_norm must be positive, got {self.max_norm}; set it to none to never "
            "scale gradients down",
        )
        for field, count, least in (
            ("warmup_steps", self.warmup_steps, 0),
            ("steps", self.steps, 1),
            ("epochs", self.epochs, 1),
            ("max_bad_updates", self.max_bad_updates, 1),
        ):
            require(count >= least, f"optimiser.{field} must be at least {least}, got {count}")


def learning_rate_at(step: int, *, settings: Optimisation, total_steps: int | None) -> float:
    """The learning rate of a step, counted from 0; `total_steps` are those of the whole run.

    Step `warmup_steps` is the first at the full rate; the last step of a cosine has its share.

    >>> rises = Optimisation(learning_rate=1.0, warmup_steps=3)
    >>> [learning_rate_at(step, settings=rises, total_steps=None) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    require(
        total_steps is not None,
        "optimiser.schedule 'cosine' needs to know the number of steps of the run, got none; "
        "limit the run or set the schedule to 'constant'",
    )
    assert total_steps is not None
    way = max(1, total_steps - 1 - settings.warmup_steps)
    passed = min(1.0, (step - settings.warmup_steps) / way)
    height = (1 + math.cos(math.pi * passed)) / 2
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * height)
