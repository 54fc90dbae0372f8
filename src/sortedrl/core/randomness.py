"""Keyed randomness: a number depends on its key only, not on earlier draws.

A trajectory therefore gets the same randomness alone, in a full batch, or after a restart, and two
strategies with the same seed are compared on the same answers.
"""

from __future__ import annotations

from statistics import NormalDist

_MASK = (1 << 64) - 1
_STANDARD_NORMAL = NormalDist()


def mix(*key: int) -> int:
    """A 64-bit hash of the key: splitmix64's finaliser, chained over the parts."""
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def uniform(*key: int) -> float:
    """A number strictly between 0 and 1."""
    return ((mix(*key) >> 11) + 0.5) * 2.0**-53


def normal(*key: int) -> float:
    """A standard normal number."""
    return _STANDARD_NORMAL.inv_cdf(uniform(*key))
