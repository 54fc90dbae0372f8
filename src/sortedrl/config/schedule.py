"""Settings of the scheduler and the engine, validated before anything heavy is loaded.

The string under a field is its only documentation and the text of `--help`.
Derived values are read-only properties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from sortedrl.config.checks import (
    MOST,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    at_least,
    check_values,
    require,
)

StrategyName = Literal[
    "sync", "minibatch", "posthoc", "sorted", "ungrouped", "tail_batching", "april"
]
ModeName = Literal["on_policy", "redraw", "partial", "coupled"]
HarvestUnit = Literal["trajectory", "prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When each rollout and update runs, and how interrupted generations are handled."""

    strategy: StrategyName = "sorted"
    """The scheduler's rules.
    sync: roll out one update batch, wait for its longest answer, update.
    minibatch: roll out a whole group, then one update per random mini-batch of it, as PPO is
    usually run (the paper's maths baseline).
    posthoc: as minibatch, with mini-batches sorted by length (the paper's ablation).
    sorted: keep the slots full, update as soon as a batch is complete (the paper).
    ungrouped: sorted without groups; new prompts always go first (the paper's ablation).
    tail_batching: launch extra answers, train on the first to finish, batch the rest in long
    rounds.
    april: launch extra answers, train on the first to finish, resume the rest in the next round."""
    mode: ModeName = "partial"
    """How interrupted generations are handled.
    on_policy: discarded and resampled with new randomness (the paper). Answers are interrupted
    because they are long, so this trades long answers for short ones.
    redraw: discarded and resampled from the same seed: on-policy, and of the same length as far as
    old and new weights agree. The engine must support a seed per answer.
    partial: kept with their old log-probabilities and continued under the new weights.
    coupled: kept up to the first token that the new weights would not sample from the same
    noise."""
    tolerance: NonNegativeFloat | None = None
    """Coupled mode only: how far, in nats, a cached token may fall short of the best one and still
    be kept. 0 (the default) is exactly on-policy, inf is partial mode."""
    group_prompts: PositiveInt = 512
    """Prompts loaded together; the next group waits until all of them are trained."""
    samples_per_prompt: PositiveInt = 1
    """Answers sampled for each prompt."""
    update_batch: int = 128
    """Trajectories per update: the harvest begins as soon as this many are ready."""
    exact: bool = False
    """Train on exactly update_batch trajectories per update, as trainers with planned steps need.
    Other ready trajectories wait for the next update: kept in partial mode, verified again in
    coupled mode, resampled otherwise. Only the last update may be smaller. By default an update
    takes everything that is ready."""
    lookahead: NonNegativeInt = 0
    """Strategy sorted only: how many groups may be open ahead of the oldest unfinished one, to fill
    the slots that its last long answers leave idle."""
    harvest_unit: HarvestUnit = "trajectory"
    """When an answer may be trained on: as soon as it is complete (trajectory: PPO,
    REINFORCE++), or when all answers to its prompt are (prompt: GRPO, RLOO, DAPO)."""
    max_restarts: (
        Annotated[int, at_least(1, "strategies sync, minibatch and posthoc never interrupt")] | None
    ) = None
    """A trajectory interrupted this often is not interrupted again: the harvest waits for it."""
    max_staleness: NonNegativeInt | None = None
    """Partial mode only: cached tokens staler than this many versions are dropped at resume, and
    the answer is regenerated."""
    over_launch: Annotated[float, at_least(1)] = 1.25
    """Strategies tail_batching and april: answers launched, as a multiple of the update batch."""

    def __post_init__(self) -> None:
        check_values(self, "schedule.")
        require(
            self.group_trajectories <= MOST["group_prompts"],
            f"a group may have {MOST['group_prompts']:,} answers at most, got "
            f"{self.group_trajectories:,}; lower schedule.group_prompts or samples_per_prompt",
        )
        require(
            1 <= self.update_batch <= self.group_trajectories,
            f"schedule.update_batch must lie in 1..{self.group_trajectories} (all trajectories of "
            f"a group), got {self.update_batch}; lower update_batch or raise group_prompts",
        )
        self._check_exact()
        self._check_strategy()
        self._check_mode()

    def _check_exact(self) -> None:
        together = self.samples_per_prompt if self.strategy == "sync" else self.unit_size
        require(
            not self.exact or self.update_batch % together == 0,
            f"schedule.exact needs an update_batch of whole prompts, a multiple of {together} "
            f"answers, got {self.update_batch}",
        )
        require(
            not self.exact or self.group_trajectories % self.update_batch == 0,
            f"schedule.exact needs groups of whole update batches, got {self.group_trajectories} "
            f"trajectories per group and update_batch {self.update_batch}; make group_prompts x "
            "samples_per_prompt a multiple of update_batch",
        )

    def _check_strategy(self) -> None:
        require(
            self.lookahead == 0 or self.strategy == "sorted",
            f"schedule.lookahead needs strategy 'sorted', got lookahead {self.lookahead} with "
            f"strategy {self.strategy!r}; set lookahead to 0 or strategy to 'sorted'",
        )

    def _check_mode(self) -> None:
        require(
            self.tolerance is None or self.mode == "coupled",
            f"schedule.tolerance needs mode 'coupled', got tolerance {self.tolerance} with mode "
            f"{self.mode!r}; leave tolerance out or set mode to 'coupled'",
        )
        require(
            self.max_staleness is None or self.mode == "partial",
            f"schedule.max_staleness needs mode 'partial', got {self.max_staleness} with mode "
            f"{self.mode!r}, which has no stale tokens; leave it out or set mode to 'partial'",
        )
        updates = self.group_trajectories // self.update_batch
        require(
            self.max_staleness is None
            or not self.splits_rollouts
            or self.max_staleness >= updates - 1,
            f"strategy {self.strategy!r} trains {updates} update batches on one rollout, so the "
            f"last is {updates - 1} versions old, got max_staleness {self.max_staleness}; "
            "raise max_staleness or update_batch",
        )

    @property
    def group_trajectories(self) -> int:
        """Trajectories of a whole group."""
        return self.group_prompts * self.samples_per_prompt

    @property
    def updates_per_group(self) -> int:
        """Update batches in a group; at least one."""
        return max(1, self.group_trajectories // self.update_batch)

    @property
    def unit_size(self) -> int:
        """Trajectories that become trainable together."""
        return self.samples_per_prompt if self.harvest_unit == "prompt" else 1

    @property
    def name(self) -> str:
        """Strategy, mode and lookahead, such as `sorted/partial +1`."""
        if self.never_interrupts:
            return self.strategy
        return f"{self.strategy}/{self.mode}" + (f" +{self.lookahead}" if self.lookahead else "")

    @property
    def never_interrupts(self) -> bool:
        """Whether every answer runs to completion, so that the mode has no effect."""
        return self.strategy == "sync" or self.splits_rollouts

    @property
    def splits_rollouts(self) -> bool:
        """Whether a rollout is split into several updates, the later ones off-policy."""
        return self.strategy in ("minibatch", "posthoc")

    @property
    def keeps_stale_tokens(self) -> bool:
        """Whether stale tokens are trained on; an infinite tolerance is partial mode."""
        return self.mode == "partial" or self.tolerance == math.inf

    @property
    def rounds_bound(self) -> int | None:
        """Rounds within which every prompt of a group is trained; `None` if unbounded.

        Proved in docs/explanation/bounds.md.
        """
        if self.never_interrupts:
            return 1
        if self.strategy == "sorted":
            return (2 * self.lookahead + 1) * self.group_trajectories // self.update_batch
        return None

    @property
    def staleness_bound(self) -> int | None:
        """Maximum staleness of a token when it is trained on; `None` if unbounded.

        Proved in docs/explanation/bounds.md.
        """
        if self.splits_rollouts:
            return self.group_trajectories // self.update_batch - 1
        if self.strategy == "sync" or not self.keeps_stale_tokens:
            return 0
        bounds = [self.max_staleness]
        if self.rounds_bound is not None:
            bounds.append(self.rounds_bound - 1)
        return min((bound for bound in bounds if bound is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine that generates the answers."""

    slots: PositiveInt = 128
    """Answers generated at the same time."""
    max_tokens: PositiveInt = 8192
    """Tokens after which an answer is cut off."""

    def __post_init__(self) -> None:
        check_values(self, "engine.")
