"""Table 3d: the paper's logic run in small, SmolLM2-135M on puzzles in words."""

from __future__ import annotations

from experiments.learning import pieces
from experiments.learning_seeds import section

__all__ = ["pieces", "section"]
