"""The settings of station 1: what of a row is the prompt, and how the model sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sortedrl.config import require
from sortedrl.data.files import is_utf8

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

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(
            self.system is None or is_utf8(self.system),
            f"system must be UTF-8 text, got {self.system!a:.80}",
        )
