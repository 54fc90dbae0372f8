"""Answers to browse: what the models wrote, filtered by reward, length, update and words.

The answers travel as columns of data that `answers.js` turns into text nodes. A page holds not more
of them than it can carry: chosen evenly over each run, long ones without their middle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from sortedrl.answer_log import LoggedAnswer
from sortedrl.report.axis import short
from sortedrl.report.html import escape
from sortedrl.report.record import Run
from sortedrl.report.samples import characters_each, shortened
from sortedrl.report.sections.frame import framed, paragraph
from sortedrl.report.svg import SERIES

MAX_ANSWERS = 3000
"""Answers of all runs together."""

_GOLDEN = (math.sqrt(5) - 1) / 2
_ORDERS = (
    ("update up", "first updates first"),
    ("update down", "last updates first"),
    ("reward up", "lowest reward first"),
    ("reward down", "highest reward first"),
    ("tokens up", "shortest first"),
    ("tokens down", "longest first"),
)


def section(runs: Sequence[Run]) -> str:
    """Filters and an empty list, which the script fills; nothing where no answer was kept."""
    total = sum(len(run.record.answers) for run in runs)
    if not total:
        return ""
    chosen = [answer for _, answer in _chosen(runs)]
    shown = f"{len(chosen):,} of {total:,}" if len(chosen) < total else f"All {total:,}"
    note = (
        f"{shown} answers that {'the runs' if len(runs) > 1 else 'the run'} kept as text, "
        "some of every update."
    )
    if len(chosen) < total:
        note += " They are chosen evenly from the first to the last."
    without = [run.name for run in runs if not run.record.answers]
    if without:
        note += f" None of {', '.join(without)}."
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
    return framed(
        "Answers",
        paragraph(note),
        "<noscript><p>Browsing the answers needs JavaScript.</p></noscript>",
        form,
        '<p class="meta" role="status"></p><div class="listing"></div>',
        '<button type="button" hidden>more</button>',
        name="answers",
    )


def data(runs: Sequence[Run]) -> dict[str, object]:
    """The answers as columns; a question that was answered more than once is there once."""
    chosen = _chosen(runs)
    limit = characters_each([len(answer.response) + len(answer.question) for _, answer in chosen])
    answers = [answer for _, answer in chosen]
    questions = {text: place for place, text in enumerate(_unique(a.question for a in answers))}
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
        "parts": [_finite_parts(answer.parts) for answer in answers],
        "question": [questions[answer.question] for answer in answers],
        "response": [shortened(answer.response, limit) for answer in answers],
    }


def _chosen(runs: Sequence[Run]) -> list[tuple[int, LoggedAnswer]]:
    """The answers that the page shows, each with the place of its run."""
    kept = [run.record.answers for run in runs]
    counts = _fair_counts([len(answers) for answers in kept], MAX_ANSWERS)
    return [
        (place, answer)
        for place, (answers, count) in enumerate(zip(kept, counts, strict=True))
        for answer in _evenly(answers, count)
    ]


def _fair_counts(wanted: Sequence[int], most: int) -> list[int]:
    """How many each gets of `most`: an equal share, and what others leave of theirs.

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
    """One answer from each of `count` equal stretches.

    The answers of an update stand in the order of their lengths. The place inside a stretch
    changes from one to the next, so that not all are of one length.
    """
    edges = [place * len(answers) // count for place in range(count + 1)] if count else []
    return [
        answers[start + int(place * _GOLDEN % 1 * (end - start))]
        for place, (start, end) in enumerate(pairwise(edges))
    ]


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite_parts(parts: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in parts.items()}


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
    """Two fields for the least and the most; empty ones show how far the answers go."""
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
