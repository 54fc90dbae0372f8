"""Round numbers for axes, and short words for numbers."""

from __future__ import annotations

import math


def round_steps(end: float, *, count: int) -> list[float]:
    """About `count` round numbers from 0 to at most `end`.

    >>> round_steps(2475, count=6)
    [0.0, 500.0, 1000.0, 1500.0, 2000.0]
    >>> round_steps(0.9, count=5)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    if end <= 0:
        return [0.0]
    rough = end / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [round(index * step, 10) for index in range(int(end / step * (1 + 1e-9)) + 1)]


def short(value: float) -> str:
    """A number for a label: grouped thousands, no needless digits.

    >>> short(12345.6), short(37.28), short(4.0), short(0.7), short(0.07374)
    ('12,346', '37.3', '4', '0.7', '0.074')
    """
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")
