r"""Rows of the maths sets: a question with an instruction, and a gold that `math_reward` knows.

The rows of a set come in its order, so the same settings give the same rows. Only rows of `train`
carry a `response` to imitate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sortedrl.config import require
from sortedrl.data.files import Record, read_records
from sortedrl.data.hub import read_hub
from sortedrl.data.row import Row
from sortedrl.errors import unknown_name
from sortedrl.tasks.maths_sets import MATHS_SETS, Example

INSTRUCTION = r"Think it through step by step, then give the final answer inside \boxed{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class MathsSettings:
    """One of the maths sets."""

    name: str = "gsm8k"
    """The set: gsm8k, math, math500, aime24, amc23, minerva, olympiadbench, svamp, asdiv or
    mawps."""
    split: str = "test"
    """train or test; only gsm8k has both in files, math has only train. Training takes train and
    evaluation test, unless told otherwise."""
    folder: Path | None = None
    """The folder with the files of the sets, one folder each; by default they are loaded from
    the hub."""
    limit: int | None = None
    """The first so many rows only."""
    instruction: str = INSTRUCTION
    """What is asked after the question; empty for nothing."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.name in MATHS_SETS, unknown_name("maths set", self.name, MATHS_SETS))
        found = MATHS_SETS[self.name]
        splits = found.hub_splits if self.folder is None else found.files
        require(
            self.split in splits,
            f"maths.split of {self.name} must be {' or '.join(splits)}, got {self.split!r}",
        )
        require(
            self.limit is None or self.limit >= 1,
            f"maths.limit must be at least 1, got {self.limit}; leave it out for all rows",
        )


def maths_rows(settings: MathsSettings) -> list[Row]:
    """The rows of these settings; a record that cannot be used is refused with its place."""
    pairs = islice(maths_examples(settings), settings.limit)
    return [_row(example, place, settings) for place, example in pairs]


def maths_examples(settings: MathsSettings) -> Iterator[tuple[str, Example]]:
    """The examples of the set with their places; records without a gold are left out."""
    read = MATHS_SETS[settings.name].read
    for record in _records(settings):
        example = read(record)
        if example is not None:
            yield record.place, example


def _records(settings: MathsSettings) -> Iterator[Record]:
    found = MATHS_SETS[settings.name]
    if settings.folder is not None:
        return read_records(settings.folder / found.files[settings.split])
    return read_hub(found.hub, subset=found.subset, split=found.hub_splits[settings.split])


def _row(example: Example, place: str, settings: MathsSettings) -> Row:
    question = example.question.strip()
    content = f"{question}\n\n{settings.instruction}" if settings.instruction else question
    fields: dict[str, object] = {"answer": example.answer, **example.fields}
    if settings.split == "train" and example.solution is not None:
        fields["response"] = example.solution
    return Row(
        prompt=({"role": "user", "content": content},),
        fields=fields,
        place=place,
        question=question,
    )
