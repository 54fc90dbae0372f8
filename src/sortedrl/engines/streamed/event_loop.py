"""An event loop in a thread of its own, for a caller that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSE_SECONDS = 10.0


class EventLoop:
    """Runs coroutines in the background; the thread ends with the process if it is not closed."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], *, seconds: float | None = None) -> T:
        """What a coroutine gives; after so many seconds it is cancelled, and a `TimeoutError`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise

    def start(
        self, work: Coroutine[Any, Any, None], *, ended: Callable[[BaseException | None], None]
    ) -> Future[None]:
        """Run a coroutine beside the caller; `ended` is told in the end what went wrong, if any.

        It is told of one that is cancelled before it began, too.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda done: ended(None if done.cancelled() else done.exception()))
        return future

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
