"""The settings of station 1: what of a row is what, and in which order rows become prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sortedrl.config import require

ChatUse = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What of a row is the prompt, and how the model sees it."""

    prompt_field: str = "prompt"
    """The column with the question: text, or a list of chat messages."""
    answer_field: str | None = None
    """The column with the gold answer, which the reward finds as `answer`. By default the column
    `answer`, if there is one. Every other column goes to the reward under its own name."""
    system: str | None = None
    """A system message to put before every prompt."""
    chat: ChatUse = "auto"
    """auto: the tokenizer's chat template, if it has one, once; text becomes a user message.
    on: the same, and a tokenizer without a template is refused. off: plain text as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """In which order prompts come, and which do not."""

    max_prompt_tokens: int | None = None
    """Longer prompts are left out, and counted."""
    shuffle: bool = True
    """Draw a new order of the rows for every epoch, from the seed; otherwise as they stand."""
    epochs: int = 1
    """How often every row is asked."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.epochs >= 1, f"stream.epochs must be at least 1, got {self.epochs}")
        require(
            self.max_prompt_tokens is None or self.max_prompt_tokens >= 1,
            f"stream.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}",
        )
