"""Results of evaluations and comparisons as rows, for tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping

from sortedrl.evaluation.comparison import Comparison, Contrast, Difference
from sortedrl.evaluation.statistics import Estimate, Estimates, Summary

MACRO = "macro average"
"""The name of the row in which every task has equal weight."""

Table = tuple[list[str], list[list[str]]]
"""Headings, and rows of text."""


def summary_rows(summary: Summary) -> list[dict[str, object]]:
    """One flat row for each task, level and the macro average, for scripts and `summary.json`.

    The macro average has the task name `MACRO`; missing values are `None`.
    """
    rows = [_row(part) for part in summary.parts]
    if summary.macro:
        rows.append(dict.fromkeys(rows[0]) | {"task": MACRO} | _pass_columns(summary.macro))
    return rows


def summary_table(summary: Summary) -> Table:
    """Headings and rows of text, for a table on the terminal."""
    samples = {part.samples for part in summary.tasks}
    sizes = sorted({k for part in summary.tasks for k in part.passes if k > 1})
    mean = f"mean@{samples.pop()}" if len(samples) == 1 else "mean"
    columns = ["task", "level", "prompts", mean, "95 % interval"]
    columns += [*(f"pass@{k}" for k in sizes), "reward", "tokens", "truncated"]

    def rates(passes: Mapping[int, Estimate]) -> list[str]:
        rate = passes[1]
        shown = [percent(passes[k].value) if k in passes else "" for k in sizes]
        return [percent(rate.value), f"{100 * rate.low:.1f} to {100 * rate.high:.1f}", *shown]

    lines = [
        [
            *_names(part),
            *rates(part.passes),
            "" if part.reward is None else f"{part.reward:.3f}",
            f"{part.tokens:,.0f}",
            percent(part.truncated),
        ]
        for part in summary.parts
    ]
    if summary.macro:
        lines.append([MACRO, "", "", *rates(summary.macro), "", "", ""])
    return columns, lines


def comparison_rows(comparison: Comparison) -> list[dict[str, object]]:
    """One flat row for each task, level and the macro average, for scripts."""
    rows: list[dict[str, object]] = [
        {
            "task": part.task,
            "level": part.level,
            "prompts": part.num_prompts,
            "better": part.num_better,
            "worse": part.num_worse,
            "equal": part.num_equal,
            **_change_columns(part.passes),
        }
        for part in comparison.parts
    ]
    if comparison.macro:
        rows.append(dict.fromkeys(rows[0]) | {"task": MACRO} | _change_columns(comparison.macro))
    return rows


def comparison_table(comparison: Comparison) -> Table:
    """Headings and rows of text, for a table on the terminal."""
    columns = ["task", "level", "prompts", comparison.before, comparison.after, "change"]
    columns += ["95 % interval", "p", "better", "worse"]
    lines = [
        [
            *_names(part),
            *_change_cells(part.mean),
            f"{part.num_better:,}",
            f"{part.num_worse:,}",
        ]
        for part in comparison.parts
    ]
    if comparison.macro:
        lines.append([MACRO, "", "", *_change_cells(comparison.macro[1]), "", ""])
    return columns, lines


def pass_table(comparison: Comparison) -> Table:
    """The changes of pass@k for k above 1 as text; without rows if there are none."""
    sizes = sorted({k for part in comparison.tasks for k in part.passes if k > 1})
    parts = [(_names(part)[:2], part.passes) for part in comparison.parts]
    if comparison.macro:
        parts.append(([MACRO, ""], comparison.macro))
    lines = [
        [*names, *(_pass_change(passes[k]) if k in passes else "" for k in sizes)]
        for names, passes in parts
    ]
    return ["task", "level", *(f"pass@{k}" for k in sizes)], lines if sizes else []


def _names(part: Estimates | Contrast) -> list[str]:
    """The first cells of a row: task, level and number of prompts."""
    level = "" if part.level is None else level_name(part.level)
    return [part.task, level, f"{part.num_prompts:,}"]


def level_name(level: str) -> str:
    """A level's name for display.

    >>> level_name("3"), level_name("3 people")
    ('level 3', '3 people')
    """
    return f"level {level}" if level.replace(".", "", 1).isdigit() else level


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def points(change: float) -> str:
    """A difference of shares in percentage points, with its sign.

    >>> points(0.0312), points(-0.00001)
    ('+3.1', '0.0')
    """
    text = f"{100 * change:+.1f}".replace("-", "\N{MINUS SIGN}")
    return "0.0" if text[1:] == "0.0" else text


def several(count: int, noun: str) -> str:
    """A number of things.

    >>> several(1, "prompt"), several(1200, "prompt")
    ('1 prompt', '1,200 prompts')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def chance(p: float) -> str:
    """A p-value with a sensible number of digits.

    >>> chance(0.00002), chance(0.0312), chance(0.57)
    ('< 0.001', '0.031', '0.57')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _row(part: Estimates) -> dict[str, object]:
    return {
        "task": part.task,
        "level": part.level,
        "samples": part.samples,
        "prompts": part.num_prompts,
        "short": part.num_short,
        "missing": part.num_missing,
        "answers": part.num_answers,
        **_pass_columns(part.passes),
        "reward": part.reward,
        "tokens": part.tokens,
        "truncated": part.truncated,
        "failures": dict(part.failures),
        "reward_parts": dict(part.reward_parts),
    }


def _pass_columns(passes: Mapping[int, Estimate]) -> dict[str, object]:
    mean = passes[1]
    columns: dict[str, object] = {"mean": mean.value, "mean_low": mean.low, "mean_high": mean.high}
    for k, rate in passes.items():
        if k > 1:
            columns |= {
                f"pass@{k}": rate.value,
                f"pass@{k}_low": rate.low,
                f"pass@{k}_high": rate.high,
                f"pass@{k}_prompts": rate.num_prompts,
            }
    return columns


def _change_cells(mean: Difference) -> tuple[str, str, str, str, str]:
    return (
        percent(mean.before),
        percent(mean.after),
        points(mean.change.value),
        f"{points(mean.change.low)} to {points(mean.change.high)}",
        chance(mean.p_value),
    )


def _pass_change(difference: Difference) -> str:
    change = difference.change
    return f"{points(change.value)} ({points(change.low)} to {points(change.high)})"


def _change_columns(passes: Mapping[int, Difference]) -> dict[str, object]:
    columns: dict[str, object] = {}
    for k, difference in passes.items():
        name = "mean" if k == 1 else f"pass@{k}"
        columns |= {
            f"{name}_before": difference.before,
            f"{name}_after": difference.after,
            f"{name}_change": difference.change.value,
            f"{name}_low": difference.change.low,
            f"{name}_high": difference.change.high,
            f"{name}_p": difference.p_value,
        }
    return columns
