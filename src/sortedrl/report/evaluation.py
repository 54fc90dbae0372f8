"""The page of an evaluation, or of two compared: words, tables, pictures and answers to browse.

It is one file that opens from disk. What models and data sets wrote is shown as text, never as
markup (see `html`), and the answers travel as data that the page's script turns into text nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from sortedrl.evaluation.answers import Evaluation
from sortedrl.evaluation.comparison import Comparison, Contrast
from sortedrl.evaluation.estimates import Estimates, Summary, summarise
from sortedrl.evaluation.intervals import Estimate
from sortedrl.evaluation.tables import (
    MACRO,
    Table,
    comparison_table,
    level_name,
    pass_table,
    summary_table,
)
from sortedrl.report.findings import comparison_words, different_settings, notes, summary_words
from sortedrl.report.html import asset, data_script, escape, page, prose, table
from sortedrl.report.rates import (
    Group,
    change_marks,
    length_histograms,
    pass_curves,
    rate_bars,
)
from sortedrl.report.samples import MAX_FLIPS, num_packed, packed
from sortedrl.report.svg import series, stylesheet


def evaluation_page(evaluations: Sequence[Evaluation], comparison: Comparison | None) -> str:
    """The page of these evaluations; `comparison` is that of the first two."""
    needed = 1 if comparison is None else 2
    if len(evaluations) < needed:
        raise ValueError(f"the page needs {needed} evaluations or more, got {len(evaluations)}")
    summaries = [summarise(evaluation) for evaluation in evaluations]
    data = packed(evaluations, comparison)
    sections = [
        _opening(evaluations, summaries, comparison),
        _compared(comparison) if comparison is not None else "",
        _numbers(evaluations, summaries),
        *_tasks(evaluations, summaries),
        _flips(comparison) if comparison is not None else "",
        _browser(evaluations, num_shown=num_packed(data)),
        _reading(has_comparison=comparison is not None),
        _settings(evaluations),
    ]
    body = "\n".join(filter(None, sections))
    return page(
        title=f"Evaluation of {' and '.join(evaluation.label for evaluation in evaluations)}",
        body=f"<main>\n{body}\n</main>\n{data_script('data', data)}",
        style=stylesheet() + asset("page.css"),
        script=_script(),
    )


def _script() -> str:
    return "\n".join(
        ['"use strict";', "(() => {", asset("browse.js"), asset("evaluation.js"), "})();"]
    )


def _opening(
    evaluations: Sequence[Evaluation], summaries: Sequence[Summary], comparison: Comparison | None
) -> str:
    if comparison is not None:
        headline, lead = comparison_words(comparison)
    else:
        headline, lead = summary_words(evaluations, summaries)
    found = [
        note
        for evaluation, summary in zip(evaluations, summaries, strict=True)
        for note in notes(evaluation, summary)
    ]
    if comparison is not None:
        found += different_settings(evaluations[0], evaluations[1])
    items = [f"<li>{prose(note)}</li>" for note in found]
    told = f"<ul class='notes'>{''.join(items)}</ul>" if items else ""
    return f"<header><h1>{prose(headline)}</h1><p class='lead'>{prose(lead)}</p>{told}</header>"


def _numbers(evaluations: Sequence[Evaluation], summaries: Sequence[Summary]) -> str:
    tables = [
        _nested(summary_table(summary), caption=evaluation.label)
        for evaluation, summary in zip(evaluations, summaries, strict=True)
    ]
    return f"<section><h2>Numbers</h2>{''.join(tables)}</section>"


def _nested(told: Table, *, caption: str) -> str:
    """A table of tasks and levels with the levels set back under their task."""
    headings, rows = told
    return table(
        [headings[0], *headings[2:]],
        [[row[1] or row[0], *row[2:]] for row in rows],
        caption=caption,
        quiet=[bool(row[1]) for row in rows],
    )


def _compared(comparison: Comparison) -> str:
    groups = [
        Group(name=_name(part), rates=[part.mean.change], is_quiet=part.level is not None)
        for part in comparison.parts
    ]
    if comparison.macro:
        groups.append(Group(name=MACRO, rates=[comparison.macro[1].change]))
    caption = f"{comparison.before} and {comparison.after}, on the same prompts"
    passes = pass_table(comparison)
    more = _nested(passes, caption="Changes of pass@k in percentage points") if passes[1] else ""
    changes = _figure(
        "Change in percentage points, with 95 % intervals",
        change_marks(groups, label="Changes of the share of right answers"),
    )
    left_out = [
        f"{task}: {unpaired.before:,} only in {comparison.before}, {unpaired.after:,} only in "
        f"{comparison.after}"
        for task, unpaired in comparison.unpaired.items()
        if unpaired.before or unpaired.after
    ]
    note = f"<p>Prompts left out, {escape('; '.join(left_out))}.</p>" if left_out else ""
    return (
        f"<section><h2>Compared prompt by prompt</h2>"
        f"{_nested(comparison_table(comparison), caption=caption)}{note}"
        f"<div class='beside'>{changes}{more}</div></section>"
    )


def _flips(comparison: Comparison) -> str:
    gains = sum(flip.is_gain for flip in comparison.flips)
    losses = len(comparison.flips) - gains
    if not comparison.flips:
        return "<section><h2>No prompt flipped between mostly wrong and mostly right</h2></section>"
    cap = f" The {MAX_FLIPS} largest changes are shown." if gains + losses > MAX_FLIPS else ""
    return (
        f"<section><h2>Prompts that flipped: {gains:,} to right, {losses:,} to wrong</h2>"
        f"<p>At least half of the answers are right on one side only.{cap}</p>"
        "<form id='flip-filters' class='filters'><label>show <select name='way'>"
        "<option value=''>both ways</option><option value='gain'>to right</option>"
        "<option value='loss'>to wrong</option></select></label></form>"
        "<div id='flips'></div><button type='button' id='more-flips' hidden>more</button></section>"
    )


def _tasks(evaluations: Sequence[Evaluation], summaries: Sequence[Summary]) -> Iterator[str]:
    """A section of pictures for each task."""
    names = dict.fromkeys(part.task for summary in summaries for part in summary.tasks)
    for task in names:
        figures = [*_level_figure(task, summaries), *_pass_figure(task, summaries)]
        figures += _length_figures(task, evaluations)
        key = _key(evaluations) if len(evaluations) > 1 else ""
        yield (
            f"<section><h2>{escape(task)}</h2>{key}<div class='figures'>{''.join(figures)}</div>"
            "</section>"
        )


def _level_figure(task: str, summaries: Sequence[Summary]) -> Iterator[str]:
    by_level: dict[str, list[Estimate | None]] = {}
    for place, summary in enumerate(summaries):
        for part in summary.levels(task):
            rates = by_level.setdefault(_name(part), [None] * len(summaries))
            rates[place] = part.mean
    if by_level:
        groups = [Group(name=name, rates=rates) for name, rates in by_level.items()]
        picture = rate_bars(groups, label=f"Share of right answers by level in {task}")
        yield _figure("Right answers by level, with 95 % intervals", picture)


def _pass_figure(task: str, summaries: Sequence[Summary]) -> Iterator[str]:
    curves = [part.passes for summary in summaries for part in summary.tasks if part.task == task]
    if max(k for curve in curves for k in curve) > 1:
        picture = pass_curves(curves, label=f"pass@k in {task}")
        yield _figure("pass@k: at least one of k answers is right", picture)


def _length_figures(task: str, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    sides = [[a for a in evaluation.answers if a.task == task] for evaluation in evaluations]
    answering = [(e.label, side) for e, side in zip(evaluations, sides, strict=True) if side]
    pictures = length_histograms([side for _, side in answering], label=f"Lengths in {task}")
    for (label, _), picture in zip(answering, pictures, strict=True):
        whose = f", {label}" if len(evaluations) > 1 else ""
        yield _figure(f"Length of right and wrong answers{whose}", picture)


def _browser(evaluations: Sequence[Evaluation], *, num_shown: int) -> str:
    total = sum(len(evaluation.answers) for evaluation in evaluations)
    note = (
        f"All {total:,} answers."
        if num_shown == total
        else f"{num_shown:,} of {total:,} answers, evenly chosen over the prompts."
    )
    models = "".join(
        f"<option value='{number}'>{escape(evaluation.label)}</option>"
        for number, evaluation in enumerate(evaluations)
    )
    model = (
        f"<label>model <select name='model'><option value=''>all</option>{models}</select></label>"
        if len(evaluations) > 1
        else ""
    )
    return (
        f"<section><h2>Answers</h2><p>{note}</p>"
        "<noscript><p>Browsing the answers needs JavaScript; everything above does not.</p>"
        f"</noscript><form id='filters' class='filters'>{model}"
        "<label>task <select name='task'><option value=''>all</option></select></label>"
        "<label>level <select name='level'><option value=''>all</option></select></label>"
        "<label>verdict <select name='verdict'><option value=''>all</option>"
        "<option value='right'>right</option><option value='wrong'>wrong</option>"
        "<option value='truncated'>truncated</option>"
        "<option value='failure'>no verdict</option></select></label>"
        "<label>tokens from <input name='least' type='number' min='0' step='1'></label>"
        "<label>to <input name='most' type='number' min='0' step='1'></label>"
        "<label>order <select name='order'><option value=''>as asked</option>"
        "<option value='short'>shortest first</option><option value='long'>longest first</option>"
        "</select></label>"
        "<label class='wide'>search <input name='words' type='search'></label></form>"
        "<p id='count' role='status'></p><div id='answers'></div>"
        "<button type='button' id='more' hidden>more</button></section>"
    )


def _reading(*, has_comparison: bool) -> str:
    compared = (
        "<p>A change is clear when its interval leaves out 0, which is when p is below 0.05. "
        "Of twenty levels that do not differ, one is expected to look different.</p>"
        if has_comparison
        else ""
    )
    return (
        "<section><h2>How to read this</h2>"
        "<p>mean@k is the share of right answers when each prompt is answered k times. "
        "pass@k is the chance that at least one of k answers is right, estimated without bias from "
        "all answers to a prompt. Every prompt counts the same.</p>"
        "<p>Intervals hold the truth about prompts like these in 95 of 100 such evaluations. "
        "They come from resampling prompts, not answers, because answers to one prompt resemble "
        f"each other.</p>{compared}</section>"
    )


def _settings(evaluations: Sequence[Evaluation]) -> str:
    lists = []
    for evaluation in evaluations:
        if evaluation.settings:
            entries = "".join(
                f"<dt>{escape(name)}</dt><dd>{escape(_words(value))}</dd>"
                for name, value in evaluation.settings.items()
            )
            lists.append(f"<h3>{escape(evaluation.label)}</h3><dl>{entries}</dl>")
    return f"<section><h2>Settings</h2>{''.join(lists)}</section>" if lists else ""


def _words(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def _key(evaluations: Sequence[Evaluation]) -> str:
    """Which colour is whose."""
    entries = "".join(
        f"<li><span class='swatch {series(number)}'></span>{escape(evaluation.label)}</li>"
        for number, evaluation in enumerate(evaluations)
    )
    return f"<ul class='key'>{entries}</ul>"


def _name(part: Estimates | Contrast) -> str:
    return part.task if part.level is None else level_name(part.level)
