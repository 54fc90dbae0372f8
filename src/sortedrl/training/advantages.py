"""Rewards become advantages, one per token, and targets of the critic.

Everything is computed in float64 and returned in float32. Values that are all equal give
advantages of exactly 0, and so does an answer without siblings where siblings are compared.
Formulas: docs/explanation/algorithms.md.

Update batches come sorted by length. Where reward depends on length, whitening within a batch hides
that long answers did better than short ones. `RunningMoments` whitens over as many updates as a
group has, which cover all lengths.

Axes: N answers, T answer tokens of all of them together, V any values, G their groups.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sortedrl.config.algorithm import Algorithm, is_function
from sortedrl.training.batch import Answers
from sortedrl.training.functions import token_advantages


class Moments(NamedTuple):
    """The moments of the values of one update."""

    size: int
    mean: float
    squares: float
    """Sum of the squared distances from the mean."""


class RunningMoments:
    """The moments of the last `window` updates."""

    def __init__(self, window: int) -> None:
        """Nothing seen yet."""
        self._last: deque[Moments] = deque(maxlen=window)

    def whitened(self, values_V: Tensor, *, floor: float) -> Tensor:
        """The values of a new update, minus the mean and over the standard deviation of the window.

        The window includes the new update. Values that are not all finite give NaN and are not
        remembered.
        """
        # Above the lowest value, so that equal values are exactly 0 and not rounding errors.
        lowest = float(values_V.min())
        above_V = values_V - lowest
        mean = float(above_V.mean())
        squares = float(((above_V - mean) ** 2).sum())
        if not math.isfinite(squares):
            # Remembered, it would spoil every update of the window.
            return values_V * math.nan
        self._last.append(Moments(len(values_V), lowest + mean, squares))
        whole = _pooled(self._last)
        if whole.size < 2:
            return above_V
        return (values_V - whole.mean) / (math.sqrt(whole.squares / (whole.size - 1)) + floor)

    def state(self) -> list[list[float]]:
        """The state for a checkpoint."""
        return [list(moments) for moments in self._last]

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a checkpoint."""
        self._last.clear()
        self._last.extend(Moments(int(count), mean, squares) for count, mean, squares in state)


def _pooled(parts: Sequence[Moments] | deque[Moments]) -> Moments:
    """The moments of all values together."""
    first, count = parts[0].mean, sum(part.size for part in parts)
    mean = first + sum(part.size * (part.mean - first) for part in parts) / count
    squares = sum(part.squares + part.size * (part.mean - mean) ** 2 for part in parts)
    return Moments(count, mean, squares)


SPREAD_FLOOR = 1e-6
"""Added to a standard deviation that something is divided by."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantage of each token, and the return that the critic should predict."""

    advantages_T: Tensor
    returns_T: Tensor | None
    """`None` without a critic."""


def estimate(
    answers: Answers,
    algorithm: Algorithm,
    *,
    max_tokens: int,
    kl_T: Tensor | None = None,
    values_T: Tensor | None = None,
    last_values_N: Tensor | None = None,
    moments: RunningMoments | None = None,
) -> Advantages:
    """The advantages of all answers of an update.

    `kl_T` estimates the KL divergence from the reference, for a penalty in the reward; `values_T`
    is the critic's value of the state before each token, for ppo; `last_values_N` is its value
    after the last token of each answer, by default 0; `moments` are those of earlier updates, where
    rewards are whitened over a group.
    """
    rewards_N = answers.rewards_N.double()
    if algorithm.overlong_tokens is not None:
        rewards_N = overlong_shaped(
            rewards_N,
            answers.lengths_N,
            max_tokens=max_tokens,
            overlong_tokens=algorithm.overlong_tokens,
            penalty=algorithm.overlong_penalty,
        )
    rewards_T = _token_rewards(answers, algorithm, rewards_N=rewards_N, kl_T=kl_T)
    if is_function(algorithm.effective_advantage):
        advantages_T = _of_user(
            algorithm.effective_advantage, answers, rewards_N=rewards_N, rewards_T=rewards_T
        )
        return Advantages(advantages_T.float(), None)
    if algorithm.has_critic:
        assert values_T is not None, f"{algorithm.name} needs the critic's values"
        return _with_critic(
            answers,
            algorithm,
            rewards_T=rewards_T,
            values_T=values_T.double(),
            last_values_N=last_values_N,
        )
    if algorithm.needs_siblings:
        advantages_T = _among_siblings(answers, algorithm, rewards_T=rewards_T)
    else:
        returns_T = _sums_to_the_end(rewards_T, answers, discount=1.0)
        if moments is None:
            advantages_T = _whitened(returns_T)
        else:
            advantages_T = moments.whitened(returns_T, floor=SPREAD_FLOOR)
    return Advantages(advantages_T.float(), None)


def overlong_shaped(
    rewards_N: Tensor, lengths_N: Tensor, *, max_tokens: int, overlong_tokens: int, penalty: float
) -> Tensor:
    """Rewards minus the penalty of answers within `overlong_tokens` of the limit."""
    excess_N = lengths_N.double() - (max_tokens - overlong_tokens)
    return rewards_N - penalty * (excess_N / overlong_tokens).clamp(0, 1)


def has_reward_variance(answers: Answers) -> Tensor:
    """For each answer, whether the rewards of its prompt differ, before any shaping."""
    groups_N = answers.prompts_N.unique(return_inverse=True)[1]
    return _range(answers.rewards_N, groups_N)[groups_N] > 0


def _token_rewards(
    answers: Answers, algorithm: Algorithm, *, rewards_N: Tensor, kl_T: Tensor | None
) -> Tensor:
    """The reward at an answer's last token, minus the KL penalty at every token."""
    rewards_T = torch.zeros(answers.num_tokens, dtype=torch.float64)
    rewards_T[answers.ends_N] = rewards_N
    if algorithm.kl_coef > 0 and algorithm.effective_kl_place == "reward":
        assert kl_T is not None, "a KL penalty in the reward needs its estimate"
        rewards_T -= algorithm.kl_coef * kl_T.double()
    return rewards_T


def _among_siblings(answers: Answers, algorithm: Algorithm, *, rewards_T: Tensor) -> Tensor:
    """Each answer's reward compared with those of the other answers to its prompt."""
    rewards_N = torch.zeros(len(answers), dtype=torch.float64)
    rewards_N.index_add_(0, answers.owners_T, rewards_T)
    groups_N = answers.prompts_N.unique(return_inverse=True)[1]
    sizes_N = groups_N.bincount()[groups_N]
    centred_N, spreads_N = _centred(rewards_N, groups_N)
    estimator = algorithm.effective_advantage
    scale = algorithm.effective_scale_rewards
    if estimator == "group" and scale == "group":
        centred_N = centred_N / (spreads_N + SPREAD_FLOOR)
    elif estimator == "group" and scale == "batch":
        centred_N = centred_N / (_centred(rewards_N, torch.zeros_like(groups_N))[1] + SPREAD_FLOOR)
    elif estimator == "leave_one_out":
        centred_N = centred_N * sizes_N / (sizes_N - 1).clamp(min=1)
    advantages_T = centred_N.repeat_interleave(answers.lengths_N)
    if estimator == "group_whitened":
        has_siblings_T = (sizes_N > 1).repeat_interleave(answers.lengths_N)
        advantages_T[has_siblings_T] = _whitened(advantages_T[has_siblings_T])
    return advantages_T


def _of_user(address: str, answers: Answers, *, rewards_N: Tensor, rewards_T: Tensor) -> Tensor:
    given = {
        "rewards_N": rewards_N,
        "rewards_T": rewards_T,
        "prompts_N": answers.prompts_N,
        "lengths_N": answers.lengths_N,
        "owners_T": answers.owners_T,
        "is_truncated_N": answers.is_truncated_N,
    }
    return token_advantages(address, given)


def _with_critic(
    answers: Answers,
    algorithm: Algorithm,
    *,
    rewards_T: Tensor,
    values_T: Tensor,
    last_values_N: Tensor | None,
) -> Advantages:
    """Generalised advantage estimation; the value after the last token is 0 unless given."""
    next_values_T = values_T.roll(-1)
    next_values_T[answers.ends_N] = 0.0
    if last_values_N is not None:
        next_values_T[answers.ends_N] = last_values_N.double()
    deltas_T = rewards_T + algorithm.discount * next_values_T - values_T
    discount = algorithm.discount * algorithm.gae_lambda
    advantages_T = _sums_to_the_end(deltas_T, answers, discount=discount)
    returns_T = advantages_T + values_T
    return Advantages(_whitened(advantages_T).float(), returns_T.float())


def _sums_to_the_end(values_T: Tensor, answers: Answers, *, discount: float) -> Tensor:
    """Each token's value and those after it in its answer, each step discounted.

    Every pass doubles how far the sums reach, so an answer of L tokens takes log2(L) passes.
    """
    owners_T, sums_T = answers.owners_T, values_T
    reach, longest = 1, int(answers.lengths_N.max())
    while reach < longest:
        is_same = owners_T[reach:] == owners_T[:-reach]
        later = torch.where(is_same, sums_T[reach:], 0.0) * discount**reach
        sums_T = torch.cat((sums_T[:-reach] + later, sums_T[-reach:]))
        reach *= 2
    return sums_T


def _whitened(values_V: Tensor) -> Tensor:
    """Values minus their mean, over their standard deviation (n - 1)."""
    if len(values_V) < 2:
        return torch.zeros_like(values_V)
    # Above the lowest value, so that equal values are exactly 0 and not rounding errors.
    above_V = values_V - values_V.min()
    return (above_V - above_V.mean()) / (above_V.std() + SPREAD_FLOOR)


def _centred(values_V: Tensor, groups_V: Tensor) -> tuple[Tensor, Tensor]:
    """Values minus the mean of their group, and the standard deviation (n - 1) of their group.

    As in `_whitened`, means are taken above the lowest value.
    """
    sizes_G = groups_V.bincount()
    zeros_G = torch.zeros(len(sizes_G), dtype=values_V.dtype)
    above_V = values_V - _lowest(values_V, groups_V)[groups_V]
    means_G = zeros_G.index_add(0, groups_V, above_V) / sizes_G
    centred_V = above_V - means_G[groups_V]
    variances_G = zeros_G.index_add(0, groups_V, centred_V**2) / (sizes_G - 1).clamp(min=1)
    return centred_V, variances_G.sqrt()[groups_V]


def _lowest(values_V: Tensor, groups_V: Tensor) -> Tensor:
    size = len(groups_V.bincount())
    start_G = torch.full((size,), math.inf, dtype=values_V.dtype)
    return start_G.scatter_reduce(0, groups_V, values_V, "amin")


def _range(values_V: Tensor, groups_V: Tensor) -> Tensor:
    """Highest minus lowest value of each group."""
    return -_lowest(-values_V, groups_V) - _lowest(values_V, groups_V)
