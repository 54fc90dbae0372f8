"""Table 3: Knights and Knaves, REINFORCE++, six schedules."""

from experiments.learning import pieces

__all__ = ["pieces"]
