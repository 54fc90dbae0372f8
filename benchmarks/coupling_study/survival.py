"""What survives a change of the weights, and what a tolerance admits.

A cached answer is kept up to the first token whose gap exceeds the tolerance. A kept token is
*touched* if its gap is above 0: the new policy would have chosen another one. Its *log-ratio* is
its log-probability under the new weights minus that under the old ones.

Axes: A answers, T positions of the longest of them, N some of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coupling_study.writer import Recheck


@dataclass(frozen=True, slots=True)
class Ratios:
    """Sizes of log-ratios, over some tokens."""

    mean: float
    percentile_99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What one tolerance keeps and admits."""

    tolerance: float
    kept: float
    """Share of an answer that is kept, mean over the answers."""
    kept_tokens: float
    """Share of all tokens that are kept."""
    touched: float
    """Share of the kept tokens that the new policy would not have chosen."""
    touched_ratios: Ratios | None
    """Of the touched tokens; `None` if there are none."""
    kept_ratios: Ratios | None
    """Of all kept tokens; `None` if there are none."""


class Survivors:
    """Cached answers that were verified under other weights."""

    def __init__(self, rechecks: Sequence[Recheck]) -> None:
        """Line up the answers."""
        self._gaps_AT = _padded([check.gaps for check in rechecks])
        new_AT = _padded([check.logprobs for check in rechecks])
        self._ratios_AT = (new_AT - _padded([check.old_logprobs for check in rechecks])).abs()
        self._lengths_A = torch.tensor([len(check.gaps) for check in rechecks])
        self._is_token_AT = torch.arange(self._gaps_AT.shape[1]) < self._lengths_A[:, None]

    @property
    def changed(self) -> float:
        """Share of all tokens whose choice changed, given the previous tokens."""
        return (self._gaps_AT > 0)[self._is_token_AT].double().mean().item()

    @property
    def drift(self) -> float:
        """Mean size of the log-ratio over all tokens, kept or not."""
        return self._ratios_AT[self._is_token_AT].mean().item()

    def kept_counts(self, tolerance: float) -> list[int]:
        """How many tokens of each answer a tolerance keeps."""
        counts: list[int] = self._is_kept(tolerance).sum(1).tolist()
        return counts

    def at(self, tolerance: float) -> Survival:
        """What a tolerance keeps and admits."""
        is_kept_AT = self._is_kept(tolerance)
        is_touched_AT = is_kept_AT & (self._gaps_AT > 0)
        kept_A = is_kept_AT.sum(1)
        return Survival(
            tolerance=tolerance,
            kept=(kept_A / self._lengths_A).mean().item(),
            kept_tokens=(kept_A.sum() / self._lengths_A.sum()).item(),
            touched=(is_touched_AT.sum() / kept_A.sum().clamp(min=1)).item(),
            touched_ratios=_ratios(self._ratios_AT[is_touched_AT]),
            kept_ratios=_ratios(self._ratios_AT[is_kept_AT]),
        )

    def _is_kept(self, tolerance: float) -> Tensor:
        return ((self._gaps_AT <= tolerance) & self._is_token_AT).long().cumprod(1).bool()


def mean_distance(first: Sequence[Recheck], second: Sequence[Recheck]) -> float:
    """The mean distance of log-probabilities between two checks of the same answers."""
    distances_N = torch.cat(
        [
            (torch.tensor(one.logprobs) - torch.tensor(other.logprobs)).abs()
            for one, other in zip(first, second, strict=True)
        ]
    )
    return distances_N.double().mean().item()


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _ratios(ratios_N: Tensor) -> Ratios | None:
    if not len(ratios_N):
        return None
    return Ratios(ratios_N.mean().item(), ratios_N.quantile(0.99).item())
