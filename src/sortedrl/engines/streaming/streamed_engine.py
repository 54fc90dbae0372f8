"""An external engine behind the engine protocol, over streams of tokens.

    trajectories -> requests -> backend, on its own event loop -> deltas -> trajectories

Streams run in the background; everything else happens in the caller's thread, so an answer is in
exactly one place: being generated, complete, or returned. Its tokens are those that were read from
its stream, regardless of what happens to the engine in the meantime.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sortedrl.core.randomness import mix
from sortedrl.engines.generation import TokenScores
from sortedrl.engines.sampling import MaxTokens, RequestLimits, Sampling, joined, must_verify
from sortedrl.engines.streaming.backend import (
    Backend,
    Delta,
    GenerationRequest,
    StreamEnd,
    StreamEvent,
    Streams,
)
from sortedrl.errors import EngineError, EngineLost, RequestError
from sortedrl.types import FinishReason, Key, Segment, Step, Trajectory, Weights, impossible_logprob

_STOP_SECONDS = 60.0
_ABORT_AGAIN_SECONDS = 1.0
_CANCEL_SECONDS = 5.0
_SILENCE_SECONDS = 900.0

_NO_STOP_STRINGS = "it exchanges tokens, not text; use stop tokens"
_NO_VERIFICATION = (
    "an external engine samples with its own random numbers, so cached tokens cannot be verified "
    "under the new weights; use mode partial (keeps them, with a correction) or "
    "on_policy (samples again), or the native engine, which has coupled mode"
)
_UNSEEDED = "it was opened to sample with its own random numbers (is_seeded)"
# Engines keep seeds as signed 64-bit numbers.
_SEED_BITS = 63


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A trajectory that is being generated: its tokens so far, each counted once.

    Every token is stamped with the version of the weights at the time of the request.
    """

    trajectory: Trajectory
    request: GenerationRequest
    version: int
    tolerance: float | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_begun: bool = False
    is_faulty: bool = False
    """Whether a delta was refused: later ones would leave a gap."""
    end: StreamEnd | None = None

    @property
    def key(self) -> Key:
        """The key of the trajectory."""
        return self.trajectory.key

    def append(self, delta: Delta, *, engine: str) -> None:
        """Append the next tokens of the stream, all or none of them; `engine` is for messages."""
        self.has_begun = True
        self.is_faulty = True
        self._check(delta, engine)
        self.is_faulty = False
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.end = delta.end

    def _check(self, delta: Delta, engine: str) -> None:
        tokens, logprobs = delta.tokens, delta.logprobs
        name = f"{engine}: the answer to prompt {self.key[0]}, sample {self.key[1]},"
        if len(tokens) != len(logprobs):
            raise EngineError(
                f"{name} came with {len(logprobs)} log-probabilities for {len(tokens)} tokens; "
                "every token needs its own, or it cannot be trained on"
            )
        if len(self.tokens) + len(tokens) > self.request.max_tokens:
            raise EngineError(
                f"{name} may have {self.request.max_tokens} more tokens, "
                f"got {len(self.tokens) + len(tokens)}"
            )
        place = impossible_logprob(logprobs)
        if place is not None:
            position = self.trajectory.num_tokens + len(self.tokens) + place
            raise EngineError(
                f"{name} came with {logprobs[place]} as the log-probability of its token "
                f"{position} (counted from 0), which must be a finite number, at most 0: the "
                "engine's model is damaged or overflows. Check its weights and precision, then "
                "resume from the last checkpoint (--resume)"
            )

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete; `None` if it is not, or was aborted.

        Engines differ in what they report for a stop token at the token limit.
        """
        if self.end == "abort" or self.end is None:
            return None
        is_stopped = bool(self.tokens) and self.tokens[-1] in self.request.stop_tokens
        return "stop" if is_stopped else self.end

    def result(self) -> Trajectory:
        """The trajectory so far."""
        segments = self.trajectory.segments
        if self.tokens:
            given = tuple(self.trajectory.given)
            fresh = Segment(tuple(self.tokens), tuple(self.logprobs), self.version, given)
            segments = joined(segments, fresh)
        return replace(
            self.trajectory,
            segments=segments,
            given=() if self.tokens else self.trajectory.given,
            decoded_tokens=self.trajectory.decoded_tokens + len(self.tokens),
            finish_reason=self.finish_reason,
        )


class StreamedEngine:
    """An engine over a backend."""

    def __init__(
        self,
        opening: Callable[[], Coroutine[Any, Any, Backend]],
        *,
        max_tokens: MaxTokens,
        stop_tokens: Sequence[int],
        sampling: Sampling | None = None,
        version: int = 0,
        is_seeded: bool = False,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        """Open the backend on its own event loop; its weights are those of `version`.

        If `is_seeded`, every answer is sampled from its own seed, so the same weights sample it
        again. An engine that has work but sends nothing for `silence_seconds` is lost.
        """
        self.version = version
        self.sampling = sampling if sampling is not None else Sampling()
        self._stop_tokens = frozenset(stop_tokens)
        self._is_seeded = is_seeded
        self._silence_seconds = silence_seconds
        self._open: dict[str, OpenRequest] = {}
        self._complete: list[Trajectory] = []
        self._failure: BaseException | None = None
        self._unreported = 0
        self._prefilled = 0
        self._num_requests = 0
        self._id_start = uuid.uuid4().hex[:12]
        self._is_closed = False
        self._is_stopping = False
        self._is_asleep = False
        self._streams = Streams(opening)
        limits = self._streams.backend.limits
        self._limits = RequestLimits(
            engine=self.name,
            vocabulary=limits.vocabulary,
            context=limits.context,
            max_tokens=max_tokens,
            sampling=self.sampling,
            no_stop_strings=_NO_STOP_STRINGS,
            no_verification=_NO_VERIFICATION,
            no_seeds=limits.no_seeds if is_seeded else _UNSEEDED,
        )

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self._streams.backend.name

    @property
    def slots(self) -> int:
        """Answers generated at the same time; more can be submitted and are queued."""
        return self._streams.backend.limits.slots

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """What a request must satisfy."""
        return (self._limits,)

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work in order of priority: all of it, or none if one is refused."""
        self._refuse_lost()
        if self._is_asleep and trajectories:
            raise EngineError(
                f"{self.name} sleeps and has dropped its weights; call load_weights() first"
            )
        sampling = self.sampling if sampling is None else sampling
        limits = self._limits.check(
            trajectories, tolerance=tolerance, sampling=sampling, version=self.version
        )
        for trajectory, limit in zip(trajectories, limits, strict=True):
            self._start(trajectory, limit, tolerance=tolerance, sampling=sampling)

    def step(self) -> Step:
        """Wait until at least one token was decoded or an answer is complete."""
        decoded, self._unreported = self._unreported, 0
        while self._open and not (decoded or self._complete):
            if self._failure is None:
                decoded += self._receive(self._silence_seconds)
            if self._failure is not None:
                self._unreported = decoded
                raise self._failure
        finished, self._complete = self._complete, []
        prefilled, self._prefilled = self._prefilled, 0
        return Step(finished=tuple(finished), decoded_tokens=decoded, prefilled_tokens=prefilled)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and return every unfinished trajectory with its tokens so far.

        This works even if the engine is lost. An answer completed meanwhile is returned as
        unfinished
        too: submitted again, it is complete at once.
        """
        stopped = [stopped.result() for stopped in self._stop()]
        complete, self._complete = self._complete, []
        return [replace(trajectory, finish_reason=None) for trajectory in (*stopped, *complete)]

    def load_weights(self, weights: Weights) -> None:
        """Use these weights from now on.

        Running requests are stopped and started again, so that every token has the version of the
        weights that sampled it.
        """
        for running in self._open.values():
            if must_verify(running.tolerance):
                raise RequestError(
                    f"trajectory {running.key} is running: {self.name}: {_NO_VERIFICATION}"
                )
        stopped = self._stop()
        try:
            self._refuse_lost()
            self._streams.load_weights(weights)
        except BaseException as error:
            self._open = {running.request.id: running for running in stopped}
            self._fail(error)
            raise
        self.version = weights.version
        self._is_asleep = False
        for running in stopped:
            limit = running.request.max_tokens + running.trajectory.num_tokens
            self._start(
                running.result(),
                limit,
                tolerance=running.tolerance,
                sampling=running.request.sampling,
            )

    def score(
        self, trajectories: Sequence[Trajectory], *, sampling: Sampling | None = None
    ) -> list[TokenScores]:
        """Score the tokens of answers under the present weights; the engine must be idle.

        Only at temperature 1 and without filters: external engines score a prompt before these.
        """
        self._require_idle("score")
        sampling = self.sampling if sampling is None else sampling
        if sampling.temperature != 1 or sampling.is_filtered:
            raise RequestError(
                f"{self.name} scores tokens at temperature 1 and without top_k, top_p and min_p, "
                f"got {sampling}; pass Sampling(temperature=1), or use the native engine"
            )
        rows = []
        for trajectory in trajectories:
            exact = replace(sampling, stop_strings=(), max_tokens=max(1, trajectory.num_tokens))
            self._limits.check([trajectory], tolerance=None, sampling=exact, version=self.version)
            tokens = [*trajectory.prompt.tokens, *trajectory.response]
            if len(tokens) >= self._limits.context:
                raise RequestError(
                    f"trajectory {trajectory.key} fills the context of {self.name} "
                    f"({self._limits.context} tokens), which needs one more to score it"
                )
            rows.append((tokens, len(trajectory.prompt.tokens)))
        scored = [row for row, t in zip(rows, trajectories, strict=True) if t.num_tokens]
        found = iter(self._streams.score(scored))
        return [
            TokenScores(_written(trajectory, next(found)) if trajectory.num_tokens else [])
            for trajectory in trajectories
        ]

    def sleep(self) -> bool:
        """Free the GPU memory of the engine; it must be idle.

        Returns whether it has dropped its weights, so that `load_weights` must come next.
        """
        self._require_idle("sleep")
        if not self._is_asleep:
            self._is_asleep = self._streams.sleep()
        return self._is_asleep

    def wake(self) -> None:
        """Do nothing: it wakes when it gets weights."""

    def close(self) -> None:
        """Close the backend; unfinished answers are dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail(EngineLost(f"{self.name} was closed"))
        self._streams.close()

    def _start(
        self, trajectory: Trajectory, limit: int, *, tolerance: float | None, sampling: Sampling
    ) -> None:
        """Start the stream of an answer, unless it came complete."""
        stop_tokens = sampling.stop_tokens
        stop_tokens = self._stop_tokens if stop_tokens is None else stop_tokens
        tokens = (*trajectory.prompt.tokens, *trajectory.response)
        room = self._limits.max_length_of(trajectory, sampling) - len(tokens)
        max_tokens = min(limit - trajectory.num_tokens, room)
        reason = _reason_to_finish(trajectory, stop_tokens, max_tokens)
        if reason is not None:
            self._complete.append(replace(trajectory, given=(), finish_reason=reason))
            return
        number, self._num_requests = self._num_requests, self._num_requests + 1
        request = GenerationRequest(
            id=f"{self._id_start}-{number:010d}",
            tokens=tokens,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            sampling=sampling,
            priority=number,
            seed=_seed(trajectory) if self._is_seeded else None,
        )
        self._open[request.id] = OpenRequest(trajectory, request, self.version, tolerance)
        self._streams.start(request)

    def _receive(self, seconds: float) -> int:
        """Wait for an event, and apply all that are there; returns the number of new tokens."""
        event = self._streams.next(seconds)
        if event is None:
            self._fail(EngineLost(f"{self.name} has sent nothing for {seconds:.0f} seconds"))
            return 0
        decoded = self._apply(event)
        while self._streams.has_events:
            decoded += self._apply(self._streams.next(0))
        return decoded

    def _apply(self, event: StreamEvent | None) -> int:
        """Apply an event of a stream; returns the number of new tokens."""
        if event is None:
            return 0
        running, content = self._open.get(event.request_id), event.content
        if isinstance(content, Delta):
            return 0 if running is None or running.is_faulty else self._append(running, content)
        if content is not None:
            self._fail(content)
        elif running is not None and not (running.is_faulty or self._is_stopping):
            self._fail(EngineLost(f"{self.name} ended a stream before the answer was complete"))
        return 0

    def _append(self, running: OpenRequest, delta: Delta) -> int:
        if not running.has_begun and delta.tokens:
            self._prefilled += len(running.request.tokens) - delta.num_cached_tokens
        try:
            running.append(delta, engine=self.name)
        except EngineError as error:
            self._fail(error)
            return 0
        if running.finish_reason is not None:
            del self._open[running.request.id]
            self._complete.append(running.result())
        return len(delta.tokens)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error; but the loss of the engine takes precedence."""
        if self._failure is None or (isinstance(error, EngineLost) and not self._is_lost):
            self._failure = error

    @property
    def _is_lost(self) -> bool:
        return isinstance(self._failure, EngineLost)

    def _require_idle(self, what: str) -> None:
        self._refuse_lost()
        if self._open:
            raise EngineError(
                f"{self.name} must be idle to {what}, but it is generating {len(self._open)} "
                "answers; call interrupt() first"
            )

    def _refuse_lost(self) -> None:
        if isinstance(self._failure, EngineLost):
            raise self._failure

    def _stop(self) -> list[OpenRequest]:
        """End every stream; returns the unfinished requests with all their tokens."""
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
            # Repeated, because a request may not have reached the engine at the first abort.
            if time.monotonic() >= again:
                self._abort()
                again = time.monotonic() + _ABORT_AGAIN_SECONDS
            self._unreported += self._apply(streams.next(again - time.monotonic()))
        if streams and not self._is_lost:
            self._fail(EngineLost(f"{self.name} does not stop within {_STOP_SECONDS:.0f} seconds"))
        streams.cancel()
        until = time.monotonic() + _CANCEL_SECONDS
        while streams and time.monotonic() < until:
            self._unreported += self._apply(streams.next(until - time.monotonic()))
        streams.forget()

    def _abort(self) -> None:
        try:
            self._streams.abort()
        except EngineLost as error:
            self._fail(error)


def _written(trajectory: Trajectory, logprobs: Sequence[float]) -> list[float]:
    """Of the log-probabilities of a whole response, those of the policy's own tokens."""
    marked = zip(logprobs, trajectory.loss_mask, strict=True)
    return [logprob for logprob, is_written in marked if is_written]


def _seed(trajectory: Trajectory) -> int:
    """The seed of a request for the rest of an answer.

    Some engines key their noise by position, others by the number of tokens sampled for a request.
    A request that continues an answer therefore has another seed than the one that started it: it
    never reuses the noise of the first tokens.
    """
    key = mix(trajectory.seed, trajectory.attempt, trajectory.num_tokens)
    return key >> (64 - _SEED_BITS)


def _reason_to_finish(
    trajectory: Trajectory, stop_tokens: frozenset[int], max_tokens: int
) -> FinishReason | None:
    """Why an answer that may have `max_tokens` more is complete already; `None` if it is not."""
    has_written = bool(trajectory.segments) and not trajectory.given
    if has_written and trajectory.segments[-1].tokens[-1] in stop_tokens:
        return "stop"
    return "length" if max_tokens <= 0 else None
