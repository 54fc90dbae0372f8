"""The reward of a reasoning-gym task: the library's own scoring of what stands in `<answer>`.

A row carries all the scoring needs in plain JSON: the task, its options and the generated entry,
with tuples and numbered keys marked, since some scorers compare them.

Some scorers hand the answer to `eval`, so that a model could run code. For those tasks an answer is
only scored if it is a formula of numbers, letters and known functions, or a list without
parentheses, in which nothing can be called; any other gets 0, and the part `refused`. An answer
over which a scorer raises gets 0, and the part `unreadable`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.rewards.score import NoScoreError
from sortedrl.rewards.tags import conclusion, starts_in_thoughts
from sortedrl.types import Prompt

_TUPLE = "!tuple"
_PAIRS = "!pairs"
_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_FORMULAS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
# The scorer of this task takes every text for right.
_COMPARED_AS_TEXT = frozenset({"game_of_life_halting"})
_NAME = "a?(?:sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|cbrt|Abs|abs|pi|[A-Za-z]"
_FORMULA = re.compile(
    rf"(?:[\d\s+*/^(),=-]|\.(?![\s]*[A-Za-z_])|(?<![A-Za-z_])(?:{_NAME})(?![A-Za-z_]))*"
)
_LONGEST_ANSWER = 20_000
# What scorers raise over an answer of the wrong form.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)


def gym_reward(
    prompt: Prompt,
    response: str,
    *,
    right_from: float = 0.99,
    partial: bool = False,
    no_answer: float = 0.0,
    after_thoughts: bool = True,
) -> dict[str, float]:
    """1 from a score of `right_from` on and otherwise 0, or the score itself if `partial`.

    The parts `correct`, `answered` and `score` are logged. Scorers can take long over a strange
    answer: call this with a time limit.
    """
    task, entry = _scoring(prompt)
    answer = tagged_answer(
        response, after_thoughts=after_thoughts, is_prefilled=starts_in_thoughts(prompt)
    )
    if not answer:
        return {"reward": no_answer, "correct": 0.0, "answered": 0.0, "score": 0.0}
    score, notes = 0.0, {}
    if task in _COMPARED_AS_TEXT:
        score = float(answer.casefold() == str(prompt.fields["answer"]).casefold())
    elif len(answer) > _LONGEST_ANSWER or _could_be_code(task, answer):
        notes = {"refused": 1.0}
    else:
        scorer = _dataset(task, json.dumps(prompt.fields.get("options", {}), sort_keys=True))
        try:
            score = float(scorer.score_answer(answer, entry))
        except _UNREADABLE:
            notes = {"unreadable": 1.0}
    is_right = float(score >= right_from)
    reward = score if partial else is_right
    return {"reward": reward, "correct": is_right, "answered": 1.0, "score": score, **notes}


def _could_be_code(task: str, answer: str) -> bool:
    """Whether the scorer would evaluate the answer, and something in it could be called."""
    if task in _LISTS:
        return "(" in answer
    return task in _FORMULAS and _FORMULA.fullmatch(answer) is None


def tagged_answer(
    response: str, *, after_thoughts: bool = True, is_prefilled: bool = False
) -> str | None:
    """What stands in the last `<answer>...</answer>`; after `</think>` only what follows counts."""
    text = conclusion(response, is_prefilled=is_prefilled) if after_thoughts else response
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def packed(value: object) -> object:
    """A value as JSON can hold it, with tuples and keys that are no text marked."""
    if isinstance(value, tuple):
        return {_TUPLE: [packed(one) for one in value]}
    if isinstance(value, list):
        return [packed(one) for one in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {key: packed(one) for key, one in value.items()}
        return {_PAIRS: [[packed(key), packed(one)] for key, one in value.items()]}
    return value


def unpacked(value: object) -> object:
    """The value that was packed."""
    if isinstance(value, list | tuple):
        return [unpacked(one) for one in value]
    if isinstance(value, Mapping):
        if _TUPLE in value:
            return tuple(unpacked(one) for one in value[_TUPLE])
        if _PAIRS in value:
            return {unpacked(key): unpacked(one) for key, one in value[_PAIRS]}
        return {key: unpacked(one) for key, one in value.items()}
    return value


def _scoring(prompt: Prompt) -> tuple[str, object]:
    """The name of the task and the entry to score against."""
    task, entry = prompt.fields.get("task"), prompt.fields.get("entry")
    if not isinstance(task, str) or not isinstance(entry, Mapping):
        raise NoScoreError(
            "a row must have the fields `task` and `entry` of reasoning-gym, got "
            f"{sorted(prompt.fields)}; make the rows with gym_rows"
        )
    return task, unpacked(entry)


@lru_cache(maxsize=128)
def _dataset(task: str, options: str) -> Any:  # noqa: ANN401
    """The library's object that scores a task; making one can take long."""
    try:
        from reasoning_gym.factory import create_dataset
    except ImportError as error:
        raise ConfigError(
            f"scoring {task} needs reasoning-gym; pip install 'sortedrl[gym]'"
        ) from error
    arguments = unpacked(json.loads(options))
    assert isinstance(arguments, dict)
    return create_dataset(task, seed=0, size=1, **arguments)
