"""Time, as an argument: the wall clock of a real run, the virtual clock of a simulated one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Gives the seconds since the run began."""

    def seconds(self) -> float:
        """Seconds since the run began."""


class WallClock:
    """Real seconds, on a clock that never goes backwards."""

    def __init__(self) -> None:
        """Start at zero now."""
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start


class VirtualClock:
    """Simulated seconds: time passes only where a simulated part says so."""

    def __init__(self) -> None:
        """Start at zero."""
        self._seconds = 0.0

    def seconds(self) -> float:
        """Simulated seconds so far."""
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"a clock only goes forward, got {seconds} seconds")
        self._seconds += seconds
