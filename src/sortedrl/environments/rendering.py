"""From messages to tokens and back, without tokenising again what the model wrote.

The reply of an environment is the text that the chat template adds for its messages, after the
model's own turn:

    template(..., assistant turn, reply, generation prompt)
                                ^^^^^^^^^^^^^^^^^^^^^^^^^^^ tokenised and appended

So the model sees what it would see in an inference server, and sampled tokens stay as they were
sampled. A template that changes earlier turns when later ones are added (such as one that removes
their reasoning) cannot be used this way, and is refused. Without a template the contents of the
messages are appended as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sortedrl.config.data import ChatUse
from sortedrl.data.stream import Tokenizer
from sortedrl.environments.protocol import Message
from sortedrl.errors import ConfigError
from sortedrl.types import Trajectory

_THOUGHT, _ANSWER = "PROBED THOUGHT", "PROBED ANSWER"
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

    def turns(self, trajectory: Trajectory) -> list[list[int]]:
        """The tokens of each turn of the policy."""
        turns: list[list[int]] = []
        for segment in trajectory.segments:
            if segment.given or not turns:
                turns.append([])
            turns[-1] += segment.tokens
        return turns

    def text(self, turn: Sequence[int]) -> str:
        """What the policy wrote in a turn, without the token that ended it."""
        kept = list(turn)
        while kept and kept[-1] in self._special:
            kept.pop()
        return self._tokenizer.decode(kept)

    def check(self, role: str) -> None:
        """Refuse a template that cannot be used for replies of this role."""
        if self._is_chat:
            self._tail(((("content", "PROBED REPLY"), ("role", role)),))

    def _rendered_tail(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> tuple[int, ...]:
        from jinja2 import TemplateError  # installed with tokenizers

        roles = ", ".join(sorted({dict(message)["role"] for message in messages}))
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*map(dict, _PROBE), *map(dict, messages)],
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, ValueError) as error:
            raise ConfigError(
                f"the tokenizer's chat template refuses replies of the role {roles} ({error}); "
                "use replies of another role, or another model"
            ) from error
        if _ANSWER not in text or _THOUGHT not in text:
            raise ConfigError(
                f"the tokenizer's chat template changes earlier turns when a reply of the role "
                f"{roles} follows (it removes their reasoning), so the model would be trained on "
                "other tokens than it would see; use a template that keeps them, or replies of "
                "the role tool"
            )
        tail = text.rpartition(_ANSWER)[2]
        return tuple(self._tokenizer.encode(tail, add_special_tokens=False))
