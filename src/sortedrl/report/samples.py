"""The answers a page carries with it for browsing: not more than it can hold, fairly chosen.

First come the answers that show the flipped prompts, then the first answers to prompts evenly
spread over all tasks, then the second ones, and so on. Long answers lose their middle when all
together would make the page too heavy; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sortedrl.evaluation.answers import Answer, Evaluation, by_prompt, in_order
from sortedrl.evaluation.comparison import Comparison, Flip

MAX_SAMPLES = 2000
MAX_FLIPS = 200
MAX_CHARACTERS = 8_000_000

_LIMITS = (1_000_000, 50_000, 20_000, 10_000, 5_000, 2_000)
"""Characters of one answer, tried in this order until all fit."""

PromptKey = tuple[str, int]
Place = tuple[int, Answer]
"""An answer and the evaluation it belongs to."""


def packed(evaluations: Sequence[Evaluation], comparison: Comparison | None) -> dict[str, object]:
    """What the page's script needs: prompts, answers and flips, as JSON values."""
    prompts = _prompts(evaluations)
    shown = [] if comparison is None else list(comparison.flips[:MAX_FLIPS])
    pairs = [_telling(flip, prompts[flip.task, flip.prompt_id]) for flip in shown]
    chosen = _chosen(prompts, first=[place for pair in pairs for place in pair])
    keys = {key: number for number, key in enumerate(_keys_in_use(prompts, chosen))}
    limit = characters_each([len(answer.response) for _, answer in chosen])
    numbers = {(which, answer.key): number for number, (which, answer) in enumerate(chosen)}
    flips = [
        {
            "prompt": keys[flip.task, flip.prompt_id],
            "before": flip.before,
            "after": flip.after,
            "answers": [numbers[which, answer.key] for which, answer in pair],
        }
        for flip, pair in zip(shown, pairs, strict=True)
    ]
    tasks: dict[str, list[str]] = {}
    for task, prompt_id in keys:
        level = _first(prompts[task, prompt_id]).level
        tasks.setdefault(task, []).extend([] if level is None else [level])
    return {
        "labels": [evaluation.label for evaluation in evaluations],
        "tasks": {task: in_order(levels) for task, levels in tasks.items()},
        "prompts": [_prompt_row(_first(prompts[key]), limit) for key in keys],
        "answers": [_row(which, answer, keys, limit) for which, answer in chosen],
        "flips": flips,
    }


def num_packed(data: Mapping[str, object]) -> int:
    """Answers in packed data."""
    answers = data["answers"]
    assert isinstance(answers, list)
    return len(answers)


def _prompts(evaluations: Sequence[Evaluation]) -> dict[PromptKey, list[list[Answer]]]:
    """For each prompt, in order, the answers of every evaluation."""
    found: dict[PromptKey, list[list[Answer]]] = {}
    grouped = [by_prompt(evaluation) for evaluation in evaluations]
    for task in dict.fromkeys(name for tasks in grouped for name in tasks):
        sides = [tasks.get(task, {}) for tasks in grouped]
        for prompt_id in sorted({number for side in sides for number in side}):
            found[task, prompt_id] = [side.get(prompt_id, []) for side in sides]
    return found


def _telling(flip: Flip, sides: Sequence[Sequence[Answer]]) -> tuple[Place, Place]:
    """One answer before and one after that show the flip."""

    def pick(which: int, *, is_correct: bool) -> Place:
        answers = sides[which]
        fits = (answer for answer in answers if answer.is_correct == is_correct)
        return which, next(fits, answers[0])

    return pick(0, is_correct=not flip.is_gain), pick(1, is_correct=flip.is_gain)


def _chosen(
    prompts: Mapping[PromptKey, Sequence[Sequence[Answer]]], *, first: Sequence[Place]
) -> list[Place]:
    """At most `MAX_SAMPLES` answers, in the order of prompts, evaluations and samples."""
    taken = {(which, answer.key): (which, answer) for which, answer in first}
    for places in _rounds(list(prompts.values())):
        fresh = [pair for pair in places if any((w, a.key) not in taken for w, a in pair)]
        room = MAX_SAMPLES - len(taken)
        width = max((len(pair) for pair in fresh), default=1)
        for pair in _evenly(fresh, room // width):
            taken |= {(which, answer.key): (which, answer) for which, answer in pair}
        if len(fresh) * width > room:
            break
    order = {key: place for place, key in enumerate(prompts)}
    return sorted(
        taken.values(), key=lambda p: (order[p[1].task, p[1].prompt_id], p[1].sample_index, p[0])
    )


def _rounds(prompts: Sequence[Sequence[Sequence[Answer]]]) -> Iterator[list[list[Place]]]:
    """The first answers of each evaluation to each prompt, then the second ones, and so on."""
    most = max((len(answers) for sides in prompts for answers in sides), default=0)
    for number in range(most):
        yield [
            [
                (which, answers[number])
                for which, answers in enumerate(sides)
                if number < len(answers)
            ]
            for sides in prompts
        ]


def _evenly(items: Sequence[list[Place]], count: int) -> list[list[Place]]:
    """At most `count` of the items, at even distances."""
    if count >= len(items):
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def _keys_in_use(
    prompts: Mapping[PromptKey, object], chosen: Sequence[Place]
) -> Iterator[PromptKey]:
    used = {(answer.task, answer.prompt_id) for _, answer in chosen}
    return (key for key in prompts if key in used)


def _first(sides: Sequence[Sequence[Answer]]) -> Answer:
    return next(answer for answers in sides for answer in answers)


def characters_each(lengths: Sequence[int]) -> int:
    """Characters of one text at which all together fit."""
    for limit in _LIMITS[:-1]:
        if sum(min(length, limit) for length in lengths) <= MAX_CHARACTERS:
            return limit
    return _LIMITS[-1]


def shortened(text: str, limit: int) -> str | list[str | int]:
    """The text, or its beginning, the number of characters left out, and its end."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return [text[: limit - end], len(text) - limit, text[-end:]]


def _prompt_row(answer: Answer, limit: int) -> dict[str, object]:
    return {
        "task": answer.task,
        "id": answer.prompt_id,
        "level": answer.level,
        "question": shortened(answer.question, limit),
        "gold": None if answer.gold is None else shortened(answer.gold, limit),
    }


def _row(
    which: int, answer: Answer, keys: Mapping[PromptKey, int], limit: int
) -> dict[str, object]:
    return {
        "model": which,
        "prompt": keys[answer.task, answer.prompt_id],
        "sample": answer.sample_index,
        "right": answer.is_correct,
        "tokens": answer.num_tokens,
        "truncated": answer.finish_reason == "length",
        "failure": answer.failure,
        "reward": answer.reward,
        "parts": dict(answer.parts),
        "response": shortened(answer.response, limit),
    }
