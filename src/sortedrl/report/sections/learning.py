"""What the runs learned: held-out scores by answers, tokens and seconds, and numbers of updates.

Runs that differ only in the seed are one line, their mean, with a band from the least of them to
the most (see `seeds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from sortedrl.evaluation.tables import percent
from sortedrl.report.axis import short
from sortedrl.report.curves import curves
from sortedrl.report.html import escape, table, unbroken
from sortedrl.report.record import HeldOut, Run, number
from sortedrl.report.sections.frame import figure, framed, paragraph
from sortedrl.report.seeds import SeedGroup, seed_groups, seed_series

_BY = (
    ("answers", "answers trained on", "What an answer teaches."),
    ("tokens", "tokens trained on", "What a token teaches."),
    ("seconds", "seconds of training", "What a second teaches; evaluations take no time."),
)
"""Ways to count how far a run is: the field of an evaluation, the axis, the caption."""
_OF_UPDATES = (
    (
        "length/mean",
        "tokens",
        "Mean length of the answers of an update",
        "Where the short answers of a group are trained on first, lengths climb from update to "
        "update until the group is used up.",
    ),
    (
        "reward/mean",
        "reward",
        "Mean reward of the answers of an update",
        "Rewards of sampled answers to training prompts.",
    ),
)
"""Numbers of each update: the name in the metrics, the axis, the title, the caption."""
_OF_UPDATES_FOLDED = (
    (
        "correction/ess",
        "effective sample size",
        "Effective sample size of an update",
        "How much the weights of the correction leave of the tokens: 100 % where the weights that "
        "wrote them are those that are trained.",
    ),
    (
        "entropy/mean",
        "entropy",
        "Mean entropy of a token",
        "How open the choice of the next token is; near 0 the model tries nothing new.",
    ),
)
_SHARES = frozenset({"correction/ess"})


def section(runs: Sequence[Run]) -> str:
    """The curves, how soon a common score was reached, and what to make of them."""
    groups = seed_groups([run.record for run in runs])
    scores = [_by(name, groups, runs) for name, *_ in _BY] if any(r.scores for r in runs) else []
    folded = [made for told in _OF_UPDATES_FOLDED for made in _over_updates(told, groups, runs)]
    parts = [
        *scores,
        _soonest(groups, runs),
        *(made for told in _OF_UPDATES for made in _over_updates(told, groups, runs)),
        _folded("Effective sample size and entropy", folded),
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


def _by(name: str, groups: Sequence[SeedGroup], runs: Sequence[Run]) -> str:
    """The held-out score against one way to count how far the runs are."""
    (_, x_label, caption) = next(told for told in _BY if told[0] == name)
    place = attrgetter(name)
    lines = [[(place(held_out), held_out.score) for held_out in run.scores] for run in runs]
    picture = curves(
        seed_series(groups, lines),
        x_label=x_label,
        y_label="right answers",
        title=f"Right answers to held-out prompts, by {x_label}",
        is_share=True,
    )
    return figure(caption, picture)


def _over_updates(
    told: tuple[str, str, str, str], groups: Sequence[SeedGroup], runs: Sequence[Run]
) -> Iterator[str]:
    """A number of each update as a figure, where any run has it."""
    name, y_label, title, caption = told
    pairs = [[(number(r, "update"), number(r, name)) for r in run.record.rows] for run in runs]
    lines = [[(x, y) for x, y in line if x is not None and y is not None] for line in pairs]
    if any(lines):
        picture = curves(
            seed_series(groups, lines),
            x_label="update",
            y_label=y_label,
            title=title,
            is_share=name in _SHARES,
        )
        yield figure(caption, picture)


def _folded(summary: str, figures: Sequence[str]) -> str:
    """Figures behind a line that opens them."""
    if not figures:
        return ""
    return f"<details><summary>{escape(summary)}</summary>{''.join(figures)}</details>"


def _soonest(groups: Sequence[SeedGroup], runs: Sequence[Run]) -> str:
    """A table of what each group needed to come to the best score that all of them reached.

    Those that never did better than before their first update do not take part in the choice of
    the score, which would be no achievement.
    """
    rounds = [_rounds([runs[place] for place in group.places]) for group in groups]
    tops = [max(r.score for r in held) for held in rounds if held and _has_gained(held)]
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
        [[group.name, *_needed(held, goal)] for group, held in zip(groups, rounds, strict=True)],
        caption=unbroken(f"Trained on until {percent(goal)} right answers"),
        quiet=[False] * len(groups),
    )
    return paragraph(words) + told


def _rounds(runs: Sequence[Run]) -> list[HeldOut]:
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


def _has_gained(rounds: Sequence[HeldOut]) -> bool:
    return max(held_out.score for held_out in rounds) > rounds[0].score


def _needed(rounds: Sequence[HeldOut], goal: float) -> list[str]:
    """Answers, tokens and seconds until the score was reached."""
    for held_out in rounds:
        if held_out.score >= goal:
            return [short(held_out.answers), short(held_out.tokens), short(held_out.seconds)]
    return ["not reached"] * 3
