"""What an evaluation found, in a headline, a sentence and the notes a reader must not miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sortedrl.evaluation.answers import Evaluation
from sortedrl.evaluation.comparison import Comparison, Difference
from sortedrl.evaluation.estimates import Estimates, Summary
from sortedrl.evaluation.intervals import Estimate
from sortedrl.evaluation.tables import chance, percent, points

_MANY_TRUNCATED = 0.05
"""Share of truncated answers from which it is worth a note."""
_FEW_ANSWERED = 0.95
"""Share of answers in the form asked for below which it is worth a note."""


def summary_words(
    evaluations: Sequence[Evaluation], summaries: Sequence[Summary]
) -> tuple[str, str]:
    """The headline of a single evaluation, or of several side by side."""
    if len(evaluations) > 1:
        told = [
            f"{evaluation.label} {percent(_best_known(summary).value)}"
            for evaluation, summary in zip(evaluations, summaries, strict=True)
        ]
        return f"{len(evaluations)} models evaluated", f"Answers right: {', '.join(told)}."
    label, summary = evaluations[0].label, summaries[0]
    rate = _best_known(summary)
    interval = f"95 % interval {100 * rate.low:.1f} to {percent(rate.high)}"
    first = summary.tasks[0]
    if summary.macro:
        tasks = f"{len(summary.tasks)} tasks"
        headline = f"{label} answers {percent(rate.value)} right on average over {tasks}"
        return headline, f"Every task counts the same. {interval}, {rate.num_prompts:,} prompts."
    lead = f"{interval}, {_amount(first)}."
    most = max(first.passes)
    if most > 1:
        lead += f" At least one of {most} answers is right for {percent(first.passes[most].value)}."
    return f"{label} answers {percent(rate.value)} of {first.task} right", lead


def comparison_words(comparison: Comparison) -> tuple[str, str]:
    """The headline of two evaluations compared."""
    difference = comparison.headline
    change = difference.change
    if difference.is_clear:
        word = "better" if change.value > 0 else "worse"
        size = points(abs(change.value)).removeprefix("+")
        headline = f"{comparison.after} is {word} than {comparison.before} by {size} points"
    else:
        headline = f"No clear difference between {comparison.before} and {comparison.after}"
    over = (
        f"over {len(comparison.tasks)} tasks, each counting the same"
        if comparison.macro
        else f"of {comparison.parts[0].task}"
    )
    interval = f"95 % interval {points(change.low)} to {points(change.high)}"
    lead = (
        f"{percent(difference.before)} and {percent(difference.after)} of the answers right "
        f"{over}: {points(change.value)} points, {interval}, p {_equals(difference)}, "
        f"{_several(change.num_prompts, 'prompt')}."
    )
    return headline, lead


def notes(evaluation: Evaluation, summary: Summary) -> Iterator[str]:
    """What a reader of the numbers must know: what is missing, failed or was truncated."""
    begun = {part.task for part in summary.tasks}
    for task in evaluation.asked:
        if task not in begun:
            yield f"{evaluation.label}, {task}: no answer yet, so it counts nowhere."
    for part in summary.tasks:
        name = f"{evaluation.label}, {part.task}"
        if part.num_missing or part.num_short:
            yield (
                f"{name} is incomplete: {part.num_missing or 0:,} prompts without an answer, "
                f"{part.num_short:,} with fewer than {part.samples:,}. Missing answers tend to be "
                "long ones, so the numbers may be too high."
            )
        if part.failures:
            kinds = ", ".join(f"{kind} {number:,}" for kind, number in part.failures.items())
            count = _several(sum(part.failures.values()), "answer")
            yield f"{name}: no verdict on {count}, counted as wrong ({kinds})."
        if part.truncated >= _MANY_TRUNCATED:
            yield f"{name}: {percent(part.truncated)} of the answers reached the token limit."
        answered = part.reward_parts.get("answered", 1.0)
        if answered < _FEW_ANSWERED:
            yield (
                f"{name}: only {percent(answered)} of the responses give an answer in the form "
                "asked for; the others count as wrong."
            )


def different_settings(before: Evaluation, after: Evaluation) -> Iterator[str]:
    """What makes a comparison one of settings as well as of models."""
    for name in dict.fromkeys([*before.settings, *after.settings]):
        old, new = before.settings.get(name), after.settings.get(name)
        if old != new:
            yield f"{name} differs: {old!r} for {before.label}, {new!r} for {after.label}."


def _amount(part: Estimates) -> str:
    """How many prompts and answers a task has."""
    if part.num_short:
        return f"{_several(part.num_answers, 'answer')} to {_several(part.num_prompts, 'prompt')}"
    each = _several(part.samples, "answer")
    return f"{_several(part.num_prompts, 'prompt')} with {each} each"


def _best_known(summary: Summary) -> Estimate:
    """The one rate that says most."""
    return summary.macro[1] if summary.macro else summary.tasks[0].mean


def _equals(difference: Difference) -> str:
    told = chance(difference.p_value)
    return told if told.startswith("<") else f"= {told}"


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
