"""One trajectory while the engine generates it: what is known, what is computed, what is in flight.

    tokens    prompt and answer as far as the host has read them
    pending   tokens sampled after those but not read yet: the device runs ahead of the host
    fed       positions whose row was given to the device, so that their keys are in the cache

A row is one position of one request. The row at position `p` takes in the token at `p`; if it is
sampled it gives the token at `p + 1`. A trajectory that cannot be generated is refused before it
becomes a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sortedrl.engines.native.cache import ROOT, CacheSize, Content
from sortedrl.engines.native.noise import stream
from sortedrl.engines.sampling import Sampling, checked_limit, joined
from sortedrl.errors import RequestError
from sortedrl.types import FinishReason, Segment, Trajectory

Decode = Callable[[list[int]], str]
_MARGIN_TOKENS = 8


@dataclass(slots=True, eq=False)
class Request:
    """A trajectory in the engine's queue or in one of its slots.

    `unchecked` counts the cached tokens that may fall under the present weights. While there are
    any, rows from the last one known to stand on are sampled and compared.
    """

    trajectory: Trajectory
    sampling: Sampling
    stop_tokens: frozenset[int]
    limit: int
    stream: int
    tolerance: float
    tokens: list[int]
    kept_segments: tuple[Segment, ...]
    unchecked: int
    decode: Decode | None = None
    logprobs: list[float] = field(default_factory=list)
    decoded: int = 0
    pending: int = 0
    in_flight: int = 0
    fed: int = 0
    prefill_end: int = 0
    life: int = 0
    age: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    remembered: int = 0
    content: Content = ROOT
    prompt_tokens: int = field(init=False)
    max_length: int = field(init=False)
    closes: FinishReason | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        """Notice an answer that came complete: it ends where it ended if all of it stands."""
        self.prompt_tokens = len(self.trajectory.prompt.tokens)
        self.max_length = self.prompt_tokens + self.limit
        if len(self.tokens) > self.prompt_tokens:
            self.closes = self._closing()
        if not self.unchecked:
            self.finish_reason = self.closes

    @property
    def end(self) -> int:
        """Positions that may be fed; the last token of a complete answer need not be."""
        end = len(self.tokens) + self.pending
        return end - 1 if self.closes is not None or end >= self.max_length else end

    @property
    def first_sampled(self) -> int:
        """The first position whose row is worth sampling."""
        return len(self.tokens) + self.pending - self.unchecked - 1

    def confirm(self, logprob: float) -> None:
        """The next cached token stands, with its log-probability under the present weights."""
        self.logprobs.append(logprob)
        self.unchecked -= 1
        if not self.unchecked:
            self.finish_reason = self.closes

    def part(self, token: int, logprob: float) -> None:
        """The next cached token falls, and all after it; the answer goes on with this one."""
        del self.tokens[len(self.tokens) - self.unchecked :]
        self.unchecked = 0
        self.closes = None
        self.life += 1
        self.fed = min(self.fed, len(self.tokens))
        self.accept(token, logprob)

    def accept(self, token: int, logprob: float) -> None:
        """The present weights wrote this token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.decoded += 1
        self.finish_reason = self._closing()

    def leave_cache(self) -> None:
        """Lose the slot and the blocks, but no token."""
        self.slot = None
        self.blocks = []
        self.fed = self.remembered = 0
        self.content = ROOT

    def result(self, version: int) -> Trajectory:
        """The trajectory as it stands; one whose tokens are still being checked is as it came."""
        if self.unchecked:
            return self.trajectory
        segments = self.kept_segments
        if self.logprobs:
            fresh = self.tokens[len(self.tokens) - len(self.logprobs) :]
            segments = joined(segments, Segment(tuple(fresh), tuple(self.logprobs), version))
        return replace(
            self.trajectory,
            segments=segments,
            decoded_tokens=self.trajectory.decoded_tokens + self.decoded,
            finish_reason=self.finish_reason,
        )

    def _closing(self) -> FinishReason | None:
        if self.tokens[-1] in self.stop_tokens:
            return "stop"
        if self.sampling.stop_strings and self._ends_in_stop_string():
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None

    def _ends_in_stop_string(self) -> bool:
        assert self.decode is not None, "stop strings need a tokenizer"
        # A token carries at least one byte, so what just appeared lies within the last few.
        longest = max(len(stop.encode()) for stop in self.sampling.stop_strings)
        tail = self.tokens[self.prompt_tokens :][-longest - _MARGIN_TOKENS :]
        text = self.decode(tail)
        return any(stop in text for stop in self.sampling.stop_strings)


class Tokenizer(Protocol):
    """The two things the engine asks of a tokenizer."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Text to `input_ids`."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Tokens to text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What a model can be asked to write."""

    vocabulary: int
    max_context: int
    stop_tokens: frozenset[int]
    cache: CacheSize
    tokenizer: Tokenizer | None

    def encoded(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """A prompt as tokens."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer; give it one, or prompts as tokens")
        return self.tokenizer(prompt)["input_ids"]

    def text(self, tokens: list[int]) -> str:
        """Tokens as a person reads them."""
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer; give it one to read answers as text")
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def request(
        self,
        trajectory: Trajectory,
        *,
        tolerance: float | None,
        limit: int,
        sampling: Sampling,
        version: int,
    ) -> Request:
        """A trajectory made ready to be written by weights of a version.

        Cached tokens of that version stand in any case: the weights wrote them.
        """
        tokens = [*trajectory.prompt.tokens, *trajectory.tokens]
        limit = self._checked_limit(trajectory, tokens, limit)
        if sampling.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give one to the engine")
        tolerance = math.inf if tolerance is None else tolerance
        if not tolerance >= 0:
            raise RequestError(f"tolerance must be 0 or more nats, got {tolerance}")
        stands = tolerance == math.inf or all(
            segment.version == version for segment in trajectory.segments
        )
        stop_tokens = sampling.stop_tokens
        return Request(
            trajectory=trajectory,
            sampling=sampling,
            stop_tokens=self.stop_tokens if stop_tokens is None else stop_tokens,
            limit=limit,
            stream=stream(trajectory.seed, trajectory.attempt),
            tolerance=tolerance,
            tokens=tokens,
            kept_segments=trajectory.segments if stands else (),
            unchecked=0 if stands else trajectory.num_tokens,
            decode=self.tokenizer.decode if self.tokenizer is not None else None,
        )

    def _checked_limit(self, trajectory: Trajectory, tokens: Sequence[int], limit: int) -> int:
        """The limit within the model's context; refuses what can never be written."""
        limit = checked_limit(
            trajectory, limit, vocabulary=self.vocabulary, context=self.max_context
        )
        prompt_tokens = len(trajectory.prompt.tokens)
        longest = max(len(tokens), prompt_tokens + limit)
        if longest > self.cache.tokens:
            raise RequestError(
                f"trajectory {trajectory.key}: {prompt_tokens} prompt tokens and {limit} more need "
                f"{longest} places in the cache, which has {self.cache.tokens}; raise cache_bytes "
                f"to at least {(longest + 2 * self.cache.block_tokens) * self.cache.token_bytes:,} "
                "or lower max_tokens"
            )
        return limit
