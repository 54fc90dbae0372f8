"""Learning curves, and answers to browse.

Runs that differ only in the seed are one line, their mean, with a band from minimum to maximum (see
`record`). Answers are columns of data that `answers.js` turns into text nodes; a page has a limited
number of them, spread evenly over each run, and long ones are shortened in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from sortedrl.core.files import LoggedAnswer
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.svg import NARROW, SERIES, neighbours, short
from sortedrl.report.html import (
    characters_each,
    escape,
    paragraph,
    section,
    shortened,
    table,
    unbroken,
)
from sortedrl.report.record import (
    By,
    HeldOut,
    Run,
    SeedGroup,
    chart_figure,
    metric_charts,
    reward_chart,
    score_chart,
    seed_groups,
)

_BY: tuple[tuple[By, str], ...] = (
    ("answers", "Accuracy by answers trained on."),
    ("tokens", "Accuracy by tokens trained on."),
    ("seconds", "Accuracy by training time; evaluation time is not counted."),
)
"""X axes of the learning curve, and their captions."""

MAX_ANSWERS = 3000
"""Limit of answers of all runs together."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_ORDERS = (
    ("update up", "first updates first"),
    ("update down", "last updates first"),
    ("reward up", "lowest reward first"),
    ("reward down", "highest reward first"),
    ("tokens up", "shortest first"),
    ("tokens down", "longest first"),
)


def learning_section(runs: Sequence[Run]) -> str:
    """The curves, the cost to reach a common score, and caveats."""
    groups = seed_groups([run.record for run in runs])
    parts = [
        *(chart_figure(score_chart(runs, by=by), groups, caption=caption) for by, caption in _BY),
        _soonest(groups, runs),
        chart_figure(
            reward_chart(runs), groups, caption="Rewards of sampled answers to training prompts."
        ),
        _small_charts(runs, groups),
    ]
    return section("Learning", _note(groups) if any(parts) else "", *parts, name="learning")


def _note(groups: Sequence[SeedGroup]) -> str:
    """What a line shows, and how reliable it is."""
    sentences = []
    if any(len(group.places) > 1 for group in groups):
        sentences.append(
            "A line with a band is the mean of runs that differ only in the seed; the band spans "
            "minimum to maximum. Both end where the shortest of these runs ends."
        )
    if any(len(group.places) == 1 for group in groups):
        sentences.append(
            "A line of one run is one sample: do not trust small differences until other "
            "seeds confirm them."
        )
    return paragraph(" ".join(sentences))


def _small_charts(runs: Sequence[Run], groups: Sequence[SeedGroup]) -> str:
    """Trainer metrics as small charts side by side."""
    charts = [
        chart_figure(chart, groups, caption=caption, width=NARROW)
        for chart, caption in metric_charts(runs)
    ]
    return f'<div class="figures">{"".join(charts)}</div>' if charts else ""


def _soonest(groups: Sequence[SeedGroup], runs: Sequence[Run]) -> str:
    """The cost of each group to reach the best score that all of them reached.

    Groups that never improved on their first evaluation are ignored when that score is chosen.
    """
    averaged = [_averaged([runs[place] for place in group.places]) for group in groups]
    courses = [[held_out.score for held_out in held] for held in averaged]
    tops = [max(scores) for scores in courses if scores and max(scores) > scores[0]]
    if len(tops) < 2:
        return ""
    goal = min(tops)
    who = "all runs" if len(tops) == len(groups) else "all runs that improved"
    means = any(len(group.places) > 1 for group in groups)
    text = (
        f"The highest accuracy that {who} reached is {percent(goal)}. The table shows what each "
        "run cost up to its first evaluation at or above it"
        f"{', averaged over seeds' if means else ''}."
    )
    costs = table(
        ["", "answers", "tokens", "seconds"],
        [[group.name, *_needed(held, goal)] for group, held in zip(groups, averaged, strict=True)],
        caption=unbroken(f"Cost to reach {percent(goal)} accuracy"),
    )
    return paragraph(text) + costs


def _averaged(runs: Sequence[Run]) -> list[HeldOut]:
    """Means of the first evaluations of the runs, of the second ones, and so on."""
    return [
        HeldOut(
            score=fmean(held_out.score for held_out in together),
            update=together[0].update,
            answers=fmean(held_out.answers for held_out in together),
            tokens=fmean(held_out.tokens for held_out in together),
            seconds=fmean(held_out.seconds for held_out in together),
        )
        for together in zip(*(run.scores for run in runs), strict=False)
    ]


def _needed(held: Sequence[HeldOut], goal: float) -> list[str]:
    """Answers, tokens and seconds until the score was reached."""
    for held_out in held:
        if held_out.score >= goal:
            return [short(held_out.answers), short(held_out.tokens), short(held_out.seconds)]
    return ["not reached"] * 3


def answers_section(runs: Sequence[Run]) -> str:
    """Filters and an empty list, which the script fills; empty if no answers were logged."""
    total = sum(len(run.record.answers) for run in runs)
    if not total:
        return ""
    chosen = [answer for _, answer in _chosen(runs)]
    shown = f"{len(chosen):,} of {total:,}" if len(chosen) < total else f"All {total:,}"
    note = (
        f"{shown} answers logged as text by {'the runs' if len(runs) > 1 else 'the run'}, "
        "a few from every update."
    )
    if len(chosen) < total:
        note += " They are sampled evenly over the run."
    without = [run.name for run in runs if not run.record.answers]
    if without:
        note += f" No answers from {', '.join(without)}."
    rewards = [answer.reward for answer in chosen if _finite(answer.reward) is not None]
    form = (
        '<form class="filters">'
        f"{_choice_of_run(runs)}"
        f"{_between('reward', [r for r in rewards if r is not None], is_whole=False)}"
        f"{_between('tokens', [answer.tokens for answer in chosen], is_whole=True)}"
        f"{_between('update', [answer.update for answer in chosen], is_whole=True)}"
        '<label><input name="truncated" type="checkbox"> truncated only</label>'
        f'<label>order <select name="order">{_options(_ORDERS)}</select></label>'
        '<label class="wide">search <input name="words" type="search"></label></form>'
    )
    return section(
        "Answers",
        paragraph(note),
        "<noscript><p>Browsing the answers needs JavaScript.</p></noscript>",
        form,
        '<p class="meta" role="status"></p><div class="listing"></div>',
        '<button type="button" hidden>more</button>',
        name="answers",
    )


def answers_data(runs: Sequence[Run]) -> dict[str, object]:
    """The answers as columns; repeated prompts are stored once."""
    chosen = _chosen(runs)
    limit = characters_each([len(answer.response) + len(answer.question) for _, answer in chosen])
    answers = [answer for _, answer in chosen]
    texts = dict.fromkeys(answer.question for answer in answers)
    questions = {text: place for place, text in enumerate(texts)}
    return {
        "runs": [run.name for run in runs],
        "colours": SERIES,
        "questions": [shortened(text, limit) for text in questions],
        "run": [place for place, _ in chosen],
        "update": [answer.update for answer in answers],
        "prompt": [answer.prompt for answer in answers],
        "sample": [answer.sample for answer in answers],
        "group": [answer.group for answer in answers],
        "oldest": [answer.versions[0] for answer in answers],
        "newest": [answer.versions[1] for answer in answers],
        "tokens": [answer.tokens for answer in answers],
        "truncated": [int(answer.is_truncated) for answer in answers],
        "reward": [_finite(answer.reward) for answer in answers],
        "parts": [{name: _finite(v) for name, v in answer.parts.items()} for answer in answers],
        "question": [questions[answer.question] for answer in answers],
        "response": [shortened(answer.response, limit) for answer in answers],
    }


def _chosen(runs: Sequence[Run]) -> list[tuple[int, LoggedAnswer]]:
    """The answers that the page shows, each with the index of its run."""
    kept = [run.record.answers for run in runs]
    counts = _fair_counts([len(answers) for answers in kept], MAX_ANSWERS)
    return [
        (place, answer)
        for place, (answers, count) in enumerate(zip(kept, counts, strict=True))
        for answer in _evenly(answers, count)
    ]


def _fair_counts(wanted: Sequence[int], most: int) -> list[int]:
    """Split `most` fairly: an equal share each, plus what others leave of theirs.

    >>> _fair_counts([10, 1000, 1000], 100)
    [10, 45, 45]
    """
    counts = [0] * len(wanted)
    by_need = sorted(range(len(wanted)), key=lambda place: wanted[place])
    for done, place in enumerate(by_need):
        counts[place] = min(wanted[place], most // (len(wanted) - done))
        most -= counts[place]
    return counts


def _evenly(answers: Sequence[LoggedAnswer], count: int) -> list[LoggedAnswer]:
    """One answer from each of `count` equal intervals.

    The answers of an update are sorted by length, so the position inside an interval varies to
    avoid picking the same length every time.
    """
    return [
        part[int(place * _GOLDEN % 1 * len(part))]
        for place, (_, part) in enumerate(neighbours(answers, most=count))
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _choice_of_run(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    names = [("", "all"), *((str(place), run.name) for place, run in enumerate(runs))]
    return f'<label>run <select name="run">{_options(names)}</select></label>'


def _options(names: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<option value="{escape(value)}">{escape(name)}</option>' for value, name in names
    )


def _between(name: str, values: Sequence[float], *, is_whole: bool) -> str:
    """Two input fields for minimum and maximum; the placeholders show the range."""
    if not values:
        return ""
    ends = (("least", "from", min(values)), ("most", "to", max(values)))
    step = "1" if is_whole else "any"
    fields = "".join(
        f'<input name="{name}_{end}" type="number" step="{step}" '
        f'placeholder="{short(value).replace(",", "")}" aria-label="{name} {word}">'
        f"{' to ' if end == 'least' else ''}"
        for end, word, value in ends
    )
    return f'<span class="between">{name} {fields}</span>'
