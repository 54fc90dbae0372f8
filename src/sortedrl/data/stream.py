"""The stream of prompts: every row once per epoch, in an order that depends only on the seed.

The state of the stream is one number, `position`: a stream opened there continues with the same
prompts under the same ids, also in the middle of an epoch.

    position   0 1 2 3 | 4 5 6 7 | ...      4 rows
    epoch      0       | 1       |
    row        2 0 3 1 | 1 3 0 2 |
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sortedrl.config.checks import require
from sortedrl.config.train import ChatUse
from sortedrl.core.randomness import mix
from sortedrl.data.chat import Rendered, Tokenizer, rendered
from sortedrl.data.rows import Row
from sortedrl.errors import ConfigError
from sortedrl.types import Prompt

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
    advance: Callable[[int], None] | None = None,
) -> Tokenized:
    """The rows with their tokens; `advance` receives the number of rows done."""
    kept, num_too_long = [], 0
    for number, row in enumerate(rows, start=1):
        prompt = rendered(row, tokenizer, chat=chat)
        if max_prompt_tokens is not None and len(prompt.tokens) > max_prompt_tokens:
            num_too_long += 1
        else:
            kept.append(_tokenized(row, prompt))
        if advance is not None:
            advance(number)
    if not kept:
        raise ConfigError(
            f"no prompt has at most max_prompt_tokens = {max_prompt_tokens} tokens "
            f"({num_too_long} are longer); raise it"
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
        shuffle: bool = True,
        seed: int = 0,
        position: int = 0,
    ) -> None:
        """A stream that continues at `position`, the number of prompts already taken."""
        self._rows = rows
        self._total = epochs * len(rows)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = -1
        self._order: Sequence[int] = ()
        require(
            0 <= position <= self._total,
            f"position must lie in 0..{self._total} ({epochs} epochs of {len(rows)} rows), "
            f"got {position}; check that the data is the same as before",
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
        """The next prompts, with ids that count up; fewer than `count` only at the end."""
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
        rows = range(len(self._rows))
        if not self._shuffle:
            return rows
        return sorted(rows, key=lambda row: mix(self._seed, epoch, row))


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
