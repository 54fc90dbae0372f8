"""The streams of a backend: they run in the background, and what they give is read here.

The event loop's thread only fills the inbox. A stream is there from its start until its end was
read, so no word of it is lost; the last one is `None`, or the error that ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from sortedrl.engines.streamed.backend import Ask, Backend, Piece
from sortedrl.engines.streamed.event_loop import EventLoop
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

_ABORT_SECONDS = 60.0
_CLOSE_SECONDS = 120.0


class Word(NamedTuple):
    """What one stream gave: its next piece, or that it ended."""

    ask_id: str
    content: Piece | BaseException | None


class Streams:
    """The streams that run, on an event loop of their own."""

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, Backend]]) -> None:
        """Open the backend."""
        self._inbox: SimpleQueue[Word] = SimpleQueue()
        self._running: dict[str, Future[None]] = {}
        self._loop = EventLoop("outside engine")
        try:
            self.backend = self._loop.call(opening())
        except BaseException:
            self._loop.close()
            raise

    def __len__(self) -> int:
        """How many run, or have ended unread."""
        return len(self._running)

    def start(self, ask: Ask) -> None:
        """Have an answer written."""
        self._running[ask.id] = self._loop.start(
            self._follow(ask), ended=lambda error: self._inbox.put(Word(ask.id, error))
        )

    def next(self, seconds: float) -> Word | None:
        """The next word of any stream; `None` if there is none within so many seconds."""
        try:
            word = self._inbox.get(timeout=max(seconds, 0.001))
        except Empty:
            return None
        if not isinstance(word.content, Piece):
            self._running.pop(word.ask_id, None)
        return word

    @property
    def has_news(self) -> bool:
        """Whether a word can be read without waiting."""
        return not self._inbox.empty()

    def abort(self) -> None:
        """Tell the backend to break all of them off; they end later, each with its last word."""
        name = self.backend.name
        try:
            self._loop.call(self.backend.abort(list(self._running)), seconds=_ABORT_SECONDS)
        except EngineLost:
            raise
        except EngineError as error:
            raise EngineLost(f"{name} cannot be told to stop: {error}") from error
        except TimeoutError as error:
            raise EngineLost(f"{name} does not answer when it is told to stop") from error

    def cancel(self) -> None:
        """Follow none of them any more."""
        for stream in list(self._running.values()):
            stream.cancel()

    def forget(self) -> None:
        """Let those go that were cancelled and never said so."""
        self._running.clear()

    def load_weights(self, weights: Weights) -> None:
        """Hand weights to the backend, and wait."""
        self._loop.call(self.backend.load_weights(weights))

    def close(self) -> None:
        """Close the backend and end the thread."""
        self.cancel()
        try:
            self._loop.call(self.backend.close(), seconds=_CLOSE_SECONDS)
        except TimeoutError as error:
            raise EngineLost(
                f"{self.backend.name} does not close within {_CLOSE_SECONDS:.0f} seconds; "
                "what it has started may be left behind"
            ) from error
        finally:
            self._loop.close()

    async def _follow(self, ask: Ask) -> None:
        async for piece in self.backend.stream(ask):
            self._inbox.put(Word(ask.id, piece))
