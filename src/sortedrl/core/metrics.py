"""The metrics of a run, computed by `meter` from its events.

Bubble ratio: idle slot-seconds over all slot-seconds of the rollout phases.
Outside bubble: the part of it in which the environment of a conversation was awaited.
Idle share: the same over the whole run, including updates and weight syncs.
Throughput: decoded tokens per second of rollout. Goodput: trained tokens per second of rollout.
Ledger: decoded = trained + discarded + still cached, in every run, or it is a bug.
Steady state: from the close of the first group to the load of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.types import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What happened to the decoded tokens."""

    decoded: int = 0
    """Written by the engine."""
    trained: int = 0
    """Part of an update."""
    discarded: int = 0
    """Discarded: redrawn, too old, or no longer what the policy writes."""
    kept: int = 0
    """Reused from the cache at a resume; a token counts once for each resume it survives."""
    prefilled_again: int = 0
    """Prompt and answer tokens prefilled to resume work."""

    @property
    def cached(self) -> int:
        """Neither trained nor discarded yet."""
        return self.decoded - self.trained - self.discarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers of one round, one group, the steady state, or the whole run."""

    seconds: float = 0.0
    rollout_seconds: float = 0.0
    busy_slot_seconds: float = 0.0
    outside_slot_seconds: float = 0.0
    slots: int = 1
    ledger: Ledger = Ledger()
    updates: int = 0
    trajectories: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    trajectory_staleness_sum: int = 0

    @property
    def bubble(self) -> float:
        """Idle share of the slot-seconds of the rollout."""
        return _idle(self.busy_slot_seconds, self.slots * self.rollout_seconds)

    @property
    def outside_bubble(self) -> float:
        """The part of the bubble in which a conversation was outside for each idle slot."""
        return _ratio(self.outside_slot_seconds, self.slots * self.rollout_seconds)

    @property
    def idle_share(self) -> float:
        """Idle share of all slot-seconds, updates and weight syncs included."""
        return _idle(self.busy_slot_seconds, self.slots * self.seconds)

    @property
    def throughput(self) -> float:
        """Decoded tokens per second of rollout."""
        return _ratio(self.ledger.decoded, self.rollout_seconds)

    @property
    def goodput(self) -> float:
        """Trained tokens per second of rollout."""
        return _ratio(self.ledger.trained, self.rollout_seconds)

    @property
    def trained_per_second(self) -> float:
        """Trained tokens per second of the whole, updates and weight syncs included."""
        return _ratio(self.ledger.trained, self.seconds)

    @property
    def mean_length(self) -> float:
        """Mean length of the answers trained on."""
        return _ratio(self.ledger.trained, self.trajectories)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the tokens trained on."""
        return _ratio(self.staleness_sum, self.ledger.trained)

    @property
    def mean_trajectory_staleness(self) -> float:
        """Mean over the answers trained on of the staleness of their oldest token."""
        return _ratio(self.trajectory_staleness_sum, self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """Lengths trained on, against the lengths the policy writes when nothing interrupts it."""

    trained_mean: float
    reference_mean: float
    ks_distance: float

    @property
    def ratio(self) -> float:
        """Mean length trained on over mean length written; 1 is no bias."""
        return _ratio(self.trained_mean, self.reference_mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """A group: its own answers, and the time from its load to its close."""

    group: int
    rounds: int
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything measured in a run."""

    schedule: str
    """The name of the schedule."""
    slots: int
    run: Figures
    steady: Figures | None
    rounds: tuple[Figures, ...]
    groups: tuple[GroupFigures, ...]
    trained_lengths: tuple[tuple[Key, int, int], ...]
    """For each answer trained on: its key, the version it was trained at, its length."""


def numbers(figures: Figures) -> dict[str, float]:
    """The numbers of a window as one flat row, for tables and scripts."""
    ledger = figures.ledger
    return {
        "bubble": figures.bubble,
        "outside_bubble": figures.outside_bubble,
        "idle_share": figures.idle_share,
        "goodput": figures.goodput,
        "throughput": figures.throughput,
        "trained_per_second": figures.trained_per_second,
        "mean_length": figures.mean_length,
        "decoded_tokens": ledger.decoded,
        "trained_tokens": ledger.trained,
        "discarded_tokens": ledger.discarded,
        "cached_tokens": ledger.cached,
        "kept_tokens": ledger.kept,
        "prefilled_again_tokens": ledger.prefilled_again,
        "mean_staleness": figures.mean_staleness,
        "max_staleness": figures.staleness_max,
        "mean_trajectory_staleness": figures.mean_trajectory_staleness,
        "updates": figures.updates,
        "trajectories": figures.trajectories,
        "rollout_seconds": figures.rollout_seconds,
        "seconds": figures.seconds,
    }


def length_bias(trained: Sequence[int], reference: Sequence[int]) -> LengthBias:
    """Compare two samples of lengths."""
    return LengthBias(
        trained_mean=_ratio(sum(trained), len(trained)),
        reference_mean=_ratio(sum(reference), len(reference)),
        ks_distance=ks_distance(trained, reference),
    )


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest gap between the two empirical distribution functions."""
    if not first or not second:
        return 0.0
    left, right = sorted(first), sorted(second)
    i = j = 0
    gap = 0.0
    while i < len(left) and j < len(right):
        value = min(left[i], right[j])
        while i < len(left) and left[i] == value:
            i += 1
        while j < len(right) and right[j] == value:
            j += 1
        gap = max(gap, abs(i / len(left) - j / len(right)))
    return gap


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _idle(busy: float, capacity: float) -> float:
    return max(0.0, 1 - busy / capacity) if capacity else 0.0
