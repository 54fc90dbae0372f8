"""The protocol of an external engine: a request in, a stream of tokens out.

    request -> stream of chunks of tokens -> the last chunk says how it ended

A backend keeps no state about answers: it passes on what the external engine says, in order. Who
asked, which weights wrote and what was cached before is known to the `StreamedEngine` above it.

The streams run on an event loop in a thread of its own, which only fills an inbox; the caller reads
it. A stream exists from its start until its end was read, so nothing of it is lost; its last entry
is `None`, or the error that ended it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

End = Literal["stop", "length", "abort"]
"""How a stream ended: the model ended the answer, the limit was reached, or it was broken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer to be written, or to be written on."""

    id: str
    """Of fixed width, so that none is the beginning of another, and used once."""
    tokens: Sequence[int]
    """The prompt and what is already there of the answer."""
    max_tokens: int
    """Tokens that may be added; at least 1."""
    stop_tokens: frozenset[int]
    """Tokens that end the answer, and belong to it. No others do, not even the model's own."""
    sampling: Sampling
    priority: int
    """Lower goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next tokens of an answer, each with its log-probability.

    The log-probability is that of the distribution it was drawn from: after temperature and
    filters. Of a greedy choice it is that of temperature 1.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: End | None = None
    """Known in the last piece, which may have no tokens."""
    reused_tokens: int = 0
    """Of the tokens of the ask, those that were not computed again; known in the first piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an outside engine can be asked for."""

    slots: int
    """Answers written at the same time; more may be asked for and will queue."""
    context: int
    """Tokens of prompt and answer together."""
    vocabulary: int
    """Token ids lie below."""


class Backend(Protocol):
    """An outside engine; every method is called on the same event loop."""

    @property
    def name(self) -> str:
        """What it is and which version, for messages."""

    @property
    def limits(self) -> Limits:
        """What it can be asked for."""

    def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        """Write an answer; raises `EngineLost` where the engine is gone."""

    async def abort(self, ids: Sequence[str]) -> None:
        """Break these answers off: each stream ends with what it had, and `end` is "abort".

        A stream that has ended in the meantime is left as it is.
        """

    async def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on, and forget every cached prefix.

        Nothing is being written. `weights.tensors` are those of the trainer, by the names that
        the model's checkpoint has.
        """

    async def close(self) -> None:
        """Let go of everything: processes, files, connections."""


T = TypeVar("T")
_LOOP_CLOSE_SECONDS = 10.0


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
        self._thread.join(_LOOP_CLOSE_SECONDS)
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
