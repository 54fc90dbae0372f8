r"""The reward of a mathematical answer: what stands in the last `\boxed{...}`, compared with gold.

The fields of the prompt that count:

    answer          the gold: text, a number, or a list of parts that must all be given
    alternatives    other golds, each as good as the first
    error           the absolute error that is allowed
    is_measured     whether the gold is a measurement, so that whole numbers may be rounded
"""

from __future__ import annotations

from collections.abc import Mapping

from sortedrl.rewards.boxed import boxed_answer
from sortedrl.rewards.equality import Tolerance, Verdict, compare, compare_all
from sortedrl.rewards.latex import parts, tidied
from sortedrl.rewards.score import NoScoreError
from sortedrl.rewards.tags import starts_in_thoughts
from sortedrl.types import Prompt

_LONGEST_ANSWER = 2000


def math_reward(
    prompt: Prompt,
    response: str,
    *,
    right: float = 1.0,
    wrong: float = 0.0,
    no_answer: float = 0.0,
    relative_error: float = 1e-4,
    after_thoughts: bool = True,
) -> dict[str, float]:
    r"""`right`, `wrong`, or `no_answer` where no box is complete; also `correct` and `answered`.

    A gold that math-verify cannot read counts only if the answer has the same text; then the part
    `unread_gold` is 1. A row without a gold is an error. An answer that math-verify cannot read
    is wrong. sympy can take for ever: call this with a time limit.
    """
    golds = _golds(prompt)
    answer = boxed_answer(
        response, after_thoughts=after_thoughts, is_prefilled=starts_in_thoughts(prompt)
    )
    if not answer:
        return {"reward": no_answer, "correct": 0.0, "answered": 0.0}
    verdicts = []
    if len(answer) <= _LONGEST_ANSWER:
        tolerance = _tolerance(prompt, relative_error)
        for gold in golds:
            verdicts.append(_compare(gold, answer, tolerance))
            if verdicts[-1].is_equal:
                return {"reward": right, "correct": 1.0, "answered": 1.0}
    unread = {} if all(verdict.is_gold_read for verdict in verdicts) else {"unread_gold": 1.0}
    return {"reward": wrong, "correct": 0.0, "answered": 1.0, **unread}


def lowest_math_reward(options: Mapping[str, float]) -> float:
    """The lowest reward with these options."""
    return min(options[grade] for grade in ("right", "wrong", "no_answer"))


def _compare(gold: str | list[str], answer: str, tolerance: Tolerance) -> Verdict:
    if isinstance(gold, str):
        return compare(gold, answer, tolerance)
    wanted = [part for one in gold for part in parts(tidied(one))]
    return compare_all(wanted, parts(tidied(answer)), tolerance)


def _golds(prompt: Prompt) -> list[str | list[str]]:
    """The answer and its alternatives."""
    if "answer" not in prompt.fields:
        raise NoScoreError(
            f"a row needs a field `answer` with the gold answer, got {sorted(prompt.fields)}"
        )
    others = prompt.fields.get("alternatives", [])
    if not isinstance(others, list | tuple):
        raise NoScoreError(f"`alternatives` must be a list of golds, got {others!r:.100}")
    return [_gold(one) for one in (prompt.fields["answer"], *others)]


def _gold(value: object) -> str | list[str]:
    if isinstance(value, list | tuple) and value:
        return [_text(part) for part in value]
    return _text(value)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise NoScoreError(f"a gold answer must be text, a number or a list, got {value!r:.100}")
    text = str(value)
    if not tidied(text):
        raise NoScoreError(f"a gold answer must not be empty, got {text!r}; drop the row")
    return text


def _tolerance(prompt: Prompt, relative_error: float) -> Tolerance:
    error = prompt.fields.get("error") or 0.0
    if not isinstance(error, int | float):
        raise NoScoreError(f"`error` must be a number, got {error!r:.100}")
    return Tolerance(
        relative=relative_error,
        absolute=error,
        is_measured=prompt.fields.get("is_measured") is True,
    )
