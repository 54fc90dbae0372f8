"""Sampling parameters and the validation of requests, shared by all engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from sortedrl.config.checks import require, require_temperature
from sortedrl.errors import RequestError
from sortedrl.types import Segment, Trajectory

MaxTokens = int | Callable[[Trajectory], int]
"""Maximum tokens of an answer: a number, or a function of the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled from the logits, and where an answer ends."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Sample from tokens at least this many times as likely as the most likely one."""
    stop_tokens: frozenset[int] | None = None
    """Tokens that end an answer; `None` for those of the model."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end an answer as soon as they appear in it; needs a tokenizer."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; `None` for the limit of the engine."""
    max_response_tokens: int | None = None
    """Maximum tokens after the prompt of a conversation, replies included."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        require_temperature("sampling.temperature", self.temperature)
        require(
            self.top_k is None or self.top_k >= 1,
            f"sampling.top_k must be at least 1, got {self.top_k}; leave it out for all tokens",
        )
        require(0 < self.top_p <= 1, f"sampling.top_p must lie in (0, 1], got {self.top_p}")
        require(0 <= self.min_p < 1, f"sampling.min_p must lie in [0, 1), got {self.min_p}")
        require("" not in self.stop_strings, "sampling.stop_strings must not have an empty string")
        require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"sampling.max_tokens must be at least 1, got {self.max_tokens}",
        )
        require(
            self.max_response_tokens is None or self.max_response_tokens >= 1,
            f"sampling.max_response_tokens must be at least 1, got {self.max_response_tokens}",
        )

    @property
    def is_filtered(self) -> bool:
        """Whether top_k, top_p or min_p exclude tokens."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a KV cache in blocks; block 0 is for padding rows."""

    num_blocks: int
    block_tokens: int
    token_bytes: int

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return (self.num_blocks - 1) * self.block_tokens

    @property
    def bytes(self) -> int:
        """Memory size in bytes."""
        return self.num_blocks * self.block_tokens * self.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What an engine accepts, and its defaults, as plain data."""

    engine: str
    """The name of the engine, for messages."""
    vocabulary: int
    """Token ids lie below."""
    context: int
    """Tokens of prompt and answer together."""
    max_tokens: MaxTokens
    """The limit for requests whose sampling sets none."""
    sampling: Sampling
    """The sampling of requests without any."""
    no_stop_strings: str | None = None
    """Why stop strings are refused; `None` if they are supported."""
    no_verification: str | None = None
    """Why cached tokens of other weights cannot be verified; `None` if they can."""
    no_seeds: str | None = None
    """Why an answer cannot be resampled from its own seed; `None` if it can."""
    cache: CacheSize | None = None
    """The KV cache that one request must fit into, if its size is known."""

    @property
    def max_length(self) -> int:
        """Maximum tokens of a conversation, prompt included."""
        return self.context if self.cache is None else min(self.context, self.cache.tokens)

    def max_length_of(self, trajectory: Trajectory, sampling: Sampling) -> int:
        """Tokens at which this conversation ends, prompt included."""
        most = sampling.max_response_tokens
        if most is None:
            return self.max_length
        return min(self.max_length, len(trajectory.prompt.tokens) + most)

    def check(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
        version: int,
    ) -> list[int]:
        """The number of tokens that the policy may generate for each answer.

        Raises `RequestError` for a trajectory that this engine can never generate with weights of
        this version.
        """
        sampling = self.sampling if sampling is None else sampling
        if sampling.stop_strings and self.no_stop_strings is not None:
            raise RequestError(
                f"{self.engine} cannot stop at {sampling.stop_strings[0]!r}: {self.no_stop_strings}"
            )
        if tolerance is not None and not tolerance >= 0:
            raise RequestError(f"tolerance must be 0 or more nats, got {tolerance}")
        if must_verify(tolerance) and self.no_verification is not None:
            for trajectory in trajectories:
                if any(segment.version != version for segment in trajectory.segments):
                    raise RequestError(
                        f"trajectory {trajectory.key}: {self.engine}: {self.no_verification}"
                    )
        return [self._max_tokens(trajectory, sampling) for trajectory in trajectories]

    def _max_tokens(self, trajectory: Trajectory, sampling: Sampling) -> int:
        name = f"trajectory {trajectory.key}"
        prompt_tokens = len(trajectory.prompt.tokens)
        if not prompt_tokens:
            raise RequestError(f"{name} has an empty prompt; give it at least one token")
        for token in chain(trajectory.prompt.tokens, trajectory.response):
            if not 0 <= token < self.vocabulary:
                raise RequestError(
                    f"{name}: token ids must lie in 0..{self.vocabulary - 1}, got {token}; "
                    "was it made with the tokenizer of this model?"
                )
        limit = sampling.max_tokens
        if limit is None:
            limit = self.max_tokens(trajectory) if callable(self.max_tokens) else self.max_tokens
        if limit < 1:
            raise RequestError(f"{name}: max_tokens must be at least 1, got {limit}")
        if prompt_tokens >= self.context:
            raise RequestError(
                f"{name}: its prompt has {prompt_tokens} tokens, the model's context has "
                f"{self.context}, and one must be left for the answer; shorten or drop it"
            )
        limit = min(limit, self.context - prompt_tokens)
        # A conversation may grow until it fills the cache; its replies are not known in advance.
        kept = 0 if trajectory.num_given else trajectory.num_tokens
        needed = prompt_tokens + max(limit, kept)
        if self.cache is not None and needed > self.cache.tokens:
            size = self.cache
            raise RequestError(
                f"{name}: {prompt_tokens} prompt tokens and {limit} more need {needed} token slots "
                f"in the KV cache, which has {size.tokens}; raise cache_bytes to at least "
                f"{(needed + 2 * size.block_tokens) * size.token_bytes:,} or lower max_tokens"
            )
        return limit


def must_verify(tolerance: float | None) -> bool:
    """Whether cached tokens of other weights are to be verified."""
    return tolerance is not None and tolerance < math.inf


def joined(segments: tuple[Segment, ...], last: Segment) -> tuple[Segment, ...]:
    """Append a segment, merging it into the last one if both have the same version.

    A segment that follows a reply is kept separate.

    >>> one = Segment((7,), (-0.5,), 3)
    >>> joined((one,), Segment((8,), (-0.25,), 3))
    (Segment(tokens=(7, 8), logprobs=(-0.5, -0.25), version=3, given=()),)
    """
    if not segments or segments[-1].version != last.version or last.given:
        return (*segments, last)
    tokens = (*segments[-1].tokens, *last.tokens)
    logprobs = (*segments[-1].logprobs, *last.logprobs)
    return (*segments[:-1], Segment(tokens, logprobs, last.version, segments[-1].given))
