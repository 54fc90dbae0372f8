"""Made-up evaluations: prompts of known difficulty, and answers that are right as often."""

import math
from random import Random

from sortedrl.evaluation.statistics import Answer, Evaluation


def answer(prompt_id=0, sample_index=0, **changes) -> Answer:
    fields = {
        "task": "sums",
        "prompt_id": prompt_id,
        "sample_index": sample_index,
        "level": None,
        "question": f"What is {prompt_id} + 1?",
        "gold": str(prompt_id + 1),
        "response": "I do not know.",
        "reward": 0.0,
        "parts": {},
        "is_correct": False,
        "num_tokens": 5,
        "finish_reason": "stop",
        "failure": None,
    }
    return Answer(**(fields | changes))


def verdicts(rows, *, label="model", task="sums", levels=None) -> Evaluation:
    """One prompt for each row of verdicts."""
    answers = [
        answer(
            prompt_id,
            sample,
            task=task,
            level=None if levels is None else levels[prompt_id],
            is_correct=bool(is_correct),
            reward=float(is_correct),
        )
        for prompt_id, row in enumerate(rows)
        for sample, is_correct in enumerate(row)
    ]
    return Evaluation(label=label, answers=answers)


def chances(seed, *, prompts) -> list[float]:
    """How likely an answer to each prompt is right: many hard ones, some easy ones."""
    random = Random(f"chances {seed}")
    return [random.betavariate(0.5, 1.0) for _ in range(prompts)]


def shifted(chance, effect) -> float:
    """The chance after the log-odds have moved by `effect`."""
    chance = min(max(chance, 1e-9), 1 - 1e-9)
    return 1 / (1 + math.exp(-math.log(chance / (1 - chance)) - effect))


def sampled(seed, of, *, samples) -> list[list[bool]]:
    """Verdicts drawn with these chances."""
    random = Random(f"verdicts {seed}")
    return [[random.random() < chance for _ in range(samples)] for chance in of]
