"""From messages to tokens and back, without tokenising again what the model wrote.

The reply of an environment is the text that the chat template adds for its messages, after the
model's own turn:

    template(..., assistant turn, reply, generation prompt)
                                ^^^^^^^^^^^^^^^^^^^^^^^^^^^ tokenised and appended

So the model sees what it would see in an inference server, and sampled tokens stay as they were
sampled. A template that changes earlier turns when later ones are added (such as one that removes
their reasoning) cannot be used this way, and is refused; so is one that leaves replies out, or
writes the second otherwise than the first. Without a template the contents of the
messages are appended as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sortedrl.config.data import ChatUse
from sortedrl.data.stream import Tokenizer
from sortedrl.environments import Message
from sortedrl.errors import ConfigError

_THOUGHT, _ANSWER, _REPLY = "PROBED THOUGHT", "PROBED ANSWER", "PROBED REPLY"
_PROBE = (
    {"role": "user", "content": "PROBED QUESTION"},
    {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"},
)


class Renderer:
    """Turns replies into tokens, and turns of the policy into text."""

    def __init__(self, tokenizer: Tokenizer, *, chat: ChatUse) -> None:
        """Use the chat template, if there is one and `chat` allows it."""
        self._tokenizer = tokenizer
        self._is_chat = chat != "off" and tokenizer.chat_template is not None
        self._special = frozenset(tokenizer.all_special_ids)
        self._tail = lru_cache(maxsize=4096)(self._rendered_tail)

    def reply(self, messages: Sequence[Message], *, last_token: int | None) -> list[int]:
        """The tokens of a reply after a turn that ended in `last_token`."""
        if not self._is_chat:
            text = "".join(message["content"] for message in messages)
            return self._tokenizer.encode(text, add_special_tokens=False)
        tokens = self._tail(tuple(tuple(sorted(message.items())) for message in messages))
        # The template closes the turn; the model has written that token already.
        return list(tokens[1:] if tokens[:1] == (last_token,) else tokens)

    def text(self, turn: Sequence[int]) -> str:
        """What the policy wrote in a turn, without the token that ended it."""
        kept = list(turn)
        while kept and kept[-1] in self._special:
            kept.pop()
        return self._tokenizer.decode(kept)

    def check(self, role: str) -> None:
        """Refuse a template that cannot be used for replies of this role."""
        if not self._is_chat:
            return
        reply: Message = {"role": role, "content": _REPLY}
        first = self._tail_text([reply])
        if _REPLY not in first:
            raise ConfigError(
                f"the tokenizer's chat template leaves replies of the role {role} out, so the "
                "model would never see them; use replies of another role, or another template"
            )
        if self._tail_text([reply, _PROBE[1], reply]) != first:
            raise ConfigError(
                f"the tokenizer's chat template writes a second reply of the role {role} otherwise "
                "than the first, so what a turn adds is not known; use replies of another role, or "
                "another template"
            )

    def _rendered_tail(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> tuple[int, ...]:
        tail = self._tail_text([dict(message) for message in messages])
        return tuple(self._tokenizer.encode(tail, add_special_tokens=False))

    def _tail_text(self, messages: Sequence[Message]) -> str:
        """What the template adds for these messages after the last turn of the policy."""
        from jinja2 import TemplateError  # installed with tokenizers

        given = [*_PROBE, *messages]
        turns = sum(message["role"] == "assistant" for message in given)
        roles = ", ".join(sorted({m["role"] for m in messages} - {"assistant"}))
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*map(dict, given)],
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, ValueError) as error:
            raise ConfigError(
                f"the tokenizer's chat template refuses replies of the role {roles} ({error}); "
                "use replies of another role, or another model"
            ) from error
        if min(text.count(_ANSWER), text.count(_THOUGHT)) < turns:
            raise ConfigError(
                f"the tokenizer's chat template changes earlier turns when a reply of the role "
                f"{roles} follows (it removes their reasoning), so the model would be trained on "
                "other tokens than it would see; use a template that keeps them, or replies of "
                "the role tool"
            )
        return text.rpartition(_ANSWER)[2]
