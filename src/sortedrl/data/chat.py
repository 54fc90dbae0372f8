"""From a row to the tokens the model sees: the chat template applied once, or plain text.

A row with its own chat tags is refused if a template would be applied: the prompt would have two
starts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sortedrl.config.train import ChatUse
from sortedrl.data.rows import Message, Row
from sortedrl.errors import ConfigError, DataError

_CHAT_TAG = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|<(?:start|end)_of_turn>|<\uff5c[^>]+\uff5c>")


class Tokenizer(Protocol):
    """The tokenizer interface, as in transformers."""

    @property
    def chat_template(self) -> str | None:
        """The template that turns messages into text; `None` in base models."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an answer."""

    @property
    def all_special_ids(self) -> list[int]:
        """Tokens that are not text."""

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any:  # noqa: ANN401
        """Messages as text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text as tokens."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Text as `input_ids`."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Tokens as text."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the model sees it: the text and the tokens."""

    text: str
    tokens: list[int]


def rendered(row: Row, tokenizer: Tokenizer, *, chat: ChatUse) -> Rendered:
    """The prompt of a row."""
    has_template = tokenizer.chat_template is not None
    if chat == "on" and not has_template:
        raise ConfigError(
            "data.chat is 'on', but the tokenizer has no chat template; "
            "set it to 'auto' or 'off', or use the tokenizer of a chat model"
        )
    if chat == "off" or not has_template:
        text = _plain_text(row)
        tokens = tokenizer.encode(text, add_special_tokens=True)
        # Some tokenizers append an end token; remove it, since an answer follows.
        is_ended = bool(tokens) and tokens[-1] == tokenizer.eos_token_id
        return Rendered(text, tokens[:-1] if is_ended else tokens)
    messages = _messages(row)
    _refuse_chat_tags(messages, row)
    is_begun = messages[-1]["role"] == "assistant"
    from jinja2 import TemplateError  # installed with tokenizers

    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=[dict(tool) for tool in row.tools] or None,
            tokenize=False,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
        )
    except (TemplateError, ValueError) as error:
        raise DataError(
            row.place,
            f"the tokenizer's chat template refuses the prompt ({error}); change its messages, or "
            "set data.chat to 'off'",
        ) from error
    return Rendered(text, tokenizer.encode(text, add_special_tokens=False))


def _messages(row: Row) -> Sequence[Message]:
    if isinstance(row.prompt, str):
        return ({"role": "user", "content": row.prompt},)
    return row.prompt


def _plain_text(row: Row) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n\n".join(message["content"] for message in row.prompt) + "\n\n"


def _refuse_chat_tags(messages: Sequence[Message], row: Row) -> None:
    for message in messages:
        found = _CHAT_TAG.search(message["content"])
        if found is not None:
            raise DataError(
                row.place,
                f"the prompt already has the chat tag {found[0]!r}, and the template would be "
                "applied to it; use a column with plain text, or set data.chat to 'off'",
            )
