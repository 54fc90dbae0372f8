"""Small sums, products, chains and word problems in plain English, for a pre-trained model.

SmolLM2-135M answers a few per cent of them at temperature 1, with natural lengths, so there is
something to learn. The reward reads the last number of a response.

    What is 7 + 5?
    Mia has 6 boxes with 4 pens in each. She gives away 5 pens. How many pens are left?

The numbers of a question determine its split, so `train` and `test` share none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from sortedrl.config.checks import require
from sortedrl.core.randomness import mix
from sortedrl.data.knights_puzzle import Split, split_of_key
from sortedrl.errors import unknown_name
from sortedrl.types import Prompt

_TEST_SHARE = 0.15
_NAMES = ("Mia", "Tom", "Lena", "Omar", "Ruth", "Ivan", "Nora", "Paul")
_THINGS = ("pens", "apples", "books", "coins", "stamps", "shells", "cards", "eggs")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSettings:
    """Generated questions, alternating between the four kinds."""

    count: int = 8192
    """Number of rows; questions may repeat."""
    seed: int = 0
    """Seed of the questions."""
    split: Split = "train"
    """The split; the two share no numbers within a kind."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.count >= 1, f"questions.count must be at least 1, got {self.count}")
        require(self.split in get_args(Split), unknown_name("split", self.split, get_args(Split)))


def question_rows(settings: QuestionSettings) -> list[dict[str, object]]:
    """The rows: prompt, answer and kind."""
    rows: list[dict[str, object]] = []
    draw = 0
    while len(rows) < settings.count:
        kind = _KINDS[len(rows) % len(_KINDS)]
        numbers = [2 + mix(settings.seed, draw, place) % 8 for place in range(4)]
        style = mix(settings.seed, draw, 4)
        draw += 1
        used = numbers[: _NUMBERS[kind]]
        if split_of(kind, used) == settings.split:
            text, answer = _question(kind, used, style)
            rows.append({"prompt": text, "answer": str(answer), "kind": kind})
    return rows


def split_of(kind: str, numbers: Sequence[int]) -> Split:
    """The split of a question, which depends on its kind and numbers but not on their order.

    >>> split_of("sum", [3, 4]) == split_of("sum", [4, 3])
    True
    """
    return split_of_key(kind + "".join(map(chr, sorted(numbers))), _TEST_SHARE)


_KINDS = ("sum", "product", "chain", "story")
_NUMBERS = {"sum": 2, "product": 2, "chain": 4, "story": 3}


def _question(kind: str, numbers: Sequence[int], style: int) -> tuple[str, int]:
    """The text and its answer; `style` selects the wording."""
    name, thing = _NAMES[style % 8], _THINGS[style // 8 % 8]
    if kind == "sum":
        a, b = numbers
        asked = (f"What is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} plus {b}?")
        return asked[style % 3], a + b
    if kind == "product":
        a, b = numbers
        asked = (f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"How much is {a} times {b}?")
        return asked[style % 3], a * b
    if kind == "chain":
        a, b, c, d = numbers
        return (
            (f"What is {a} + {b} + {c} + {d}?", a + b + c + d)
            if style % 2
            else (f"What is {a} * {b} + {c} + {d}?", a * b + c + d)
        )
    a, b, c = numbers
    stories = (
        (f"{name} has {a} {thing} and buys {b} more, then {c} more. ", a + b + c, "are there now"),
        (f"{name} has {a} boxes with {b} {thing} in each, and {c} more. ", a * b + c, "are there"),
        (f"There are {a + b + c} {thing}. {name} takes {a}, then {b}. ", c, "are left"),
    )
    text, answer, end = stories[style // 64 % 3]
    return f"{text}How many {thing} {end}?", answer


def last_number_reward(prompt: Prompt, response: str) -> float:
    """1 if the last number of the response is the answer, else 0."""
    found = _NUMBER.findall(response)
    if not found:
        return 0.0
    return float(float(found[-1].replace(",", "")) == float(str(prompt.fields["answer"])))
