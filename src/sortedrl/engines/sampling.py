"""What requests to all engines share: sampling settings, limits, and segments of answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from sortedrl.config.checks import require, require_temperature
from sortedrl.errors import RequestError
from sortedrl.types import Segment, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen from the logits."""

    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int | None = None
    """Choose among that many most likely tokens."""
    top_p: float = 1.0
    """Choose among the most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Choose among tokens at least this many times as likely as the most likely one."""
    stop_tokens: frozenset[int] | None = None
    """Tokens that end an answer; `None` for those of the model."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer as soon as they appear in it; needs a tokenizer."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_temperature("sampling.temperature", self.temperature)
        require(
            self.top_k is None or self.top_k >= 1,
            f"sampling.top_k must be at least 1, got {self.top_k}; leave it out for all tokens",
        )
        require(0 < self.top_p <= 1, f"sampling.top_p must lie in (0, 1], got {self.top_p}")
        require(0 <= self.min_p < 1, f"sampling.min_p must lie in [0, 1), got {self.min_p}")
        require("" not in self.stop_strings, "sampling.stop_strings must not hold an empty text")

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are left out of the choice."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def checked_limit(trajectory: Trajectory, max_tokens: int, *, vocabulary: int, context: int) -> int:
    """The tokens its answer may have within the model's context.

    A trajectory that can never be written is refused.
    """
    name = f"trajectory {trajectory.key}"
    prompt_tokens = len(trajectory.prompt.tokens)
    if not prompt_tokens:
        raise RequestError(f"{name} has an empty prompt; give it at least one token")
    written = chain.from_iterable(segment.tokens for segment in trajectory.segments)
    for token in chain(trajectory.prompt.tokens, written):
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"{name}: token ids must lie in 0..{vocabulary - 1}, got {token}; "
                "was it made with the tokenizer of this model?"
            )
    if max_tokens < 1:
        raise RequestError(f"{name}: an answer must be allowed at least 1 token, got {max_tokens}")
    if prompt_tokens >= context:
        raise RequestError(
            f"{name}: its prompt has {prompt_tokens} tokens, the model's context has "
            f"{context}, and one must be left for the answer; shorten or drop it"
        )
    return min(max_tokens, context - prompt_tokens)


def joined(segments: tuple[Segment, ...], last: Segment) -> tuple[Segment, ...]:
    """One segment per run of tokens of the same version.

    >>> one = Segment((7,), (-0.5,), 3)
    >>> joined((one,), Segment((8,), (-0.25,), 3))
    (Segment(tokens=(7, 8), logprobs=(-0.5, -0.25), version=3),)
    """
    if not segments or segments[-1].version != last.version:
        return (*segments, last)
    tokens = (*segments[-1].tokens, *last.tokens)
    logprobs = (*segments[-1].logprobs, *last.logprobs)
    return (*segments[:-1], Segment(tokens, logprobs, last.version))
