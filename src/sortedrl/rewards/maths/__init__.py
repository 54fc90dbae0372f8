"""The maths reward: reading a boxed answer, and comparing it with the gold one."""

from sortedrl.rewards.maths.reward import math_reward

__all__ = ["math_reward"]
