"""The page of an evaluation, or of two compared: findings, tables, charts and answers to browse.

It is a single file that opens from disk. Text from models and data sets is always escaped (see
`html`), and the answers are data that the page's script turns into text nodes.
First come the answers to flipped prompts, then the first answers to prompts evenly spread over all
tasks, then the second ones, and so on, up to a limit for the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from sortedrl.evaluation.comparison import Comparison, Contrast, Difference, Flip
from sortedrl.evaluation.results import WEIGHTS
from sortedrl.evaluation.statistics import (
    Answer,
    Estimate,
    Estimates,
    Evaluation,
    Summary,
    by_prompt,
    evenly,
    in_order,
    summarise,
)
from sortedrl.evaluation.tables import (
    MACRO,
    Table,
    chance,
    comparison_table,
    level_name,
    pass_table,
    percent,
    points,
    several,
    summary_table,
)
from sortedrl.report.charts.curves import (
    Group,
    change_marks,
    length_histograms,
    pass_curves,
    rate_bars,
)
from sortedrl.report.charts.svg import series_class, stylesheet
from sortedrl.report.html import (
    asset,
    characters_each,
    data_script,
    escape,
    figure,
    page,
    prose,
    script,
    shortened,
    table,
)

_MANY_TRUNCATED = 0.05
"""Share of truncated answers above which there is a note."""
_FEW_ANSWERED = 0.95
"""Share of answers in the requested format below which there is a note."""
MAX_SAMPLES = 2000
MAX_FLIPS = 200
PromptKey = tuple[str, int]
Place = tuple[int, Answer]
"""An answer and the evaluation it belongs to."""


def evaluation_page(evaluations: Sequence[Evaluation], comparison: Comparison | None) -> str:
    """The page of these evaluations; `comparison` is of the first two."""
    needed = 1 if comparison is None else 2
    if len(evaluations) < needed:
        raise ValueError(f"the page needs {needed} evaluations or more, got {len(evaluations)}")
    summaries = [summarise(evaluation) for evaluation in evaluations]
    data, num_shown = packed(evaluations, comparison)
    sections = [
        _opening(evaluations, summaries, comparison),
        _compared(comparison) if comparison is not None else "",
        _numbers(evaluations, summaries),
        *_tasks(evaluations, summaries),
        _flips(comparison) if comparison is not None else "",
        _browser(evaluations, num_shown=num_shown),
        _reading(has_comparison=comparison is not None),
        _settings(evaluations),
    ]
    body = "\n".join(filter(None, sections))
    return page(
        title=f"Evaluation of {' and '.join(evaluation.label for evaluation in evaluations)}",
        body=f"<main>\n{body}\n</main>\n{data_script('data', data)}",
        style=stylesheet() + asset("page.css"),
        script=script("browse.js", "evaluation.js"),
    )


def _opening(
    evaluations: Sequence[Evaluation], summaries: Sequence[Summary], comparison: Comparison | None
) -> str:
    if comparison is not None:
        headline, lead = comparison_headline(comparison)
    else:
        headline, lead = summary_headline(evaluations, summaries)
    found = [
        note
        for evaluation, summary in zip(evaluations, summaries, strict=True)
        for note in notes(evaluation, summary)
    ]
    if comparison is not None:
        found += different_settings(evaluations[0], evaluations[1])
    items = [f"<li>{prose(note)}</li>" for note in found]
    note_list = f"<ul class='notes'>{''.join(items)}</ul>" if items else ""
    return (
        f"<header><h1>{prose(headline)}</h1><p class='lead'>{prose(lead)}</p>{note_list}</header>"
    )


def _numbers(evaluations: Sequence[Evaluation], summaries: Sequence[Summary]) -> str:
    tables = [
        _nested(summary_table(summary), caption=evaluation.label)
        for evaluation, summary in zip(evaluations, summaries, strict=True)
    ]
    return f"<section><h2>Numbers</h2>{''.join(tables)}</section>"


def _nested(cells: Table, *, caption: str) -> str:
    """A table of tasks and levels, with levels muted under their task."""
    headings, rows = cells
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
    changes = figure(
        "Change in percentage points, with 95 % intervals",
        change_marks(groups, label="Changes in accuracy"),
    )
    left_out = [
        f"{task}: {unpaired.before:,} only in {comparison.before}, {unpaired.after:,} only in "
        f"{comparison.after}"
        for task, unpaired in comparison.unpaired.items()
        if unpaired.before or unpaired.after
    ]
    note = f"<p>Prompts excluded: {escape('; '.join(left_out))}.</p>" if left_out else ""
    return (
        f"<section><h2>Paired comparison by prompt</h2>"
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
        f"<p>At least half of the answers are right in one evaluation only.{cap}</p>"
        "<form id='flip-filters' class='filters'><label>show <select name='way'>"
        "<option value=''>both ways</option><option value='gain'>to right</option>"
        "<option value='loss'>to wrong</option></select></label></form>"
        "<div id='flips'></div><button type='button' id='more-flips' hidden>more</button></section>"
    )


def _tasks(evaluations: Sequence[Evaluation], summaries: Sequence[Summary]) -> Iterator[str]:
    """A section of charts for each task."""
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
        picture = rate_bars(groups, label=f"Accuracy by level in {task}")
        yield figure("Accuracy by level, with 95 % intervals", picture)


def _pass_figure(task: str, summaries: Sequence[Summary]) -> Iterator[str]:
    curves = [part.passes for summary in summaries for part in summary.tasks if part.task == task]
    if max(k for curve in curves for k in curve) > 1:
        picture = pass_curves(curves, label=f"pass@k in {task}")
        yield figure("pass@k: at least one of k answers is right", picture)


def _length_figures(task: str, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    sides = [[a for a in evaluation.answers if a.task == task] for evaluation in evaluations]
    answering = [(e.label, side) for e, side in zip(evaluations, sides, strict=True) if side]
    pictures = length_histograms([side for _, side in answering], label=f"Lengths in {task}")
    for (label, _), picture in zip(answering, pictures, strict=True):
        whose = f", {label}" if len(evaluations) > 1 else ""
        yield figure(f"Length of right and wrong answers{whose}", picture)


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
        "<label>order <select name='order'><option value=''>by prompt</option>"
        "<option value='short'>shortest first</option><option value='long'>longest first</option>"
        "</select></label>"
        "<label class='wide'>search <input name='words' type='search'></label></form>"
        "<p id='count' role='status'></p><div id='answers'></div>"
        "<button type='button' id='more' hidden>more</button></section>"
    )


def _reading(*, has_comparison: bool) -> str:
    compared = (
        "<p>A change is significant when its interval excludes 0, which is when p is below 0.05. "
        "Of twenty levels without a true difference, one is expected to look significant.</p>"
        if has_comparison
        else ""
    )
    return (
        "<section><h2>How to read this</h2>"
        "<p>mean@k is the accuracy with k answers to each prompt. "
        "pass@k is the chance that at least one of k answers is right, estimated without bias from "
        "all answers to a prompt. Every prompt has equal weight.</p>"
        "<p>Intervals are 95 % confidence intervals from a bootstrap over prompts, not over "
        f"answers, because answers to one prompt are correlated.</p>{compared}</section>"
    )


def _settings(evaluations: Sequence[Evaluation]) -> str:
    lists = ""
    for evaluation in evaluations:
        texts = {
            name: value if isinstance(value, str) else json.dumps(value, default=str)
            for name, value in evaluation.settings.items()
        }
        entries = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in texts.items()
        )
        lists += f"<h3>{escape(evaluation.label)}</h3><dl>{entries}</dl>" if entries else ""
    return f"<section><h2>Settings</h2>{lists}</section>" if lists else ""


def _key(evaluations: Sequence[Evaluation]) -> str:
    """The colour key of the evaluations."""
    entries = "".join(
        f"<li><span class='swatch {series_class(number)}'></span>{escape(evaluation.label)}</li>"
        for number, evaluation in enumerate(evaluations)
    )
    return f"<ul class='key'>{entries}</ul>"


def _name(part: Estimates | Contrast) -> str:
    return part.task if part.level is None else level_name(part.level)


def summary_headline(
    evaluations: Sequence[Evaluation], summaries: Sequence[Summary]
) -> tuple[str, str]:
    """Headline and lead of one evaluation, or of several side by side."""
    if len(evaluations) > 1:
        rates = [
            f"{evaluation.label} {percent(_best_known(summary).value)}"
            for evaluation, summary in zip(evaluations, summaries, strict=True)
        ]
        return f"{len(evaluations)} models evaluated", f"Accuracy: {', '.join(rates)}."
    label, summary = evaluations[0].label, summaries[0]
    rate = _best_known(summary)
    interval = f"95 % interval {100 * rate.low:.1f} to {percent(rate.high)}"
    first = summary.tasks[0]
    if summary.macro:
        tasks = f"{len(summary.tasks)} tasks"
        headline = f"{label}: {percent(rate.value)} accuracy on average over {tasks}"
        return headline, f"Each task has equal weight. {interval}, {rate.num_prompts:,} prompts."
    lead = f"{interval}, {_amount(first)}."
    most = max(first.passes)
    if most > 1:
        lead += f" pass@{most}: {percent(first.passes[most].value)}."
    return f"{label}: {percent(rate.value)} accuracy on {first.task}", lead


def comparison_headline(comparison: Comparison) -> tuple[str, str]:
    """Headline and lead of two evaluations compared."""
    difference = comparison.headline
    change = difference.change
    if difference.is_clear:
        word = "better" if change.value > 0 else "worse"
        size = points(abs(change.value)).removeprefix("+")
        headline = f"{comparison.after} is {word} than {comparison.before} by {size} points"
    else:
        headline = f"No clear difference between {comparison.before} and {comparison.after}"
    over = (
        f"averaged over {len(comparison.tasks)} tasks"
        if comparison.macro
        else f"on {comparison.parts[0].task}"
    )
    interval = f"95 % interval {points(change.low)} to {points(change.high)}"
    lead = (
        f"Accuracy {percent(difference.before)} and {percent(difference.after)} "
        f"{over}: {points(change.value)} points, {interval}, p {_equals(difference)}, "
        f"{several(change.num_prompts, 'prompt')}."
    )
    return headline, lead


def notes(evaluation: Evaluation, summary: Summary) -> Iterator[str]:
    """Caveats for a reader of the numbers: missing, failed or truncated answers."""
    begun = {part.task for part in summary.tasks}
    for task in evaluation.asked:
        if task not in begun:
            yield f"{evaluation.label}, {task}: no answers yet; the task is not counted."
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
            count = several(sum(part.failures.values()), "answer")
            yield f"{name}: scoring failed for {count}, counted as wrong ({kinds})."
        if part.truncated >= _MANY_TRUNCATED:
            yield f"{name}: {percent(part.truncated)} of the answers reached the token limit."
        answered = part.reward_parts.get("answered", 1.0)
        if answered < _FEW_ANSWERED:
            yield (
                f"{name}: only {percent(answered)} of the responses give an answer in the "
                "requested format; the others count as wrong."
            )


def different_settings(before: Evaluation, after: Evaluation) -> Iterator[str]:
    """Settings in which two evaluations differ, besides the model."""
    for name in dict.fromkeys([*before.settings, *after.settings]):
        old, new = before.settings.get(name), after.settings.get(name)
        if old != new and name != WEIGHTS:
            yield f"{name} differs: {old!r} for {before.label}, {new!r} for {after.label}."


def _amount(part: Estimates) -> str:
    """The numbers of prompts and answers of a task."""
    if part.num_short:
        return f"{several(part.num_answers, 'answer')} to {several(part.num_prompts, 'prompt')}"
    each = several(part.samples, "answer")
    return f"{several(part.num_prompts, 'prompt')} with {each} each"


def _best_known(summary: Summary) -> Estimate:
    """The rate to put in a headline."""
    return summary.macro[1] if summary.macro else summary.tasks[0].mean


def _equals(difference: Difference) -> str:
    text = chance(difference.p_value)
    return text if text.startswith("<") else f"= {text}"


def packed(
    evaluations: Sequence[Evaluation], comparison: Comparison | None
) -> tuple[dict[str, object], int]:
    """The data of the page's script: prompts, answers and flips; and the number of answers."""
    prompts = _prompts(evaluations)
    shown = [] if comparison is None else list(comparison.flips[:MAX_FLIPS])
    pairs = [_telling(flip, prompts[flip.task, flip.prompt_id]) for flip in shown]
    chosen = _chosen(prompts, first=[place for pair in pairs for place in pair])
    used = {(answer.task, answer.prompt_id) for _, answer in chosen}
    keys = {key: number for number, key in enumerate(key for key in prompts if key in used)}
    limit = characters_each([len(answer.response) for _, answer in chosen])
    numbers = {(which, answer.key): number for number, (which, answer) in enumerate(chosen)}
    flips = [
        {
            "prompt": keys[flip.task, flip.prompt_id],
            "before": flip.before,
            "after": flip.after,
            "answers": [numbers[which, answer.key] for which, answer in pair],
        }
        for flip, pair in zip(shown, pairs, strict=True)
    ]
    tasks: dict[str, list[str]] = {}
    for task, prompt_id in keys:
        level = _first(prompts[task, prompt_id]).level
        tasks.setdefault(task, []).extend([] if level is None else [level])
    data: dict[str, object] = {
        "labels": [evaluation.label for evaluation in evaluations],
        "tasks": {task: in_order(levels) for task, levels in tasks.items()},
        "prompts": [_prompt_row(_first(prompts[key]), limit) for key in keys],
        "answers": [_row(which, answer, keys, limit) for which, answer in chosen],
        "flips": flips,
    }
    return data, len(chosen)


def _prompts(evaluations: Sequence[Evaluation]) -> dict[PromptKey, list[list[Answer]]]:
    """For each prompt, in order, the answers of every evaluation."""
    found: dict[PromptKey, list[list[Answer]]] = {}
    grouped = [by_prompt(evaluation) for evaluation in evaluations]
    for task in dict.fromkeys(name for tasks in grouped for name in tasks):
        sides = [tasks.get(task, {}) for tasks in grouped]
        for prompt_id in sorted({number for side in sides for number in side}):
            found[task, prompt_id] = [side.get(prompt_id, []) for side in sides]
    return found


def _telling(flip: Flip, sides: Sequence[Sequence[Answer]]) -> tuple[Place, Place]:
    """One answer before and one after that show the flip."""

    def pick(which: int, *, is_correct: bool) -> Place:
        answers = sides[which]
        fits = (answer for answer in answers if answer.is_correct == is_correct)
        return which, next(fits, answers[0])

    return pick(0, is_correct=not flip.is_gain), pick(1, is_correct=flip.is_gain)


def _chosen(
    prompts: Mapping[PromptKey, Sequence[Sequence[Answer]]], *, first: Sequence[Place]
) -> list[Place]:
    """At most `MAX_SAMPLES` answers, in the order of prompts, evaluations and samples."""
    taken = {(which, answer.key): (which, answer) for which, answer in first}
    for places in _rounds(list(prompts.values())):
        fresh = [pair for pair in places if any((w, a.key) not in taken for w, a in pair)]
        room = MAX_SAMPLES - len(taken)
        width = max((len(pair) for pair in fresh), default=1)
        for pair in evenly(fresh, room // width):
            taken |= {(which, answer.key): (which, answer) for which, answer in pair}
        if len(fresh) * width > room:
            break
    order = {key: place for place, key in enumerate(prompts)}
    return sorted(
        taken.values(), key=lambda p: (order[p[1].task, p[1].prompt_id], p[1].sample_index, p[0])
    )


def _rounds(prompts: Sequence[Sequence[Sequence[Answer]]]) -> Iterator[list[list[Place]]]:
    """The first answers of each evaluation to each prompt, then the second ones, and so on."""
    most = max((len(answers) for sides in prompts for answers in sides), default=0)
    for number in range(most):
        yield [
            [(which, one[number]) for which, one in enumerate(sides) if number < len(one)]
            for sides in prompts
        ]


def _first(sides: Sequence[Sequence[Answer]]) -> Answer:
    return next(answer for answers in sides for answer in answers)


def _prompt_row(answer: Answer, limit: int) -> dict[str, object]:
    return {
        "task": answer.task,
        "id": answer.prompt_id,
        "level": answer.level,
        "question": shortened(answer.question, limit),
        "gold": None if answer.gold is None else shortened(answer.gold, limit),
    }


def _row(
    which: int, answer: Answer, keys: Mapping[PromptKey, int], limit: int
) -> dict[str, object]:
    return {
        "model": which,
        "prompt": keys[answer.task, answer.prompt_id],
        "sample": answer.sample_index,
        "right": answer.is_correct,
        "tokens": answer.num_tokens,
        "truncated": answer.finish_reason == "length",
        "failure": answer.failure,
        "reward": answer.reward,
        "parts": dict(answer.parts),
        "response": shortened(answer.response, limit),
    }
