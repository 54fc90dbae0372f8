"""The answers of one update as flat tensors: answer after answer, one entry per token.

Only answer tokens have an entry, so there is no padding and nothing to mask for it.

Axes: N answers, T answer tokens of all of them together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sortedrl.types import TrainBatch, Trajectory, impossible_logprob

LARGEST_REWARD = 1e6
"""The bound of the reward workers, for answers that were scored elsewhere."""
_NAMED = 3
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What advantages and losses need to know of the answers, beside their log-probabilities."""

    lengths_N: Tensor
    """Tokens of each answer; at least 1."""
    rewards_N: Tensor
    """Rewards, float64."""
    prompts_N: Tensor
    """The prompt that each answer belongs to."""
    behaviour_T: Tensor
    """Log-probabilities under the weights that sampled each token, float32."""
    staleness_T: Tensor
    """How many versions old each token is."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], *, version: int) -> Answers:
        """The answers of scored trajectories, in order, as seen from a version."""
        segments = [segment for t in trajectories for segment in t.segments]
        sizes = torch.tensor([len(segment.tokens) for segment in segments])
        ages = torch.tensor([version - segment.version for segment in segments])
        return cls(
            lengths_N=torch.tensor([t.num_tokens for t in trajectories]),
            rewards_N=torch.tensor([_reward(t) for t in trajectories], dtype=torch.float64),
            prompts_N=torch.tensor([t.prompt.id for t in trajectories]),
            behaviour_T=torch.tensor([value for s in segments for value in s.logprobs]),
            staleness_T=ages.repeat_interleave(sizes),
        )

    def __len__(self) -> int:
        """How many answers."""
        return len(self.lengths_N)

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return len(self.behaviour_T)

    @property
    def owners_T(self) -> Tensor:
        """The answer that each token belongs to, 0 to N - 1."""
        return torch.arange(len(self)).repeat_interleave(self.lengths_N)

    def places(self, answers: Sequence[int]) -> Tensor:
        """Where the tokens of these answers stand, in their order."""
        ends_N = self.lengths_N.cumsum(0).tolist()
        starts_N = [0, *ends_N[:-1]]
        spans = [torch.arange(starts_N[answer], ends_N[answer]) for answer in answers]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)

    @property
    def ends_N(self) -> Tensor:
        """The place of each answer's last token."""
        return self.lengths_N.cumsum(0) - 1


def trainable(batch: TrainBatch) -> tuple[Trajectory, ...]:
    """The trajectories that can be trained on: scored, and with at least one token."""
    return tuple(t for t in batch.trajectories if t.reward is not None and t.num_tokens)


def sound(trajectories: Sequence[Trajectory], *, is_telling: bool = True) -> tuple[Trajectory, ...]:
    """The trajectories without those whose numbers would spoil the whole update.

    Whoever made such numbers has a fault, so they are told of, with the answers' names.
    """
    faults = {t.key: fault for t in trajectories if (fault := _fault(t)) is not None}
    if faults and is_telling:
        named = [
            f"prompt {prompt}, sample {sample}: {fault}"
            for (prompt, sample), fault in list(faults.items())[:_NAMED]
        ]
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        _LOG.warning(
            "%d of %d answers are left out of the update (%s%s)",
            len(faults),
            len(trajectories),
            "; ".join(named),
            more,
        )
    return tuple(t for t in trajectories if t.key not in faults)


def _fault(trajectory: Trajectory) -> str | None:
    """What makes an answer unfit to be trained on, or `None`."""
    reward = _reward(trajectory)
    if not abs(reward) <= LARGEST_REWARD:
        return f"its reward must lie within +-{LARGEST_REWARD:g}, got {reward}"
    place = impossible_logprob(trajectory.logprobs)
    if place is not None:
        return (
            f"the log-probability of its token {place} must be finite and at most 0, got "
            f"{trajectory.logprobs[place]}"
        )
    return None


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, "only scored answers are trained on"
    return trajectory.reward
