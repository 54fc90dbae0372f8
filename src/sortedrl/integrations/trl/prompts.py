"""The rows of a dataset as a stream of prompts, shared out over the ranks.

stream   0 1 2 3 | 4 5 6 7 | ...     4 rows, an order of its own for each epoch
rank 0   0   2   | 4   6   |
rank 1     1   3 |   5   7 |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from sortedrl.core.randomness import mix
from sortedrl.types import Prompt

_SAMPLED_ROWS = 256


class DatasetPrompts:
    """A `PromptSource` over a dataset: every row once per epoch, every `world`-th for each rank.

    A prompt's id is its position in the stream of all ranks. Rows are tokenized when they are
    taken.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenize: Callable[[list[Mapping[str, Any]]], Sequence[Sequence[int]]],
        *,
        total: int,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
        position: int = 0,
    ) -> None:
        """A stream of `total` prompts for this rank, of which `position` were taken before."""
        self._dataset = dataset
        self._tokenize = tokenize
        self._total = total
        self._shuffle = shuffle
        self._seed = seed
        self._rank, self._world = rank, world
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.position = position

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self.position >= self._total

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts of this rank; fewer than `count` only at the end."""
        end = max(self.position, min(self.position + count, self._total))
        ids = [position * self._world + self._rank for position in range(self.position, end)]
        self.position = end
        if not ids:
            return []
        rows = [self._row_at(number) for number in ids]
        tokens = self._tokenize([self._dataset[row] for row in rows])
        return [
            Prompt(id=number, tokens=tuple(ids_T), fields={"row": row})
            for number, ids_T, row in zip(ids, tokens, rows, strict=True)
        ]

    def row_of(self, prompt: Prompt) -> dict[str, Any]:
        """The row of the dataset that a prompt was made from."""
        row: dict[str, Any] = dict(self._dataset[prompt.fields["row"]])
        return row

    def longest(self, *, sampled_rows: int = _SAMPLED_ROWS) -> int:
        """Tokens of the longest prompt among a sample of the rows."""
        step = max(1, len(self._dataset) // sampled_rows)
        rows = range(0, len(self._dataset), step)
        return max(map(len, self._tokenize([self._dataset[row] for row in rows])))

    @property
    def fingerprint(self) -> str:
        """A hash of the number of rows and of some of the prompts."""
        size = len(self._dataset)
        digest = hashlib.sha256(str(size).encode())
        for row in range(0, size, max(1, size // _SAMPLED_ROWS)):
            # A row without a prompt gets one from its environment.
            prompt = self._dataset[row].get("prompt")
            digest.update(json.dumps(prompt, default=str).encode())
        return digest.hexdigest()

    def _row_at(self, number: int) -> int:
        epoch, place = divmod(number, len(self._dataset))
        if not self._shuffle:
            return place
        if self._order[0] != epoch:
            rows = range(len(self._dataset))
            self._order = (epoch, sorted(rows, key=lambda row: mix(self._seed, epoch, row)))
        return self._order[1][place]
