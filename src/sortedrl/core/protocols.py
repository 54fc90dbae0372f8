"""The protocols of the loop: what a prompt source, an engine, a scorer and a trainer must offer.

Any object with these methods fits; nothing has to be inherited or registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sortedrl.types import Prompt, Step, TrainBatch, Trajectory, Weights


class PromptSource(Protocol):
    """Station 1: the stream of prompts."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts, with ids that count up; fewer than `count` only at the end."""


class Engine(Protocol):
    """Station 4: writes answers, `slots` at a time.

    Every trajectory submitted comes back exactly once: from `step` when it is complete,
    or from `interrupt`.
    """

    @property
    def slots(self) -> int:
        """Answers written at the same time; more may be submitted and will queue."""

    @property
    def version(self) -> int:
        """Version of the weights it writes with."""

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work, in order of priority.

        Cached tokens sampled under other weights stand if `tolerance` is `None`.
        Otherwise they are verified, and kept up to the first one that falls more than
        `tolerance` nats short of the best under the present weights and the same noise.
        """

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory with its tokens so far."""

    def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on; only called while nothing runs."""


class Scorer(Protocol):
    """Station 5: gives complete answers their reward, beside the rollout."""

    def submit(self, trajectory: Trajectory) -> None:
        """Start to score a complete answer; never waits."""

    def cancel(self, trajectory: Trajectory) -> None:
        """Forget an answer that will be renewed before it is trained on."""

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Wait for these answers and give them back, in order, with their rewards."""


class Environments(Protocol):
    """Station 5 for conversations: answers what the policy wrote, beside the rollout.

    Every conversation submitted comes back exactly once from `collect`, unless it is cancelled.
    The conversation itself says what was spoken, so an environment can be brought to any turn.
    """

    @property
    def limit(self) -> int | None:
        """Conversations that may be begun at a time; `None`: any number."""

    def submit(self, trajectory: Trajectory) -> None:
        """Answer the last turn of a conversation; never waits."""

    def cancel(self, trajectory: Trajectory) -> None:
        """Close the environment of a conversation whose tokens are thrown away."""

    def collect(self, *, wait: bool) -> Sequence[Trajectory]:
        """Conversations that were answered: with a reply in `given`, or with a finish reason.

        With `wait`, at least one, if any was submitted.
        """


class Trainer(Protocol):
    """Station 7: the only home of gradients."""

    @property
    def version(self) -> int:
        """Number of updates behind the weights."""

    def update(self, batch: TrainBatch) -> None:
        """Train on the batch; the version goes up by one if the weights changed.

        They stay as they are where the gradient is not finite, or where answers are held back
        until they fill a batch. The batch counts as trained either way.
        """

    def weights(self) -> Weights:
        """The present weights, for the engine."""
