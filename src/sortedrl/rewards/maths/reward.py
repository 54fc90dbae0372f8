r"""The reward of a mathematical answer: the content of the last `\boxed{...}` against the gold.

Fields of the prompt:

    answer          the gold: text, a number, or a list of parts that must all be given
    alternatives    other golds, equally valid
    error           the allowed absolute error
    is_measured     whether the gold is a measurement, so that whole numbers may be rounded
    prompt          the question, to detect expressions copied from it
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from sortedrl.rewards.maths.equality import Equality, Rules, compare, compare_all, num_parts
from sortedrl.rewards.maths.numbers import last_number as number_at_end
from sortedrl.rewards.maths.reading import BoxedAnswer, has_box, read_answer, tidied
from sortedrl.rewards.pool.score import NoScoreError
from sortedrl.rewards.tags import conclusion, starts_in_thoughts
from sortedrl.types import Prompt

_LONGEST_ANSWER = 2000


class _OutOfTimeError(BaseException):
    """The comparison timed out; not an `Exception`, so that no library catches it."""


def math_reward(
    prompt: Prompt,
    response: str,
    *,
    right: float = 1.0,
    wrong: float = 0.0,
    no_answer: float = 0.0,
    relative_error: float = 1e-4,
    after_thoughts: bool = True,
    allow_unevaluated: bool = False,
    last_number: bool = False,
    time_limit_seconds: float = 5.0,
) -> dict[str, float]:
    r"""`right`, `wrong`, or `no_answer` without a complete box; also `correct` and `answered`.

    If the gold is a plain number the answer must be one, otherwise it must be evaluated as far as
    the gold; `allow_unevaluated` accepts any expression with the right value, as most evaluations
    do. If the gold is a list, its parts may be in several boxes.

    With `last_number` a response without any box is scored by the last number in it (see
    `numbers.last_number`), as GSM8K is usually evaluated; a box that was cut off is no answer.

    If math-verify cannot parse the gold, only the same text is right, and the part `unread_gold`
    is 1. A row without a gold is an error. An answer that math-verify cannot parse is wrong; so is
    one that takes longer than the limit, with the part `timed_out` set to 1. The limit works in
    the main thread only: elsewhere the caller needs its own.
    """
    golds = _golds(prompt)
    rules = _rules(prompt, relative_error=relative_error, allow_unevaluated=allow_unevaluated)
    is_prefilled = starts_in_thoughts(prompt)
    text = conclusion(response, is_prefilled=is_prefilled) if after_thoughts else response
    answer = read_answer(text)
    if answer is None and last_number and not has_box(text):
        number = number_at_end(text)
        answer = None if number is None else BoxedAnswer((number,), (number,))
    if answer is None or not answer.last:
        return {"reward": no_answer, "correct": 0.0, "answered": 0.0}
    verdicts = []
    notes = {}
    try:
        with _time_limit(time_limit_seconds):
            for gold in golds:
                verdicts.append(_compare(gold, answer, rules))
                if verdicts[-1].is_equal:
                    return {"reward": right, "correct": 1.0, "answered": 1.0}
    except _OutOfTimeError:
        notes["timed_out"] = 1.0
    if not all(verdict.is_gold_read for verdict in verdicts):
        notes["unread_gold"] = 1.0
    return {"reward": wrong, "correct": 0.0, "answered": 1.0, **notes}


def lowest_math_reward(options: Mapping[str, float]) -> float:
    """The lowest reward with these options."""
    return min(options[grade] for grade in ("right", "wrong", "no_answer"))


def _compare(gold: str | list[str], answer: BoxedAnswer, rules: Rules) -> Equality:
    """Compare with the last box, or with several.

    A list may be given in boxes that are near each other. If the gold is one value, boxes joined
    by `or` must all be right.
    """
    golds = [gold] if isinstance(gold, str) else gold
    if len(golds) == 1 and num_parts(golds[0]) == 1:
        boxes = list(dict.fromkeys(answer.joined))
        if _is_too_long(boxes):
            return Equality(False)
        verdicts = [compare(golds[0], box, rules) for box in boxes]
        return Equality(
            all(verdict.is_equal for verdict in verdicts),
            all(verdict.is_gold_read for verdict in verdicts),
        )
    boxes = list(answer.near) if num_parts(answer.last) == 1 else [answer.last]
    if _is_too_long(boxes):
        return Equality(False)
    if len(golds) == len(boxes) == 1:
        return compare(golds[0], boxes[0], rules)
    verdict = compare_all(golds, boxes, rules)
    if verdict.is_equal or len(boxes) == len(set(boxes)):
        return verdict
    return compare_all(golds, list(dict.fromkeys(boxes)), rules)


def _is_too_long(boxes: Sequence[str]) -> bool:
    return sum(map(len, boxes)) > _LONGEST_ANSWER


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise in the block when its time is over, if a timer signal is available and unused."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


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
    if isinstance(value, float) and not math.isfinite(value):
        raise NoScoreError(f"a gold answer must be a finite number, got {value}; drop the row")
    text = str(value)
    if not tidied(text):
        raise NoScoreError(f"a gold answer must not be empty, got {text!r}; drop the row")
    return text


def _rules(prompt: Prompt, *, relative_error: float, allow_unevaluated: bool) -> Rules:
    error = prompt.fields.get("error") or 0.0
    if not isinstance(error, int | float) or not math.isfinite(error):
        raise NoScoreError(f"`error` must be a number, got {error!r:.100}")
    return Rules(
        relative=relative_error,
        absolute=error,
        is_measured=prompt.fields.get("is_measured") is True,
        allow_unevaluated=allow_unevaluated,
        question=_question(prompt),
    )


def _question(prompt: Prompt) -> str:
    """The text of all user messages."""
    text = prompt.fields.get("prompt")
    if isinstance(text, Sequence) and not isinstance(text, str):
        messages = [one for one in text if isinstance(one, Mapping) and one.get("role") == "user"]
        text = "\n".join(str(message.get("content")) for message in messages)
    return text if isinstance(text, str) else ""
