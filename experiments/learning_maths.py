"""Table 4: sums of many terms, PPO with a critic and GRPO, four schedules."""

from experiments.learning import pieces

__all__ = ["pieces"]
