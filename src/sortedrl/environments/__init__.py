"""Conversations: environments open them and answer the policy, in worker processes.

Any object with the methods of `Environment` fits; nothing has to be inherited or registered.
`adapters` converts objects of other libraries.
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
    """The start of a conversation: the messages of the prompt, and the tools of the policy."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of an environment.

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
    """Whether a new environment that gets the same messages gives the same replies, and doing so
    twice does no harm. Then a conversation can be replayed up to any turn."""

    def open(self, row: Mapping[str, object]) -> Opening:
        """Begin a conversation about a row of the data set; the same row opens the same way."""

    def reply(self, message: Message) -> Reply:
        """Answer a message of the policy."""

    def close(self) -> None:
        """Release the resources of the conversation."""
