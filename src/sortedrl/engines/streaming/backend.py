"""The protocol of an external engine: a request in, a stream of tokens out.

    request -> deltas of tokens -> the last delta says how the stream ended

A backend keeps no state about answers: it forwards what the external engine sends, in order. The
`StreamedEngine` above it knows the trajectory, the version of the weights and the cached tokens.

Streams run on an event loop in a separate thread, which only fills an inbox that the caller reads.
A stream exists until its end was read, so nothing is lost; the content of its last event is `None`,
or the error that ended it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

StreamEnd = Literal["stop", "length", "abort"]
"""How a stream ended: at a stop token, at the token limit, or aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer to generate, or to continue."""

    id: str
    """Unique, and of fixed width, so that no id is a prefix of another."""
    tokens: Sequence[int]
    """The prompt and the tokens of the answer so far."""
    max_tokens: int
    """Maximum number of new tokens; at least 1."""
    stop_tokens: frozenset[int]
    """Tokens that end the answer and belong to it; the model's own stop tokens do not count."""
    sampling: Sampling
    priority: int
    """Lower values go first."""
    seed: int | None = None
    """The same seed gives the same tokens from the same weights; `None` for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next tokens of an answer, each with its log-probability.

    The log-probability is that of the distribution the token was sampled from: after temperature
    and filters. For greedy decoding it is that at temperature 1.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: StreamEnd | None = None
    """Set in the last delta, which may have no tokens."""
    num_cached_tokens: int = 0
    """Request tokens found in the prefix cache; set in the first delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLimits:
    """What an external engine can do."""

    slots: int
    """Answers generated at the same time; more requests queue."""
    context: int
    """Tokens of prompt and answer together."""
    vocabulary: int
    """Token ids lie below."""
    no_seeds: str | None = None
    """Why the seed of a request has no effect; `None` if it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequirements:
    """What a run needs of a running server."""

    vocabulary: int
    """Vocabulary size of the trained model."""
    context: int
    """Minimum context: prompt and answer tokens."""
    temperature: float
    slots: int | None = None
    """`None` for those that the server was started with."""
    needs_seeds: bool = False
    """Whether every answer has its own seed (mode redraw)."""


class Backend(Protocol):
    """An external engine; every method is called on the same event loop."""

    @property
    def name(self) -> str:
        """Name and version, for messages."""

    @property
    def limits(self) -> BackendLimits:
        """What it can do."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Generate an answer; raises `EngineLost` if the engine is gone."""

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these requests: each stream ends with its tokens so far, and `end` is "abort".

        A stream that has ended in the meantime stays as it is.
        """

    async def load_weights(self, weights: Weights) -> None:
        """Load these weights and reset the prefix cache; no request is running.

        `weights.tensors` are those of the trainer, by their names in the model's checkpoint.
        """

    async def score(self, tokens: Sequence[int], *, start: int) -> list[float]:
        """Log-probabilities at temperature 1 of the tokens from `start` on, without generating."""

    async def sleep(self) -> bool:
        """Free the GPU memory of weights and cache, if opened for that; it must be idle.

        Returns whether the weights were dropped, so that `load_weights` must come next.
        """

    async def close(self) -> None:
        """Release everything: processes, files, connections."""


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
        """The result of a coroutine; after `seconds` it is cancelled with a `TimeoutError`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise

    def start(
        self, work: Coroutine[Any, Any, None], *, ended: Callable[[BaseException | None], None]
    ) -> Future[None]:
        """Run a coroutine in the background; `ended` is called with its error or `None`.

        It is also called for a coroutine that is cancelled before it began.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda done: ended(None if done.cancelled() else done.exception()))
        return future

    def finish(self, *, seconds: float) -> None:
        """Wait until nothing runs, but no longer than that."""

        async def others_end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others)

        with suppress(TimeoutError):
            self.call(others_end(), seconds=seconds)

    def close(self) -> None:
        """Cancel what is running, and end the thread."""
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
_OPEN_SECONDS = 600.0


class StreamEvent(NamedTuple):
    """What one stream sent: its next delta, or its end."""

    request_id: str
    content: Delta | BaseException | None


class Streams:
    """The running streams, on an event loop of their own."""

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, Backend]]) -> None:
        """Open the backend."""
        self._inbox: SimpleQueue[StreamEvent] = SimpleQueue()
        self._running: dict[str, Future[None]] = {}
        self._loop = EventLoop("external engine")
        opened: list[Backend] = []

        async def open_backend() -> None:
            opened.append(await opening())

        try:
            self._loop.call(open_backend())
        except BaseException:
            # The waiting caller may be interrupted; what is started meanwhile must not be leaked.
            self._loop.finish(seconds=_OPEN_SECONDS)
            for backend in opened:
                self._loop.call(backend.close(), seconds=_CLOSE_SECONDS)
            self._loop.close()
            raise
        (self.backend,) = opened

    def __len__(self) -> int:
        """Streams that are running, or whose end has not been read."""
        return len(self._running)

    def start(self, request: GenerationRequest) -> None:
        """Start the stream of a request."""
        self._running[request.id] = self._loop.start(
            self._follow(request),
            ended=lambda error: self._inbox.put(StreamEvent(request.id, error)),
        )

    def next(self, seconds: float) -> StreamEvent | None:
        """The next event of any stream; `None` if there is none within `seconds`."""
        try:
            event = self._inbox.get(timeout=max(seconds, 0.001))
        except Empty:
            return None
        if not isinstance(event.content, Delta):
            self._running.pop(event.request_id, None)
        return event

    @property
    def has_events(self) -> bool:
        """Whether an event can be read without waiting."""
        return not self._inbox.empty()

    def abort(self) -> None:
        """Abort all of them; they end later, each with its last event."""
        name = self.backend.name
        try:
            self._loop.call(self.backend.abort(list(self._running)), seconds=_ABORT_SECONDS)
        except EngineLost:
            raise
        except EngineError as error:
            raise EngineLost(f"{name} cannot be aborted: {error}") from error
        except TimeoutError as error:
            raise EngineLost(f"{name} does not respond to an abort") from error

    def cancel(self) -> None:
        """Cancel the tasks that read them."""
        for stream in list(self._running.values()):
            stream.cancel()

    def forget(self) -> None:
        """Drop streams that were cancelled and never reported it."""
        self._running.clear()

    def load_weights(self, weights: Weights) -> None:
        """Load weights into the backend, and wait."""
        self._loop.call(self.backend.load_weights(weights))

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[list[float]]:
        """Log-probabilities of the tokens of each row, from its start on."""

        async def all_scores() -> list[list[float]]:
            return await asyncio.gather(
                *(self.backend.score(tokens, start=start) for tokens, start in rows)
            )

        return self._loop.call(all_scores())

    def sleep(self) -> bool:
        """Have the backend free its GPU memory, and wait; whether it dropped its weights."""
        return self._loop.call(self.backend.sleep())

    def close(self) -> None:
        """Close the backend and end the thread."""
        self.cancel()
        try:
            self._loop.call(self.backend.close(), seconds=_CLOSE_SECONDS)
        except TimeoutError as error:
            raise EngineLost(
                f"{self.backend.name} does not close within {_CLOSE_SECONDS:.0f} seconds; "
                "processes that it started may be left behind"
            ) from error
        finally:
            self._loop.close()

    async def _follow(self, request: GenerationRequest) -> None:
        async for delta in self.backend.stream(request):
            self._inbox.put(StreamEvent(request.id, delta))
