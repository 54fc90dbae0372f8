"""What is saved while a run goes on: checkpoints, and some answers as text."""

from __future__ import annotations

from dataclasses import dataclass

from sortedrl.config import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """When a checkpoint is saved, which ones are kept, and how many answers as text."""

    every: int = 50
    """Updates between two checkpoints."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept; older ones are deleted."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation score too, however old it is."""
    answers: int = 8
    """Answers of each update to keep as text, from the shortest to the longest, so that the
    report can show what the model wrote; 0 for none."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.every >= 1, f"saving.every must be at least 1, got {self.every}")
        require(
            self.keep_last >= 1,
            f"saving.keep_last must be at least 1, got {self.keep_last}; without a checkpoint "
            "nothing could be resumed",
        )
        require(
            self.answers >= 0,
            f"saving.answers must be at least 0, got {self.answers}; 0 keeps none",
        )
