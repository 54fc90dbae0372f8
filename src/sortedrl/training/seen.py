"""What the passes of an update leave behind for its statistics.

Each process sees the answers that it goes through; after every step all of them know of all.

Axes: T answer tokens of the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sortedrl.training.losses import TokenLosses
from sortedrl.training.passes import Team


@dataclass(slots=True)
class Seen:
    """What an update has seen so far; the last step over a token counts."""

    current_T: Tensor
    proximal_T: Tensor
    entropy_T: Tensor
    losses: list[TokenLosses]
    """Of the passes of this process."""
    fills: list[float]

    @classmethod
    def nothing(cls, num_tokens: int, *, device: torch.device) -> Seen:
        """Before the first pass over so many tokens."""
        blank_T = torch.zeros(num_tokens, device=device)
        return cls(blank_T, blank_T.clone(), blank_T.clone(), [], [])

    def forget(self, at: Tensor) -> None:
        """Leave only what the coming step sees at these places."""
        for values_T in (self.current_T, self.proximal_T, self.entropy_T):
            values_T[at] = 0.0

    def share(self, at: Tensor, team: Team) -> None:
        """Take over what other processes saw at these places; one of them saw each."""
        for values_T in (self.current_T, self.proximal_T, self.entropy_T):
            values_T[at] = team.summed(values_T[at])

    def token_losses(self, team: Team) -> TokenLosses:
        """Those of all passes of all processes."""
        own = TokenLosses.joined(self.losses)
        return TokenLosses(
            loss_T=team.joined(own.loss_T),
            is_clipped_low_T=team.joined(own.is_clipped_low_T),
            is_clipped_high_T=team.joined(own.is_clipped_high_T),
            is_dual_clipped_T=team.joined(own.is_dual_clipped_T),
        )
