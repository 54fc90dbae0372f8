"""The protocols of the loop: prompt source, engine, scorer, environments and trainer.

Any object with these methods fits; there is nothing to inherit from or to register with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sortedrl.types import Prompt, Step, TrainBatch, Trajectory, Weights


class PromptSource(Protocol):
    """The stream of prompts."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts, with ascending ids; fewer than `count` only at the end."""


class Engine(Protocol):
    """Generates answers, `slots` at a time.

    Every submitted trajectory comes back exactly once: from `step` when it is complete, or from
    `interrupt`.
    """

    @property
    def slots(self) -> int:
        """Answers generated at the same time; more may be submitted and are queued."""

    @property
    def version(self) -> int:
        """Version of its weights."""

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Queue trajectories, in order of priority.

        Cached tokens sampled by other weights are trusted if `tolerance` is `None`. Otherwise they
        are verified, and kept up to the first one that falls more than `tolerance` nats short of
        the best token under the current weights and the same noise.
        """

    def step(self) -> Step:
        """Run until at least one token was generated or an answer is complete."""

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and return every unfinished trajectory with its tokens so far."""

    def load_weights(self, weights: Weights) -> None:
        """Use these weights from now on; only called while nothing runs."""


class Scorer(Protocol):
    """Gives complete answers their rewards, in parallel with the rollout."""

    def submit(self, trajectory: Trajectory) -> None:
        """Start to score a complete answer; never blocks."""

    def cancel(self, trajectory: Trajectory) -> None:
        """Forget an answer that will be renewed before it is trained on."""

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Wait for these answers and return them, in order, with their rewards."""


class Environments(Protocol):
    """Replies to the policy in conversations, in parallel with the rollout.

    Every submitted conversation comes back exactly once from `collect`, unless it is cancelled.
    A conversation contains all its turns, so an environment can be replayed to any of them.
    """

    @property
    def limit(self) -> int | None:
        """Maximum number of begun conversations; `None`: unlimited."""

    def submit(self, trajectory: Trajectory) -> None:
        """Start to reply to the last turn of a conversation; never blocks."""

    def cancel(self, trajectory: Trajectory) -> None:
        """Close the environment of a conversation whose tokens are discarded."""

    def collect(self, *, wait: bool) -> Sequence[Trajectory]:
        """Conversations that got a reply (in `given`) or a finish reason.

        With `wait`, at least one, if any was submitted.
        """


class Trainer(Protocol):
    """Holds the optimiser; the only place with gradients."""

    @property
    def version(self) -> int:
        """Number of updates behind the weights."""

    def update(self, batch: TrainBatch) -> None:
        """Train on the batch; the version goes up by one if the weights changed.

        They do not change if the gradient is not finite, or while answers are held back until they
        fill a batch. The batch counts as trained either way.
        """

    def weights(self) -> Weights:
        """The current weights, for the engine."""
