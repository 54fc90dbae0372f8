"""Table 3d: the paper's logic run in small, SmolLM2-135M on puzzles in words."""

from __future__ import annotations

from experiments.learning import pieces

__all__ = ["pieces"]
