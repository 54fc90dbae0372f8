"""One row of a data set, before a tokenizer has seen it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Message = Mapping[str, str]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the model is asked, what the reward needs, and where it stands.

    `fields` holds everything else of the row: by custom `answer` (the gold answer), `level` (how
    hard it is: a number or a word) and `response` (an answer to imitate).
    """

    prompt: str | tuple[Message, ...]
    fields: Mapping[str, object]
    place: str
    question: str | None = None
    """What is asked, without the instructions around it; `None` where they are not told apart."""

    @property
    def text(self) -> str:
        """The question as a person reads it: the last thing the user says."""
        if isinstance(self.prompt, str):
            return self.prompt
        said = [message["content"] for message in self.prompt if message["role"] == "user"]
        return said[-1] if said else self.prompt[-1]["content"]
