"""The rules by which an engine chooses tokens, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

from sortedrl.config import require, require_temperature


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
        require_temperature("sampling.temperature", self.temperature, is_greedy_allowed=True)
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
