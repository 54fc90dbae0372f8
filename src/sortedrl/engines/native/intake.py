"""From trajectories to requests: what can be written is made ready, what cannot is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sortedrl.engines.limits import checked_limit
from sortedrl.engines.native.memory import CacheSize
from sortedrl.engines.native.noise import stream
from sortedrl.engines.native.request import Request
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import RequestError
from sortedrl.types import Trajectory


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
