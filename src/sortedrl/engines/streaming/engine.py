"""An external engine behind the engine protocol, over streams of tokens.

    trajectories -> requests -> backend, on its own event loop -> chunks -> trajectories

The streams run in the background; everything else happens in the caller's thread. So an answer is
in exactly one place: being generated, complete, or given back. Its tokens are those that were read
from its stream, whatever happens to the engine meanwhile.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sortedrl.engines.sampling import Sampling, checked_limit, joined
from sortedrl.engines.streaming.backend import Ask, Backend, End, Piece, Streams, Word
from sortedrl.errors import EngineError, EngineLost, RequestError
from sortedrl.types import FinishReason, Key, Segment, Step, Trajectory, Weights, impossible_logprob


@dataclass(slots=True, eq=False)
class Tally:
    """Counts every token once, and stamps it with the version that was asked to write it."""

    trajectory: Trajectory
    ask: Ask
    version: int
    tolerance: float | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_begun: bool = False
    is_faulty: bool = False
    """Whether a piece could not be taken: what comes after it would leave a gap."""
    end: End | None = None

    @property
    def key(self) -> Key:
        """The name of the trajectory."""
        return self.trajectory.key

    @property
    def is_verified(self) -> bool:
        """Whether tokens of older weights must be verified, which an outside engine cannot do."""
        return is_finite(self.tolerance)

    def take(self, piece: Piece, *, engine: str) -> None:
        """Add the next tokens of the stream, all or none of them; `engine` is for messages."""
        self.has_begun = True
        self.is_faulty = True
        self._check(piece, engine)
        self.is_faulty = False
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.end = piece.end

    def _check(self, piece: Piece, engine: str) -> None:
        tokens, logprobs = piece.tokens, piece.logprobs
        name = f"{engine}: the answer to prompt {self.key[0]}, sample {self.key[1]},"
        if len(tokens) != len(logprobs):
            raise EngineError(
                f"{name} came with {len(logprobs)} log-probabilities for {len(tokens)} tokens; "
                "every token needs its own, or it cannot be trained on"
            )
        if len(self.tokens) + len(tokens) > self.ask.max_tokens:
            raise EngineError(
                f"{name} may have {self.ask.max_tokens} more tokens, "
                f"got {len(self.tokens) + len(tokens)}"
            )
        place = impossible_logprob(logprobs)
        if place is not None:
            position = self.trajectory.num_tokens + len(self.tokens) + place
            raise EngineError(
                f"{name} came with {logprobs[place]} as the log-probability of its token "
                f"{position} (counted from 0), which must be a finite number, at most 0: the "
                "engine's model is damaged or overflows. Look at its weights and precision, then "
                "go on from the last checkpoint (--resume)"
            )

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete; `None` if it is not, or was broken off.

        Engines differ in what they call a stop token that is the last one allowed.
        """
        if self.end == "abort" or self.end is None:
            return None
        is_stopped = bool(self.tokens) and self.tokens[-1] in self.ask.stop_tokens
        return "stop" if is_stopped else self.end

    def result(self) -> Trajectory:
        """The trajectory as it stands."""
        segments = self.trajectory.segments
        if self.tokens:
            fresh = Segment(tuple(self.tokens), tuple(self.logprobs), self.version)
            segments = joined(segments, fresh)
        return replace(
            self.trajectory,
            segments=segments,
            decoded_tokens=self.trajectory.decoded_tokens + len(self.tokens),
            finish_reason=self.finish_reason,
        )


def is_finite(tolerance: float | None) -> bool:
    """Whether a tolerance asks for cached tokens to be verified."""
    return tolerance is not None and tolerance < math.inf


def closing(trajectory: Trajectory, stop_tokens: frozenset[int], limit: int) -> FinishReason | None:
    """Why an answer that comes with tokens is complete already; `None` if it is not."""
    if trajectory.segments and trajectory.segments[-1].tokens[-1] in stop_tokens:
        return "stop"
    return "length" if trajectory.num_tokens >= limit else None


Limit = Callable[[Trajectory], int]
_STOP_SECONDS = 60.0
_ABORT_AGAIN_SECONDS = 1.0
_CANCEL_SECONDS = 5.0
_SILENCE_SECONDS = 900.0

NO_COUPLING = (
    "an outside engine draws with noise of its own, so it cannot tell which cached tokens the new "
    "weights would write again; take mode partial (keeps them, corrected) or on_policy (draws "
    "anew), or the native engine, which has coupled mode"
)


class StreamedEngine:
    """An `Engine` over a backend."""

    def __init__(
        self,
        opening: Callable[[], Coroutine[Any, Any, Backend]],
        *,
        max_tokens: int | Limit,
        stop_tokens: Sequence[int],
        sampling: Sampling | None = None,
        version: int = 0,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        """Open the backend on an event loop of its own; its weights are those of `version`.

        An engine that writes nothing for `silence_seconds`, though it should, is lost.
        """
        self.version = version
        self.sampling = sampling if sampling is not None else Sampling()
        self._limit = max_tokens if callable(max_tokens) else (lambda _: max_tokens)
        self._stop_tokens = frozenset(stop_tokens)
        self._silence_seconds = silence_seconds
        self._open: dict[str, Tally] = {}
        self._complete: list[Trajectory] = []
        self._failure: BaseException | None = None
        self._unreported = 0
        self._prefilled = 0
        self._asked = 0
        self._id_start = uuid.uuid4().hex[:12]
        self._is_closed = False
        self._is_stopping = False
        self._streams = Streams(opening)

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self._streams.backend.name

    @property
    def slots(self) -> int:
        """Answers written at the same time; more may be submitted and will queue."""
        return self._streams.backend.limits.slots

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work in order of priority; all of it or, if one is impossible, none."""
        limits = [self._limit(trajectory) for trajectory in trajectories]
        self._submit(trajectories, limits, tolerance=tolerance, sampling=self.sampling)

    def check(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
        max_tokens: int | None,
    ) -> None:
        """Raise the `RequestError` that submitting these would raise; nothing is taken on."""
        limits = [self._limit(t) if max_tokens is None else max_tokens for t in trajectories]
        self._checked_all(trajectories, limits, tolerance=tolerance, sampling=sampling)

    def submit_with(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        """The same with other sampling and another limit."""
        limits = [max_tokens] * len(trajectories)
        self._submit(trajectories, limits, tolerance=tolerance, sampling=sampling)

    def step(self) -> Step:
        """Wait until at least one token was written or an answer is complete."""
        decoded, self._unreported = self._unreported, 0
        while self._open and not (decoded or self._complete):
            if self._failure is None:
                decoded += self._absorb(self._silence_seconds)
            if self._failure is not None:
                self._unreported = decoded
                raise self._failure
        finished, self._complete = self._complete, []
        prefilled, self._prefilled = self._prefilled, 0
        return Step(finished=tuple(finished), decoded_tokens=decoded, prefilled_tokens=prefilled)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory with its tokens so far.

        It does so even if the engine is lost. An answer that was completed meanwhile comes back
        as unfinished too: submitted again, it is complete at once.
        """
        return [replace(tally.result(), finish_reason=None) for tally in self._stop()] + [
            replace(trajectory, finish_reason=None) for trajectory in self._take_complete()
        ]

    def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on.

        What runs is stopped and taken on again, so that every token has the version of the
        weights that wrote it.
        """
        for tally in self._open.values():
            if tally.is_verified:
                raise RequestError(f"trajectory {tally.key} is running: {self.name}: {NO_COUPLING}")
        stopped = self._stop()
        try:
            self._refuse_lost()
            self._streams.load_weights(weights)
        except BaseException as error:
            self._open = {tally.ask.id: tally for tally in stopped}
            self._fail(error)
            raise
        self.version = weights.version
        for tally in stopped:
            limit = tally.ask.max_tokens + tally.trajectory.num_tokens
            self._take_on(
                tally.result(), limit, tolerance=tally.tolerance, sampling=tally.ask.sampling
            )

    def close(self) -> None:
        """Let go of the engine; what it was writing is given up."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail(EngineLost(f"{self.name} was closed"))
        self._streams.close()

    def _submit(
        self,
        trajectories: Sequence[Trajectory],
        limits: Sequence[int],
        *,
        tolerance: float | None,
        sampling: Sampling,
    ) -> None:
        self._refuse_lost()
        checked = self._checked_all(trajectories, limits, tolerance=tolerance, sampling=sampling)
        for trajectory, limit in zip(trajectories, checked, strict=True):
            self._take_on(trajectory, limit, tolerance=tolerance, sampling=sampling)

    def _take_on(
        self, trajectory: Trajectory, limit: int, *, tolerance: float | None, sampling: Sampling
    ) -> None:
        """Have it written, unless it came complete."""
        reason = closing(trajectory, self._stops(sampling), limit)
        if reason is None:
            self._ask(trajectory, limit, tolerance=tolerance, sampling=sampling)
        else:
            self._complete.append(replace(trajectory, finish_reason=reason))

    def _checked_all(
        self,
        trajectories: Sequence[Trajectory],
        limits: Sequence[int],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
    ) -> list[int]:
        """The limits within the engine's context; refuses what can never be written."""
        if sampling is not None and sampling.stop_strings:
            raise RequestError(
                f"{self.name} is asked for tokens, not for text: it cannot stop at "
                f"{sampling.stop_strings[0]!r}; use stop tokens"
            )
        if tolerance is not None and not tolerance >= 0:
            raise RequestError(f"tolerance must be 0 or more nats, got {tolerance}")
        return [
            self._checked(trajectory, limit, tolerance)
            for trajectory, limit in zip(trajectories, limits, strict=True)
        ]

    def _checked(self, trajectory: Trajectory, limit: int, tolerance: float | None) -> int:
        if is_finite(tolerance) and any(s.version != self.version for s in trajectory.segments):
            raise RequestError(f"trajectory {trajectory.key}: {self.name}: {NO_COUPLING}")
        limits = self._streams.backend.limits
        return checked_limit(
            trajectory, limit, vocabulary=limits.vocabulary, context=limits.context
        )

    def _stops(self, sampling: Sampling) -> frozenset[int]:
        return self._stop_tokens if sampling.stop_tokens is None else sampling.stop_tokens

    def _ask(
        self, trajectory: Trajectory, limit: int, *, tolerance: float | None, sampling: Sampling
    ) -> None:
        number, self._asked = self._asked, self._asked + 1
        ask = Ask(
            id=f"{self._id_start}-{number:010d}",
            tokens=(*trajectory.prompt.tokens, *trajectory.tokens),
            max_tokens=limit - trajectory.num_tokens,
            stop_tokens=self._stops(sampling),
            sampling=sampling,
            priority=number,
        )
        self._open[ask.id] = Tally(trajectory, ask, self.version, tolerance)
        self._streams.start(ask)

    def _absorb(self, seconds: float) -> int:
        """Wait for something to come, and take in all that is there; gives the new tokens."""
        word = self._streams.next(seconds)
        if word is None:
            self._fail(EngineLost(f"{self.name} has written nothing for {seconds:.0f} seconds"))
            return 0
        decoded = self._take(word)
        while self._streams.has_news:
            decoded += self._take(self._streams.next(0))
        return decoded

    def _take(self, word: Word | None) -> int:
        """Take in a word of a stream; gives the new tokens."""
        if word is None:
            return 0
        tally, content = self._open.get(word.ask_id), word.content
        if isinstance(content, Piece):
            return 0 if tally is None or tally.is_faulty else self._take_piece(tally, content)
        if content is not None:
            self._fail(content)
        elif tally is not None and not (tally.is_faulty or self._is_stopping):
            self._fail(EngineLost(f"{self.name} broke an answer off without being asked to"))
        return 0

    def _take_piece(self, tally: Tally, piece: Piece) -> int:
        if not tally.has_begun and piece.tokens:
            self._prefilled += len(tally.ask.tokens) - piece.reused_tokens
        try:
            tally.take(piece, engine=self.name)
        except EngineError as error:
            self._fail(error)
            return 0
        if tally.finish_reason is not None:
            del self._open[tally.ask.id]
            self._complete.append(tally.result())
        return len(piece.tokens)

    def _fail(self, error: BaseException) -> None:
        """Keep what went wrong first; but that the engine is gone counts for more."""
        if self._failure is None or (isinstance(error, EngineLost) and not self._is_lost):
            self._failure = error

    @property
    def _is_lost(self) -> bool:
        return isinstance(self._failure, EngineLost)

    def _refuse_lost(self) -> None:
        if isinstance(self._failure, EngineLost):
            raise self._failure

    def _stop(self) -> list[Tally]:
        """End every stream; gives the unfinished ones with all that came of them."""
        self._is_stopping = True
        try:
            self._end_streams()
        finally:
            self._is_stopping = False
        stopped, self._open = list(self._open.values()), {}
        if not self._is_lost:
            self._failure = None
        return stopped

    def _end_streams(self) -> None:
        streams, again = self._streams, time.monotonic()
        until = again + _STOP_SECONDS
        while streams and not self._is_lost and time.monotonic() < until:
            # Repeated, because an answer may not have reached the engine when it was told to stop.
            if time.monotonic() >= again:
                self._abort()
                again = time.monotonic() + _ABORT_AGAIN_SECONDS
            self._unreported += self._take(streams.next(again - time.monotonic()))
        if streams and not self._is_lost:
            self._fail(EngineLost(f"{self.name} does not stop within {_STOP_SECONDS:.0f} seconds"))
        streams.cancel()
        until = time.monotonic() + _CANCEL_SECONDS
        while streams and time.monotonic() < until:
            self._unreported += self._take(streams.next(until - time.monotonic()))
        streams.forget()

    def _abort(self) -> None:
        try:
            self._streams.abort()
        except EngineLost as error:
            self._fail(error)

    def _take_complete(self) -> list[Trajectory]:
        complete, self._complete = self._complete, []
        return complete
