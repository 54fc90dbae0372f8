"""Table 3b: order and freshness, 16 seeds, three learning rates."""

from experiments.learning import pieces

__all__ = ["pieces"]
