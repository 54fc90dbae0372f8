"""The statistics of an evaluation: mean@k, pass@k, reward, length, failures, with 95 % intervals.

An answer is identified by its task, its prompt (the row's index in the task) and its sample index;
each occurs once. All answers of a prompt share its question, gold answer and level.

Every prompt has equal weight, however many answers it has. mean@k is the share of right answers;
pass@k the probability that at least one of k answers is right. pass@k uses only prompts with k
answers or more; `Estimate.num_prompts` is their number. The missing answers of an interrupted run
tend to be the long ones, so its results should be shown with `num_short` and `num_missing`.

Intervals resample prompts, never answers, because the answers to one prompt are correlated: a set
of 30 prompts says the same about the next prompt whether each was answered 4 or 400 times. They
are about prompts like these, not about the same prompts answered once more.

Resampling is the Bayesian bootstrap: instead of drawing prompts with replacement, every prompt gets
a random weight, together Dirichlet-distributed. Prompts with equal values share one weight (a sum
of exponentials is a gamma variable), so thousands of prompts with a few distinct values need only a
few draws.

The plain bootstrap fails in extreme cases: 30 prompts all answered right resample to 30 prompts all
answered right, an interval of width 0; with a true error rate of 5 %, its interval covers the truth
in 77 % of the cases. Pseudo-prompts are therefore added:

- for rates, half a prompt that is all right and half a prompt that is all wrong; with one answer
  per prompt this is the Jeffreys interval of a proportion;
- for differences, one prompt for each side, as different as those that differ are on average; with
  one answer per prompt this is the usual correction of adding one pair to each of the two ways in
  which a pair can differ.

An interval always contains its value. Results are a function of the values and of a text key, so
the same answers give the same interval.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, mul
from random import Random
from types import MappingProxyType
from typing import TypeVar

from sortedrl.errors import DataError
from sortedrl.rewards.pool.score import Failure
from sortedrl.types import FinishReason

Item = TypeVar("Item")
Prompt = TypeVar("Prompt")
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
    """`None` if the reward failed and no outcome is configured for that."""
    parts: Mapping[str, float]
    is_correct: bool
    num_tokens: int
    finish_reason: FinishReason
    failure: Failure | None = None

    @property
    def key(self) -> AnswerKey:
        """Its identity in the evaluation."""
        return (self.task, self.prompt_id, self.sample_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How much of a task was requested; an interrupted run has less."""

    prompts: int
    samples: int
    """Answers for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The answers of one model, the questions, and the settings.

    `asked` is empty if unknown; the existing answers then count as complete.
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
    """The distinct levels, with numbers in their names sorted numerically.

    >>> in_order(["level 10", "level 9", "level 9"])
    ['level 9', 'level 10']
    """
    return sorted(set(levels), key=_natural)


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, evenly spaced from the first on.

    >>> evenly("abcdef", 3), evenly("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: words before numbers; of two numbers without leading zeros the longer is larger."""
    pieces = re.split(r"([0-9]+)", name)
    return [
        (1, len(piece.lstrip("0")), piece.lstrip("0")) if number % 2 else (0, 0, piece)
        for number, piece in enumerate(pieces)
        if piece
    ]


def _check_siblings(answers: Sequence[Answer], *, place: str) -> None:
    """Refuse inconsistent answers to one prompt."""
    samples = [answer.sample_index for answer in answers]
    if len(set(samples)) < len(samples):
        raise DataError(place, f"each sample must occur once, got the samples {samples}")
    for answer in answers:
        for what, one, other in differences(answers[0], answer, "question", "gold", "level"):
            raise DataError(
                place,
                f"its answers must share one {what}, got {one} and {other}; use different task "
                "names for different data",
            )


def differences(one: object, other: object, *names: str) -> Iterator[tuple[str, str, str]]:
    """The attributes in which two objects differ, with both values as text."""
    for name in names:
        mine, theirs = (attrgetter(name)(side) for side in (one, other))
        if mine != theirs:
            what = "gold answer" if name == "gold" else name
            yield what, f"{mine!r:.80}", f"{theirs!r:.80}"


def by_level(prompts: Iterable[tuple[str | None, Prompt]]) -> dict[str, list[Prompt]]:
    """Prompts by level, in order; empty unless there are several levels."""
    levels: dict[str, list[Prompt]] = {}
    for level, prompt in prompts:
        if level is not None:
            levels.setdefault(level, []).append(prompt)
    return {level: levels[level] for level in in_order(levels)} if len(levels) > 1 else {}


def shared_sizes(tasks: Sequence[Mapping[int, object]]) -> list[int]:
    """The k of pass@k that all tasks have; empty for a single task."""
    if len(tasks) < 2:
        return []
    return [k for k in tasks[0] if all(k in passes for passes in tasks)]


CONFIDENCE = 0.95
RESAMPLES = 10_000

Values = tuple[float | None, ...]
"""The value of each measure for one prompt; `None` if it has none."""

Draws = Sequence[float]
"""The resampled means of one measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts and its interval."""

    value: float
    low: float
    high: float
    num_prompts: int
    """Number of prompts in the mean."""


def rate_draws(prompts: Sequence[Values], *, key: str) -> list[Draws]:
    """Resampled means of measures that lie in 0..1, one list for each measure."""
    width = len(prompts[0])
    return _resample(prompts, [(0.5, (0.0,) * width), (0.5, (1.0,) * width)], key=key)


def difference_draws(prompts: Sequence[Values], *, key: str) -> list[Draws]:
    """Resampled means of differences, one list for each measure."""
    typical = tuple(_typical(column) for column in zip(*prompts, strict=True))
    return _resample(prompts, [(1.0, tuple(-size for size in typical)), (1.0, typical)], key=key)


def mean_draws(tasks: Sequence[Draws]) -> Draws:
    """Resampled macro averages: every task has equal weight."""
    return [math.fsum(drawn) / len(tasks) for drawn in zip(*tasks, strict=True)]


def estimate(value: float, draws: Draws, *, num_prompts: int) -> Estimate:
    """The value with the interval of its resampled means."""
    ordered = sorted(draws)
    # the position from which one more draw beyond 0 would make the p-value less than 1 - CONFIDENCE
    outside = int((1 - CONFIDENCE) / 2 * (len(ordered) + 1)) - 1
    low, high = ordered[outside], ordered[-1 - outside]
    return Estimate(
        value=value, low=min(low, value), high=max(high, value), num_prompts=num_prompts
    )


def p_value(draws: Draws) -> float:
    """Two-sided p-value of "no difference": below 0.05 if the interval excludes 0."""
    below = sum(drawn <= 0 for drawn in draws)
    above = sum(drawn >= 0 for drawn in draws)
    return min(1.0, 2 * (min(below, above) + 1) / (len(draws) + 1))


def _typical(differences: Sequence[float | None]) -> float:
    """Typical size of a non-zero difference; 1 if there is none."""
    squares = [value * value for value in differences if value]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 1.0


def _cell_order(cell: tuple[Values, int]) -> tuple[int, list[tuple[bool, float]]]:
    """Rare values first, independent of the order of prompts."""
    values, count = cell
    return count, [(value is None, value or 0.0) for value in values]


def _resample(
    prompts: Sequence[Values], imagined: Sequence[tuple[float, Values]], *, key: str
) -> list[Draws]:
    """`RESAMPLES` means of each measure."""
    cells = sorted(Counter(prompts).items(), key=_cell_order)
    num_single = sum(count == 1 for _, count in cells)
    counts = [count for _, count in cells[num_single:]] + [weight for weight, _ in imagined]
    columns = list(zip(*[values for values, _ in cells], *[v for _, v in imagined], strict=True))
    measures = [
        (
            [0.0 if value is None else value for value in column],
            tuple(value is not None for value in column),
        )
        for column in columns
    ]
    masks = {mask for _, mask in measures}
    random = Random(key)
    log, uniform, gamma = math.log, random.random, random.gammavariate
    draws = []
    for _ in range(RESAMPLES):
        # a gamma variable of shape 1 is exponential, which is several times cheaper
        weights = [-log(1.0 - uniform()) for _ in range(num_single)]
        weights += [gamma(count, 1.0) for count in counts]
        whole = {mask: sum(compress(weights, mask)) for mask in masks}
        draws.append([sum(map(mul, column, weights)) / whole[mask] for column, mask in measures])
    return list(zip(*draws, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The numbers of one task, or of one level of it."""

    task: str
    level: str | None
    """`None`: the whole task."""
    samples: int
    """Expected answers per prompt: k of mean@k."""
    num_prompts: int
    """Prompts with at least one answer."""
    num_short: int
    """Prompts with answers, but fewer than `samples`."""
    num_missing: int | None
    """Prompts without answers; `None` if the expected number is unknown."""
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
    """Answers that could not be scored, which count as wrong."""
    reward_parts: Mapping[str, float]
    """Means of the components of the reward."""

    @property
    def mean(self) -> Estimate:
        """mean@k: the same number as pass@1."""
        return self.passes[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of an evaluation: each task followed by its levels, and their macro average."""

    parts: tuple[Estimates, ...]
    macro: Mapping[int, Estimate]
    """pass@k averaged over tasks with equal weight; empty for one task."""

    @property
    def tasks(self) -> tuple[Estimates, ...]:
        """The whole tasks."""
        return tuple(part for part in self.parts if part.level is None)

    def levels(self, task: str) -> tuple[Estimates, ...]:
        """The levels of one task, in the order of their names."""
        return tuple(part for part in self.parts if part.task == task and part.level is not None)


def pass_at(k: int, *, num_right: int, num_samples: int) -> float:
    """Unbiased estimate of the probability that one of k answers is right.

    It is the share of the k-subsets of the answers that contain a right one.

    >>> pass_at(1, num_right=1, num_samples=4), pass_at(2, num_right=1, num_samples=4)
    (0.25, 0.5)
    """
    ways = math.comb(num_samples, k)
    return (ways - math.comb(num_samples - num_right, k)) / ways


def pass_sizes(samples: int) -> list[int]:
    """The k at which pass@k is reported: powers of two, and all samples.

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
    """The mean of the known values, and their number."""
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
        parts.append(whole)
        levels = by_level((answers[0].level, answers) for answers in prompts.values())
        for level, members in levels.items():
            part, _ = _estimates(members, task=task, level=level, samples=samples, num_missing=None)
            parts.append(part)
        draws.append(drawn)
    return Summary(parts=tuple(parts), macro=_macro(parts, draws))


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
        reward=_mean(prompts, lambda answer: answer.reward),
        tokens=_mean(prompts, lambda answer: answer.num_tokens) or 0.0,
        truncated=_mean(prompts, lambda answer: answer.finish_reason == "length") or 0.0,
        failures=dict(sorted(failures.items())),
        reward_parts=_means_of_parts(prompts),
    )
    return part, draws


def _part(name: str) -> Callable[[Answer], float | None]:
    return lambda answer: answer.parts.get(name)


def _means_of_parts(prompts: Sequence[Sequence[Answer]]) -> dict[str, float]:
    names = dict.fromkeys(name for answers in prompts for a in answers for name in a.parts)
    means = {name: _mean(prompts, _part(name)) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(
    prompts: Sequence[Sequence[Answer]], number: Callable[[Answer], float | None]
) -> float | None:
    """The mean over prompts of the mean over their answers; `None` if no answer has a value."""
    means = []
    for answers in prompts:
        present = [value for answer in answers if (value := number(answer)) is not None]
        if present:
            means.append(math.fsum(present) / len(present))
    return math.fsum(means) / len(means) if means else None


def _macro(parts: Sequence[Estimates], draws: Sequence[Mapping[int, Draws]]) -> dict[int, Estimate]:
    """pass@k averaged over tasks with equal weight, for each k that all tasks have."""
    tasks = [part for part in parts if part.level is None]
    return {
        k: estimate(
            math.fsum(part.passes[k].value for part in tasks) / len(tasks),
            mean_draws([drawn[k] for drawn in draws]),
            num_prompts=sum(part.passes[k].num_prompts for part in tasks),
        )
        for k in shared_sizes([part.passes for part in tasks])
    }
