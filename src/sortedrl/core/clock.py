"""Clocks: wall time for real runs, virtual time for simulated ones.

Run time counts training only: neither the time between a kill and the resume nor pauses (an
evaluation).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """Measures the seconds since the start of the run."""

    def seconds(self) -> float:
        """Seconds since the start of the run."""


class WallClock:
    """Real seconds from a monotonic clock."""

    def __init__(self, *, start: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        """Start at `start` seconds, the run time of a resumed run."""
        self._now = now
        self._before = start
        self._since = now()
        self._paused_at: float | None = None

    def seconds(self) -> float:
        """Seconds of the run so far, without pauses."""
        paused_at = self._paused_at  # read once: the live view reads it from another thread
        now = self._now() if paused_at is None else paused_at
        return self._before + (now - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the block; nested pauses have no effect."""
        if self._paused_at is not None:
            yield
            return
        self._paused_at = self._now()
        try:
            yield
        finally:
            self._before, self._since = self.seconds(), self._now()
            self._paused_at = None


class VirtualClock:
    """Simulated seconds, advanced only by the simulated parts."""

    def __init__(self) -> None:
        """Start at zero."""
        self._seconds = 0.0

    def seconds(self) -> float:
        """Simulated seconds so far."""
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        if seconds < 0:
            raise ValueError(f"a clock must not go backwards, got {seconds} seconds")
        self._seconds += seconds
