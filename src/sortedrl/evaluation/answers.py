"""What an evaluation is made of: scored answers of one model to the prompts of some tasks.

An answer is named by its task, its prompt (the row's place in the task) and its sample index; each
name occurs once. All answers of a prompt share its question, gold answer and level.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from sortedrl.errors import DataError
from sortedrl.rewards.calls import Failure
from sortedrl.types import FinishReason

AnswerKey = tuple[str, int, int]
"""`(task, prompt_id, sample_index)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer with its score."""

    task: str
    prompt_id: int
    sample_index: int
    level: str | None
    question: str
    gold: str | None
    response: str
    reward: float | None
    """`None` where the reward failed and no outcome is configured for that."""
    parts: Mapping[str, float]
    is_correct: bool
    num_tokens: int
    finish_reason: FinishReason
    failure: Failure | None = None

    @property
    def key(self) -> AnswerKey:
        """Its name in the evaluation."""
        return (self.task, self.prompt_id, self.sample_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How much of a task the model was to answer; a run that was cut off has less."""

    prompts: int
    samples: int
    """Answers for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The answers of one model, what it was asked, and the settings it answered under.

    `asked` is empty where it is not known; then what is there counts as all there should be.
    """

    label: str
    answers: Sequence[Answer]
    asked: Mapping[str, Asked] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


def by_prompt(evaluation: Evaluation) -> dict[str, dict[int, list[Answer]]]:
    """The answers by task and prompt, in the order of prompts and samples.

    Tasks come in the order asked, then in that of their first answers.
    """
    tasks: dict[str, dict[int, list[Answer]]] = {name: {} for name in evaluation.asked}
    for answer in sorted(evaluation.answers, key=lambda answer: answer.key[1:]):
        tasks.setdefault(answer.task, {}).setdefault(answer.prompt_id, []).append(answer)
    first_seen = dict.fromkeys([*evaluation.asked, *(a.task for a in evaluation.answers)])
    for name, prompts in tasks.items():
        for prompt_id, answers in prompts.items():
            _check_siblings(answers, place=f"{evaluation.label}, {name} prompt {prompt_id}")
    return {name: tasks[name] for name in first_seen if tasks[name]}


def in_order(levels: Iterable[str]) -> list[str]:
    """The distinct levels, with numbers inside their names in the order of numbers.

    >>> in_order(["level 10", "level 9", "level 9"])
    ['level 9', 'level 10']
    """
    return sorted(set(levels), key=_natural)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Words before numbers; of two numbers without leading zeros the longer is the larger."""
    pieces = re.split(r"([0-9]+)", name)
    return [
        (1, len(piece.lstrip("0")), piece.lstrip("0")) if number % 2 else (0, 0, piece)
        for number, piece in enumerate(pieces)
        if piece
    ]


def _check_siblings(answers: Sequence[Answer], *, place: str) -> None:
    """Refuse answers of one prompt that contradict each other."""
    first = answers[0]
    samples = [answer.sample_index for answer in answers]
    if len(set(samples)) < len(samples):
        raise DataError(place, f"each answer must be there once, got the samples {samples}")
    for answer in answers:
        for what, one, other in (
            ("question", first.question, answer.question),
            ("gold answer", first.gold, answer.gold),
            ("level", first.level, answer.level),
        ):
            if one != other:
                raise DataError(
                    place,
                    f"its answers must share one {what}, got {one!r:.80} and {other!r:.80}; "
                    "give answers to different data different task names",
                )
