"""What an environment is: it opens a conversation and answers the policy's messages.

Any object with these methods fits; nothing has to be inherited or registered. `adapters` turns
objects of other libraries into this form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Message = Mapping[str, str]
"""A chat message: `role` and `content`."""
ToolSchema = Mapping[str, object]
"""A tool as chat templates take it: a JSON schema with `type` and `function`."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins: the messages of the prompt, and the tools the policy may call."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers.

    `reward` is that of the whole conversation so far: it is used where the conversation ends here.
    `None` counts as 0.
    """

    messages: Sequence[Message] = ()
    is_done: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One conversation at a time: `open`, then `reply` after `reply`, then `close`."""

    is_replayable: bool
    """Whether a fresh environment that gets the same messages gives the same replies, and does no
    harm by doing everything twice. Then a conversation can be brought to any turn."""

    def open(self, row: Mapping[str, object]) -> Opening:
        """Begin a conversation about a row of the data set; the same row opens the same way."""

    def reply(self, message: Message) -> Reply:
        """Answer what the policy wrote."""

    def close(self) -> None:
        """Give up what the conversation holds."""
