"""The settings of checkpoints: when one is saved, and which ones are kept."""

from __future__ import annotations

from dataclasses import dataclass

from sortedrl.config import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """When a checkpoint is saved, and which ones are kept."""

    every: int = 50
    """Updates between two checkpoints."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept; older ones are deleted."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation score too, however old it is."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.every >= 1, f"saving.every must be at least 1, got {self.every}")
        require(
            self.keep_last >= 1,
            f"saving.keep_last must be at least 1, got {self.keep_last}; without a checkpoint "
            "nothing could be resumed",
        )
