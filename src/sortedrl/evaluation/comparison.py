"""Two evaluations of the same prompts, compared prompt by prompt.

A pair is one prompt with answers in both. Pairs are resampled (see `statistics`), so a prompt that
is hard for both says nothing about which is better. Prompts with answers in only one are counted
and excluded. Intervals are for single comparisons: of twenty levels without a true difference, one
is expected to look significant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.errors import DataError
from sortedrl.evaluation.statistics import (
    Answer,
    Draws,
    Estimate,
    Evaluation,
    by_level,
    by_prompt,
    column_mean,
    difference_draws,
    differences,
    estimate,
    mean_draws,
    p_value,
    pass_sizes,
    prompt_passes,
    shared_sizes,
)

Pair = tuple[list[Answer], list[Answer]]
"""The answers to one prompt, before and after."""

CLEAR = 0.05
"""A difference with a p-value below this is significant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A rate before and after, on the same prompts."""

    before: float
    after: float
    change: Estimate
    """After minus before."""
    p_value: float

    @property
    def is_clear(self) -> bool:
        """Whether the difference is significant."""
        return self.p_value < CLEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The differences of one task, or of one level of it."""

    task: str
    level: str | None
    """`None`: the whole task."""
    num_prompts: int
    num_better: int
    """Prompts with a larger share of right answers after than before."""
    num_worse: int
    passes: Mapping[int, Difference]
    """pass@k for k = 1, 2, 4, ... as far as both have k answers to some prompt."""

    @property
    def mean(self) -> Difference:
        """The share of right answers, mean@k."""
        return self.passes[1]

    @property
    def num_equal(self) -> int:
        """Prompts with equal shares of right answers."""
        return self.num_prompts - self.num_better - self.num_worse


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A prompt that went from mostly wrong to mostly right, or the other way."""

    task: str
    prompt_id: int
    level: str | None
    before: float
    """Share of right answers before."""
    after: float

    @property
    def is_gain(self) -> bool:
        """Whether it is mostly right now."""
        return self.after > self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpaired:
    """Prompts of a task with answers in only one evaluation."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of two evaluations: each shared task followed by its levels, and the average."""

    before: str
    after: str
    parts: tuple[Contrast, ...]
    macro: Mapping[int, Difference]
    """pass@k averaged over tasks with equal weight; empty for one task."""
    flips: tuple[Flip, ...]
    """Largest changes first."""
    unpaired: Mapping[str, Unpaired]
    """For each task, the excluded prompts."""

    @property
    def tasks(self) -> tuple[Contrast, ...]:
        """The whole tasks."""
        return tuple(part for part in self.parts if part.level is None)

    @property
    def headline(self) -> Difference:
        """The main result: the macro average, or the difference of the only task."""
        return self.macro[1] if self.macro else self.parts[0].mean


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Compare two evaluations on the prompts with answers in both."""
    names = f"{before.label} and {after.label}"
    old, new = by_prompt(before), by_prompt(after)
    shared = [task for task in old if task in new]
    pairs = {task: _pairs(old[task], new[task], place=f"{names}, {task}") for task in shared}
    pairs = {task: paired for task, paired in pairs.items() if paired}
    if not pairs:
        raise DataError(
            names,
            "two evaluations must share at least one prompt of one task to be compared, got "
            f"the tasks {', '.join(old) or 'none'} and {', '.join(new) or 'none'}",
        )
    parts: list[Contrast] = []
    draws: list[dict[int, Draws]] = []
    for task, paired in pairs.items():
        whole, drawn = _contrast(list(paired.values()), task=task, level=None)
        levels = by_level((pair[0][0].level, pair) for pair in paired.values())
        parts += [whole, *(_contrast(of, task=task, level=name)[0] for name, of in levels.items())]
        draws.append(drawn)
    left_out = {
        task: Unpaired(
            before=len(old.get(task, {})) - len(pairs.get(task, {})),
            after=len(new.get(task, {})) - len(pairs.get(task, {})),
        )
        for task in dict.fromkeys([*old, *new])
    }
    return Comparison(
        before=before.label,
        after=after.label,
        parts=tuple(parts),
        macro=_macro(parts, draws),
        flips=_flips(pairs),
        unpaired=left_out,
    )


def _pairs(
    old: Mapping[int, list[Answer]], new: Mapping[int, list[Answer]], *, place: str
) -> dict[int, Pair]:
    """The shared prompts; refused if their questions differ."""
    pairs = {}
    for prompt_id, answers in old.items():
        if prompt_id not in new:
            continue
        for what, one, other in differences(answers[0], new[prompt_id][0], "question", "gold"):
            raise DataError(
                f"{place} prompt {prompt_id}",
                f"both must have the same questions, got the {what} {one} and {other}; "
                "evaluate both on the same data",
            )
        pairs[prompt_id] = (answers, new[prompt_id])
    return pairs


def _contrast(
    pairs: Sequence[Pair], *, task: str, level: str | None
) -> tuple[Contrast, dict[int, Draws]]:
    """The differences of these pairs, and their resampled means."""
    most = max(min(len(old), len(new)) for old, new in pairs)
    sizes = pass_sizes(most)
    values = [(prompt_passes(old, sizes), prompt_passes(new, sizes)) for old, new in pairs]
    changes = [
        tuple(None if a is None or b is None else b - a for a, b in zip(old, new, strict=True))
        for old, new in values
    ]
    drawn = difference_draws(changes, key=f"{task!r} {level!r}")
    draws = dict(zip(sizes, drawn, strict=True))
    passes = {}
    for place, k in enumerate(sizes):
        shared = [(old[place], new[place]) for old, new in values]
        shared = [(a, b) for a, b in shared if a is not None and b is not None]
        before, after = (column_mean(side)[0] for side in zip(*shared, strict=True))
        passes[k] = _difference(before, after, draws=draws[k], num_prompts=len(shared))
    means = [change[0] for change in changes if change[0] is not None]
    contrast = Contrast(
        task=task,
        level=level,
        num_prompts=len(pairs),
        num_better=sum(mean > 0 for mean in means),
        num_worse=sum(mean < 0 for mean in means),
        passes=passes,
    )
    return contrast, draws


def _difference(before: float, after: float, *, draws: Draws, num_prompts: int) -> Difference:
    change = estimate(after - before, draws, num_prompts=num_prompts)
    return Difference(before=before, after=after, change=change, p_value=p_value(draws))


def _macro(
    parts: Sequence[Contrast], draws: Sequence[Mapping[int, Draws]]
) -> dict[int, Difference]:
    """The differences averaged over tasks with equal weight, for each k that all tasks have."""
    tasks = [part for part in parts if part.level is None]
    return {
        k: _difference(
            math.fsum(part.passes[k].before for part in tasks) / len(tasks),
            math.fsum(part.passes[k].after for part in tasks) / len(tasks),
            draws=mean_draws([drawn[k] for drawn in draws]),
            num_prompts=sum(part.passes[k].change.num_prompts for part in tasks),
        )
        for k in shared_sizes([part.passes for part in tasks])
    }


def _flips(pairs: Mapping[str, Mapping[int, Pair]]) -> tuple[Flip, ...]:
    """Prompts with at least half of the answers right in one evaluation only."""
    flips = []
    for task, prompts in pairs.items():
        for prompt_id, (old, new) in prompts.items():
            before, after = (sum(a.is_correct for a in side) / len(side) for side in (old, new))
            if (before >= 0.5) != (after >= 0.5):
                flips.append(
                    Flip(
                        task=task,
                        prompt_id=prompt_id,
                        level=old[0].level,
                        before=before,
                        after=after,
                    )
                )
    return tuple(sorted(flips, key=lambda flip: -abs(flip.after - flip.before)))
