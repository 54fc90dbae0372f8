"""The stream of prompts: rows as tokens, once per epoch, in an order set by the seed alone.

A row is tokenized with the chat template, applied once, or as plain text. A row that already has
chat tags is refused if a template would be applied: the prompt would have two starts.

The state of the stream is one number, `position`: a stream created there continues with the same
prompts and ids, even in the middle of an epoch.

    position   0 1 2 3 | 4 5 6 7 | ...      4 rows
    epoch      0       | 1       |
    row        2 0 3 1 | 1 3 0 2 |
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sortedrl.config.checks import require
from sortedrl.config.data import ChatUse
from sortedrl.core.randomness import mix
from sortedrl.data.rows import Message, Row
from sortedrl.errors import ConfigError, DataError
from sortedrl.types import Prompt

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


_END_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A row for the model and the reward."""

    tokens: Sequence[int]
    fields: Mapping[str, object]
    question: str = ""
    """The question for display."""
    end: str | None = None
    """The end of the prompt text."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The rows within the length limit, and how many were too long."""

    rows: Sequence[TokenizedRow]
    num_too_long: int


def tokenized(
    rows: Iterable[Row],
    tokenizer: Tokenizer,
    *,
    chat: ChatUse = "auto",
    max_prompt_tokens: int | None = None,
) -> Tokenized:
    """The rows with their tokens."""
    kept, num_too_long = [], 0
    for row in rows:
        prompt = rendered(row, tokenizer, chat=chat)
        if max_prompt_tokens is not None and len(prompt.tokens) > max_prompt_tokens:
            num_too_long += 1
        else:
            kept.append(_tokenized(row, prompt))
    if not kept:
        raise ConfigError(
            f"no prompt has at most {max_prompt_tokens} tokens ({num_too_long} are longer), the "
            "smaller of max_prompt_tokens and the room in the model's context; shorten the "
            "prompts, raise max_prompt_tokens, or use a model with a longer context"
            if num_too_long
            else "the data set has no rows; check the path and the split"
        )
    return Tokenized(kept, num_too_long)


class PromptStream:
    """A `PromptSource` over tokenized rows."""

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        *,
        epochs: int = 1,
        seed: int = 0,
        position: int = 0,
    ) -> None:
        """A stream that continues at `position`, the number of prompts already taken."""
        self._rows = rows
        self._total = epochs * len(rows)
        self._seed = seed
        self._epoch = -1
        self._order: Sequence[int] = ()
        require(
            0 <= position <= self._total,
            f"position must lie in 0..{self._total} ({epochs} epochs of {len(rows)} rows), "
            f"got {position}; set epochs to at least {math.ceil(position / max(1, len(rows)))}, "
            "and check that the data is the same as before",
        )
        self.position = position

    @property
    def total(self) -> int:
        """Prompts of all epochs."""
        return self._total

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self.position >= self._total

    @property
    def fingerprint(self) -> str:
        """A hash of the rows: a run must be resumed on the same ones."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(len(row.tokens).to_bytes(8, "little"))
            digest.update(array("i", row.tokens).tobytes())
        return digest.hexdigest()

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts, with ascending ids; fewer than `count` only at the end."""
        end = min(self.position + count, self._total)
        prompts = [self._prompt(position) for position in range(self.position, end)]
        self.position = end
        return prompts

    def _prompt(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        row = self._rows[self._order[place]]
        return Prompt(id=position, tokens=row.tokens, fields=row.fields, end=row.end)

    def _order_of(self, epoch: int) -> Sequence[int]:
        return sorted(range(len(self._rows)), key=lambda row: mix(self._seed, epoch, row))


def _tokenized(row: Row, rendered: Rendered) -> TokenizedRow:
    """The row with the fields of the reward: its columns, its prompt and its place.

    Columns of the row take precedence: `prompt`, `prompt_end` and `place` are only added if the
    row has no columns of these names.
    """
    prompt = row.prompt if isinstance(row.prompt, str) else [dict(m) for m in row.prompt]
    end = rendered.text[-_END_CHARACTERS:]
    return TokenizedRow(
        tokens=array("i", rendered.tokens),
        fields={"prompt": prompt, "prompt_end": end, "place": row.place, **row.fields},
        question=row.text,
        end=end,
    )
