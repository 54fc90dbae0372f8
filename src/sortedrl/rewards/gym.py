"""The reward of a reasoning-gym task: the content of `<answer>`, judged by the rule of its task.

A row carries everything that scoring needs as plain JSON: the task, its options and the generated
entry, with tuples and non-text keys marked, since some scorers compare them.

The rule of a task defines how an answer is parsed and judged (see `gym_rules`). An answer without
the required form gets 0 and the part `refused`; one that makes the library raise gets 0 and the
part `unreadable`. If a scorer of a newer library version evaluates text, it is stopped at its first
`eval`, and the run stops with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from threading import local
from typing import Any

from sortedrl.config.checks import require
from sortedrl.errors import ConfigError
from sortedrl.rewards.gym_formulas import Entry, RefusedError
from sortedrl.rewards.gym_rules import RULES, Rule
from sortedrl.rewards.pool.score import NoScoreError
from sortedrl.rewards.tags import conclusion, starts_in_thoughts
from sortedrl.types import Prompt

_TUPLE = "!tuple"
_PAIRS = "!pairs"
_LONGEST_ANSWER = 20_000
_NEARLY_RIGHT = 0.99
# What scorers raise for an answer of the wrong form.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _UnreadableError(Exception):
    """A scorer of the library raised an exception for an answer."""


def gym_reward(
    prompt: Prompt,
    response: str,
    *,
    right_from: float = 1.0,
    partial: bool = False,
    no_answer: float = 0.0,
    after_thoughts: bool = True,
) -> dict[str, float]:
    """1 for a score of at least `right_from`, otherwise 0; or the score itself if `partial`.

    Only a right answer has a score of 1; partial credit is at most 0.99. The parts `correct`,
    `answered` and `score` are logged. Scorers can be slow for unusual answers: call this with a
    time limit.
    """
    require(0 < right_from <= 1, f"right_from must be above 0 and at most 1, got {right_from}")
    task, entry = _scoring(prompt)
    answer = tagged_answer(
        response, after_thoughts=after_thoughts, is_prefilled=starts_in_thoughts(prompt)
    )
    # Where an equation has no solution, the right answer is an empty one.
    if answer is None or (not answer and entry.get("answer") != ""):
        return {"reward": no_answer, "correct": 0.0, "answered": 0.0, "score": 0.0}
    score, notes = 0.0, {}
    try:
        score = _score(task, answer, entry, options=prompt.fields.get("options", {}))
    except RefusedError:
        notes = {"refused": 1.0}
    except _UnreadableError:
        notes = {"unreadable": 1.0}
    is_right = float(score >= right_from)
    reward = score if partial else is_right
    return {"reward": reward, "correct": is_right, "answered": 1.0, "score": score, **notes}


def rule_of(task: str) -> Rule:
    """How the answers of a task are parsed and judged; raises `ConfigError` without a rule."""
    if task not in RULES:
        raise ConfigError(
            f"reasoning-gym task {task!r} must have a rule, which defines how its answers are "
            "parsed without running them as code, but has none; use another task, give your own "
            "reward, or add a rule in sortedrl/rewards/gym_rules.py"
        )
    return RULES[task]


def _score(task: str, answer: str, entry: Entry, *, options: object) -> float:
    """1 if the answer is right, otherwise the partial credit."""
    rule = rule_of(task)
    if len(answer) > _LONGEST_ANSWER + 2 * len(str(entry.get("answer"))):
        raise RefusedError
    read = rule.form(answer, entry) if rule.form is not None else answer
    if rule.judge is not None:
        judged = rule.judge(read, entry)
        if judged == 1 or not rule.asks_library:
            return judged
    scorer = _dataset(task, json.dumps(options, sort_keys=True))
    try:
        score = _library_score(scorer, read, entry)
    except NoScoreError:
        raise
    except _UNREADABLE as error:
        raise _UnreadableError from error
    is_right = rule.judge is None and score == 1
    return 1.0 if is_right else min(score, _NEARLY_RIGHT)


class _Watch(local):
    """Whether a scorer of the library is running in this thread, and has evaluated text."""

    is_on = False
    has_seen = False


_WATCH = _Watch()


def _stop_evaluation(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse to compile text while a scorer is running."""
    if event == "compile" and _WATCH.is_on and arguments[1] == "<string>":
        _WATCH.has_seen = True
        raise NoScoreError("a scorer must not evaluate text")


@cache
def _install_hook() -> None:
    sys.addaudithook(_stop_evaluation)


def _library_score(scorer: Any, answer: str, entry: Entry) -> float:  # noqa: ANN401
    """The score of the library; its scorer must not evaluate text."""
    _install_hook()
    _WATCH.is_on, _WATCH.has_seen = True, False
    try:
        score = float(scorer.score_answer(answer, entry))
    finally:
        _WATCH.is_on = False
        if _WATCH.has_seen:
            raise NoScoreError(
                f"scorers of reasoning-gym must not evaluate text, but {type(scorer).__name__} of "
                "the installed version does; install the version of constraints.txt"
            )
    return min(max(score, 0.0), 1.0)


def tagged_answer(
    response: str, *, after_thoughts: bool = True, is_prefilled: bool = False
) -> str | None:
    """The content of the last `<answer>...</answer>` after the thoughts."""
    text = conclusion(response, is_prefilled=is_prefilled) if after_thoughts else response
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def packed(value: object) -> object:
    """A value as JSON, with tuples and non-text keys marked."""
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
    """The inverse of `packed`."""
    if isinstance(value, list | tuple):
        return [unpacked(one) for one in value]
    if isinstance(value, Mapping):
        if _TUPLE in value:
            return tuple(unpacked(one) for one in value[_TUPLE])
        if _PAIRS in value:
            return {unpacked(key): unpacked(one) for key, one in value[_PAIRS]}
        return {key: unpacked(one) for key, one in value.items()}
    return value


def _scoring(prompt: Prompt) -> tuple[str, Entry]:
    """The name of the task, and the entry."""
    task, entry = prompt.fields.get("task"), prompt.fields.get("entry")
    if not isinstance(task, str) or not isinstance(entry, Mapping):
        raise NoScoreError(
            "a row must have the fields `task` and `entry` of reasoning-gym, got "
            f"{sorted(prompt.fields)}; make the rows with gym_rows"
        )
    found = unpacked(entry)
    assert isinstance(found, dict)
    return task, found


@lru_cache(maxsize=128)
def _dataset(task: str, options: str) -> Any:  # noqa: ANN401
    """The library's scorer of a task; creating one can be slow."""
    try:
        from reasoning_gym.factory import create_dataset
    except ImportError as error:
        raise ConfigError(
            f"scoring {task} needs reasoning-gym; pip install 'sortedrl[gym]'"
        ) from error
    arguments = unpacked(json.loads(options))
    assert isinstance(arguments, dict)
    return create_dataset(task, seed=0, size=1, **arguments)
