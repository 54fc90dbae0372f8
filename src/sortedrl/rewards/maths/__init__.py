"""The maths reward: reading a boxed answer, and comparing it with the gold one."""

from sortedrl.rewards.maths.reward import lowest_math_reward, math_reward

__all__ = ["lowest_math_reward", "math_reward"]
