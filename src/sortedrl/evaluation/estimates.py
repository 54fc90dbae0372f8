"""The numbers of an evaluation: mean@k, pass@k, reward, length and failures.

Every prompt counts the same, however many of its answers are there. mean@k is the share of right
answers; pass@k the chance that at least one of k answers is right. pass@k uses only prompts with k
answers or more; `Estimate.num_prompts` says how many those are. In a run that was cut off the
missing answers are rather the long ones, so `num_short` and `num_missing` belong beside its
numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sortedrl.errors import DataError
from sortedrl.evaluation.answers import Answer, Evaluation, by_prompt, in_order
from sortedrl.evaluation.intervals import (
    Draws,
    Estimate,
    Values,
    estimate,
    mean_draws,
    rate_draws,
)
from sortedrl.rewards.calls import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The numbers of one task, or of one level of it."""

    task: str
    level: str | None
    """`None`: the whole task."""
    samples: int
    """Answers a prompt should have: k of mean@k."""
    num_prompts: int
    """Prompts with at least one answer."""
    num_short: int
    """Those of them that have fewer than `samples` answers."""
    num_missing: int | None
    """Prompts without any answer; `None` where it is not known how many there should be."""
    num_answers: int
    passes: Mapping[int, Estimate]
    """pass@k for k = 1, 2, 4, ... and `samples`, as far as there are prompts with k answers."""
    reward: float | None
    """Mean reward of the answers that have one."""
    tokens: float
    """Mean length of the answers."""
    truncated: float
    """Share of the answers that reached the token limit."""
    failures: Mapping[Failure, int]
    """Answers without a verdict, which count as wrong."""
    reward_parts: Mapping[str, float]
    """Means of the named parts of the reward."""

    @property
    def mean(self) -> Estimate:
        """mean@k: the same number as pass@1."""
        return self.passes[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of an evaluation: each task followed by its levels, and their macro average."""

    parts: tuple[Estimates, ...]
    macro: Mapping[int, Estimate]
    """pass@k with every task counting the same (`num_prompts` counts all); empty for one task."""

    @property
    def tasks(self) -> tuple[Estimates, ...]:
        """The whole tasks."""
        return tuple(part for part in self.parts if part.level is None)

    def levels(self, task: str) -> tuple[Estimates, ...]:
        """The levels of one task, in the order of their names."""
        return tuple(part for part in self.parts if part.task == task and part.level is not None)


def pass_at(k: int, *, num_right: int, num_samples: int) -> float:
    """An unbiased estimate of the chance that one of k answers is right.

    That is the share of the ways to choose k of the answers that contain a right one.

    >>> pass_at(1, num_right=1, num_samples=4), pass_at(2, num_right=1, num_samples=4)
    (0.25, 0.5)
    """
    ways = math.comb(num_samples, k)
    return (ways - math.comb(num_samples - num_right, k)) / ways


def pass_sizes(samples: int) -> list[int]:
    """The k at which pass@k is told: powers of two, and all samples.

    >>> pass_sizes(10)
    [1, 2, 4, 8, 10]
    """
    return [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]


def prompt_passes(answers: Sequence[Answer], sizes: Sequence[int]) -> Values:
    """pass@k of one prompt; `None` for each k it has too few answers for."""
    num_right, num_samples = sum(answer.is_correct for answer in answers), len(answers)
    return tuple(
        pass_at(k, num_right=num_right, num_samples=num_samples) if k <= num_samples else None
        for k in sizes
    )


def column_mean(column: Sequence[float | None]) -> tuple[float, int]:
    """The mean of what is there, and how much is there."""
    present = [value for value in column if value is not None]
    return math.fsum(present) / len(present), len(present)


def summarise(evaluation: Evaluation) -> Summary:
    """The numbers of all tasks and levels of an evaluation."""
    tasks = by_prompt(evaluation)
    if not tasks:
        raise DataError(evaluation.label, "an evaluation needs at least one answer, got none")
    parts: list[Estimates] = []
    draws: list[dict[int, Draws]] = []
    for task, prompts in tasks.items():
        asked = evaluation.asked.get(task)
        samples = asked.samples if asked else max(map(len, prompts.values()))
        num_missing = asked.prompts - len(prompts) if asked else None
        whole, drawn = _estimates(
            list(prompts.values()),
            task=task,
            level=None,
            samples=samples,
            num_missing=num_missing,
        )
        parts += [whole, *_levels(prompts, task=task, samples=samples)]
        draws.append(drawn)
    return Summary(parts=tuple(parts), macro=_macro(parts, draws))


def _levels(prompts: Mapping[int, list[Answer]], *, task: str, samples: int) -> list[Estimates]:
    """The numbers of each level, if there are several."""
    levels = in_order(a[0].level for a in prompts.values() if a[0].level is not None)
    if len(levels) < 2:
        return []
    parts = []
    for level in levels:
        members = [answers for answers in prompts.values() if answers[0].level == level]
        part, _ = _estimates(members, task=task, level=level, samples=samples, num_missing=None)
        parts.append(part)
    return parts


def _estimates(
    prompts: Sequence[Sequence[Answer]],
    *,
    task: str,
    level: str | None,
    samples: int,
    num_missing: int | None,
) -> tuple[Estimates, dict[int, Draws]]:
    """The numbers of these prompts, and the resampled means of their pass@k."""
    most = min(samples, max(map(len, prompts)))
    sizes = [k for k in pass_sizes(samples) if k <= most]
    values = [prompt_passes(answers, sizes) for answers in prompts]
    draws = dict(zip(sizes, rate_draws(values, key=f"{task!r} {level!r}"), strict=True))
    means = zip(sizes, map(column_mean, zip(*values, strict=True)), strict=True)
    passes = {k: estimate(mean, draws[k], num_prompts=count) for k, (mean, count) in means}
    answers = [answer for siblings in prompts for answer in siblings]
    failures = Counter(answer.failure for answer in answers if answer.failure is not None)
    part = Estimates(
        task=task,
        level=level,
        samples=samples,
        num_prompts=len(prompts),
        num_short=sum(len(siblings) < samples for siblings in prompts),
        num_missing=num_missing,
        num_answers=len(answers),
        passes=passes,
        reward=_mean_of(prompts, lambda answer: answer.reward),
        tokens=_mean_of(prompts, lambda answer: answer.num_tokens) or 0.0,
        truncated=_mean_of(prompts, lambda answer: answer.finish_reason == "length") or 0.0,
        failures=dict(sorted(failures.items())),
        reward_parts=_means_of_parts(prompts),
    )
    return part, draws


def _means_of_parts(prompts: Sequence[Sequence[Answer]]) -> dict[str, float]:
    names = dict.fromkeys(name for siblings in prompts for a in siblings for name in a.parts)
    means = {}
    for name in names:
        parts = [[answer.parts.get(name) for answer in siblings] for siblings in prompts]
        mean = _mean(parts)
        if mean is not None:
            means[name] = mean
    return means


def _mean_of(
    prompts: Sequence[Sequence[Answer]], number: Callable[[Answer], float | None]
) -> float | None:
    return _mean([list(map(number, answers)) for answers in prompts])


def _mean(prompts: Sequence[Sequence[float | None]]) -> float | None:
    """The mean over prompts of the mean over their answers; `None` where nothing has a number."""
    means = []
    for numbers in prompts:
        present = [value for value in numbers if value is not None]
        if present:
            means.append(math.fsum(present) / len(present))
    return math.fsum(means) / len(means) if means else None


def _macro(parts: Sequence[Estimates], draws: Sequence[Mapping[int, Draws]]) -> dict[int, Estimate]:
    """pass@k with every task counting the same, for each k that all tasks have."""
    tasks = [part for part in parts if part.level is None]
    if len(tasks) < 2:
        return {}
    sizes = [k for k in tasks[0].passes if all(k in part.passes for part in tasks)]
    return {
        k: estimate(
            math.fsum(part.passes[k].value for part in tasks) / len(tasks),
            mean_draws([drawn[k] for drawn in draws]),
            num_prompts=sum(part.passes[k].num_prompts for part in tasks),
        )
        for k in sizes
    }
