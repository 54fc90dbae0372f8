"""A clean stop: the first Ctrl-C or SIGTERM asks for one, the second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Stopping:
    """Whether a stop was asked for, while it is entered."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is given a line for the person who asked."""
        self.is_asked = False
        self._tell = tell
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        """Listen to the signals; outside of the main thread there are none to listen to."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the signals to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal gave it

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_asked = True
        self._tell("stopping: this round is finished and saved first (Ctrl-C again: at once)")
