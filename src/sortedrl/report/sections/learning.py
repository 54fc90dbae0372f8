"""What the runs learned: held-out scores by answers, tokens and seconds, and numbers of updates.

Runs that differ only in the seed are one line, their mean, with a band from the least of them to
the most (see `seeds`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.evaluation.tables import percent
from sortedrl.report.axis import short
from sortedrl.report.courses import (
    By,
    entropies,
    rewards,
    sample_sizes,
    scores,
)
from sortedrl.report.html import escape, table, unbroken
from sortedrl.report.record import HeldOut, Run
from sortedrl.report.sections.frame import course_figure, framed, paragraph
from sortedrl.report.seeds import SeedGroup, seed_groups

_BY: tuple[tuple[By, str], ...] = (
    ("answers", "What an answer teaches."),
    ("tokens", "What a token teaches."),
    ("seconds", "What a second teaches; evaluations take no time."),
)
"""Ways to count how far a run is, and their captions."""


def section(runs: Sequence[Run]) -> str:
    """The curves, how soon a common score was reached, and what to make of them."""
    groups = seed_groups([run.record for run in runs])
    parts = [
        *(course_figure(scores(runs, by=by), groups, caption=caption) for by, caption in _BY),
        _soonest(groups, runs),
        course_figure(
            rewards(runs), groups, caption="Rewards of sampled answers to training prompts."
        ),
        _folded(
            "Effective sample size and entropy",
            course_figure(
                sample_sizes(runs),
                groups,
                caption="How much the weights of the correction leave of the tokens: 100 % where "
                "the weights that wrote them are those that are trained.",
            ),
            course_figure(
                entropies(runs),
                groups,
                caption="How open the choice of the next token is; near 0 the model tries nothing "
                "new.",
            ),
        ),
    ]
    return framed("Learning", _note(groups) if any(parts) else "", *parts, name="learning")


def _note(groups: Sequence[SeedGroup]) -> str:
    """What a line is, and how much it says."""
    words = []
    if any(len(group.places) > 1 for group in groups):
        words.append(
            "A line with a band is the mean of runs that differ only in the seed; the band goes "
            "from the least of them to the most. It ends where the first of them ends."
        )
    if any(len(group.places) == 1 for group in groups):
        words.append(
            "A line of one run is one draw: small differences say nothing before other seeds "
            "repeat them."
        )
    return paragraph(" ".join(words))


def _folded(summary: str, *figures: str) -> str:
    """Figures behind a line that opens them."""
    inside = "".join(figures)
    if not inside:
        return ""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def _soonest(groups: Sequence[SeedGroup], runs: Sequence[Run]) -> str:
    """A table of what each group needed to come to the best score that all of them reached.

    Those that never did better than before their first update do not take part in the choice of
    the score, which would be no achievement.
    """
    averaged = [_averaged([runs[place] for place in group.places]) for group in groups]
    tops = [max(r.score for r in held) for held in averaged if held and _has_gained(held)]
    if len(tops) < 2:
        return ""
    goal = min(tops)
    who = "all of them" if len(tops) == len(groups) else "all that gained anything"
    means = any(len(group.places) > 1 for group in groups)
    words = (
        f"The best score that {who} reached is {percent(goal)}. This is what each needed until its "
        "first evaluation with that score or more"
        f"{'; where there are several seeds, on average' if means else ''}."
    )
    told = table(
        ["", "answers", "tokens", "seconds"],
        [[group.name, *_needed(held, goal)] for group, held in zip(groups, averaged, strict=True)],
        caption=unbroken(f"Trained on until {percent(goal)} right answers"),
        quiet=[False] * len(groups),
    )
    return paragraph(words) + told


def _averaged(runs: Sequence[Run]) -> list[HeldOut]:
    """The first evaluations of the runs, the second ones, and so on, as their means."""
    return [
        HeldOut(
            score=_mean([held_out.score for held_out in together]),
            update=together[0].update,
            answers=_mean([held_out.answers for held_out in together]),
            tokens=_mean([held_out.tokens for held_out in together]),
            seconds=_mean([held_out.seconds for held_out in together]),
        )
        for together in zip(*(run.scores for run in runs), strict=False)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _has_gained(held: Sequence[HeldOut]) -> bool:
    return max(held_out.score for held_out in held) > held[0].score


def _needed(held: Sequence[HeldOut], goal: float) -> list[str]:
    """Answers, tokens and seconds until the score was reached."""
    for held_out in held:
        if held_out.score >= goal:
            return [short(held_out.answers), short(held_out.tokens), short(held_out.seconds)]
    return ["not reached"] * 3
