"""Time, as an argument: the wall clock of a real run, the virtual clock of a simulated one.

The seconds of a run are seconds of training: neither the time between a kill and the resume nor
the time of a pause (an evaluation) counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """Gives the seconds since the run began."""

    def seconds(self) -> float:
        """Seconds since the run began."""


class WallClock:
    """Real seconds, on a clock that never goes backwards."""

    def __init__(self, *, start: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        """Go on from `start` seconds, which a resumed run has behind it."""
        self._now = now
        self._before = start
        self._since = now()
        self._paused_at: float | None = None

    def seconds(self) -> float:
        """Seconds of the run so far, pauses left out."""
        paused_at = self._paused_at  # read once: a live view asks from another thread
        now = self._now() if paused_at is None else paused_at
        return self._before + (now - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still inside the block; a pause in a pause changes nothing."""
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
