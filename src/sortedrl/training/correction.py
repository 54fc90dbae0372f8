"""The settings of the off-policy correction: what to do about tokens of older weights.

Three log-probabilities of a token exist: under the weights that sampled it (behaviour), under the
weights at the start of the update (proximal), under the weights being trained (current).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sortedrl.config import require
from sortedrl.errors import unknown_name

CorrectionName = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"]
Ratio = Literal["proximal", "behaviour"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How a token counts that other weights than the present ones have sampled."""

    kind: CorrectionName | None = None
    """none: like any other.
    token_tis: weighted by proximal over behaviour probability, at most `most`.
    sequence_tis: the same with the ratio of the whole answer.
    token_mis, sequence_mis: weighted by the same ratio, and left out where it lies outside of
    least..most.
    By default token_tis where stale tokens are trained on (partial mode, posthoc) or the engine is
    not the native one, else none."""
    most: float = 2.0
    """The largest weight, or the largest ratio that is not left out."""
    least: float = 0.0
    """Masking only: the smallest ratio that is not left out."""
    ratio: Ratio = "proximal"
    """What the clipped ratio of the loss is taken against. proximal: the weights at the start of
    the update (decoupled PPO). behaviour: the weights that sampled the token, which makes the
    clip itself the correction; it takes kind none."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        kinds = get_args(CorrectionName)
        require(
            self.kind is None or self.kind in kinds,
            unknown_name("correction", str(self.kind), kinds),
        )
        ratios = get_args(Ratio)
        require(self.ratio in ratios, unknown_name("ratio", self.ratio, ratios))
        require(
            0 < self.most < math.inf and 0 <= self.least < self.most,
            "correction.least and correction.most must hold 0 <= least < most, "
            f"got {self.least} and {self.most}",
        )
        require(
            self.least == 0 or self.kind in ("token_mis", "sequence_mis"),
            f"correction.least needs a kind that masks, got {self.least} with kind {self.kind!r}; "
            "leave it out or set kind to 'token_mis' or 'sequence_mis'",
        )
        require(
            self.ratio == "proximal" or self.kind in (None, "none"),
            f"correction.ratio 'behaviour' corrects by itself, got kind {self.kind!r} with it; "
            "set ratio to 'proximal' or kind to 'none'",
        )

    def used_kind(self, *, is_needed: bool) -> CorrectionName:
        """The correction that holds in the end."""
        if self.kind is not None:
            return self.kind
        return "token_tis" if is_needed and self.ratio == "proximal" else "none"
