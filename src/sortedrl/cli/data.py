"""`sortedrl data`: generates, shows and measures training data."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.config.checks import require
from sortedrl.config.data import DataSettings
from sortedrl.core.files import refuse_foreign
from sortedrl.data.catalogue import TASKS, Task, described, reward_from
from sortedrl.data.rows import Row
from sortedrl.data.stream import Tokenizer, rendered
from sortedrl.evaluation.statistics import evenly, in_order
from sortedrl.report.terminal import line_width, one_line, refuse_unwritable, write_text
from sortedrl.runs.tasks import opened, tokenizer_of

HELP = """Generate tasks, show their rows, measure them.

  sortedrl data list                                           the built-in tasks
  sortedrl data show knights_knaves:people=3-4                 some rows, formatted for reading
  sortedrl data show mine.jsonl --count 5                      the same for your own rows
  sortedrl data stats gsm8k:split=test --tokenizer MODEL       levels, and lengths in tokens
  sortedrl data generate knights_knaves:count=5000 --out kk.jsonl

A task is a name with options (name:option=value,option=value), a file or a hub name. Training uses
the split train and evaluation the split test, where a task has splits and names none (split=test);
this command uses train.
A file has one row per line: a prompt (text or chat messages), and the fields that the reward needs.
"""

Verb = Literal["list", "show", "stats", "generate"]
_BARS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to do, and with which tasks."""

    verb: tyro.conf.Positional[Verb]
    """list, show, stats or generate."""
    tasks: tyro.conf.Positional[tuple[str, ...]] = ()
    """The tasks."""
    count: int = 3
    """show: how many rows, spread over all levels and from first to last."""
    out: Path | None = None
    """generate: the JSONL file to write."""
    folder: Path | None = None
    """Folder with data set files; by default $SORTEDRL_DATA, and then the hub."""
    tokenizer: str | None = None
    """A model: show its formatted prompts, and measure lengths in tokens instead of characters."""
    max_prompt_tokens: int | None = None
    """stats: count the prompts longer than this (with --tokenizer in tokens)."""
    json: bool = False
    """list, show, stats: print JSON."""
    data: DataSettings = field(default_factory=DataSettings)


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl data", description=HELP)
    if given.verb == "list":
        _list(given)
        return
    if given.verb == "generate":
        require(given.out is not None, "give the file to write: --out rows.jsonl")
        assert given.out is not None
        refuse_foreign(given.out, mark=None)
    require(bool(given.tasks), f"give at least one task; sortedrl data {given.verb} TASK")
    if given.out is not None:
        refuse_unwritable(given.out)
    tasks = [_task(spec, given) for spec in given.tasks]
    tokenizer = None if given.tokenizer is None else tokenizer_of(given.tokenizer)
    if given.verb == "generate":
        _generate(tasks, given)
    elif given.verb == "show":
        _show(tasks, tokenizer, given)
    else:
        _stats(tasks, tokenizer, given)


def _task(spec: str, given: Arguments) -> Task:
    # Only the rows are needed, so rows of the user's own need no reward.
    is_own = spec.partition(":")[0] not in TASKS
    reward = reward_from("logic") if is_own else None
    return opened(spec, split=None, folder=given.folder, reward=reward, data=given.data)


def _list(given: Arguments) -> None:
    tasks = dict(described())
    if given.json:
        print(json.dumps(tasks, indent=2))
        return
    for name, words in tasks.items():
        print(f"{name:<16}{words}")


def _generate(tasks: Sequence[Task], given: Arguments) -> None:
    assert given.out is not None
    rows = [row for task in tasks for row in task.rows]
    lines = [json.dumps(_plain(row), ensure_ascii=False) for row in rows]
    write_text(given.out, "\n".join(lines) + "\n")
    print(f"{len(lines):,} rows", file=sys.stderr)
    if any("prompt" in row.fields for row in rows):
        print(
            f"note: the prompts of {given.data.prompt_field!r} are written to the column prompt; "
            "the original column prompt is dropped",
            file=sys.stderr,
        )


def _plain(row: Row) -> dict[str, object]:
    """The row to write; the prompt is always in the column `prompt`."""
    prompt = row.prompt if isinstance(row.prompt, str) else list(row.prompt)
    return {"prompt": prompt, **{k: v for k, v in row.fields.items() if k != "prompt"}}


def _show(tasks: Sequence[Task], tokenizer: Tokenizer | None, given: Arguments) -> None:
    require(given.count >= 1, f"count must be at least 1, got {given.count}")
    chosen = [(task, row) for task in tasks for row in _spread(task.rows, given.count)]
    if given.json:
        # A column of the row with this name is kept.
        shown = [{**_plain(row), "task": row.fields.get("task", task.name)} for task, row in chosen]
        print(json.dumps(shown, indent=2))
        return
    for task, row in chosen:
        print(one_line(f"── {task.name}, {row.place} ").ljust(line_width(), "─"))
        if tokenizer is None:
            _say_messages(row)
        else:
            prompt = rendered(row, tokenizer, chat=given.data.chat)
            _say(f"formatted prompt, {len(prompt.tokens)} tokens", prompt.text)
        for name, value in row.fields.items():
            _say(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        print()


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """That many rows, spread over all levels and from first to last."""
    levels: dict[str, list[Row]] = {}
    for row in rows:
        levels.setdefault(str(row.fields.get("level")), []).append(row)
    chosen = evenly([levels[name] for name in in_order(levels)], count)
    each = -(-count // len(chosen))
    turns = [evenly(level, each) for level in chosen]
    return [turn[n] for n in range(each) for turn in turns if n < len(turn)][:count]


def _say_messages(row: Row) -> None:
    if isinstance(row.prompt, str):
        _say("prompt", row.prompt)
        return
    for message in row.prompt:
        _say(message["role"], message["content"])


def _say(name: str, text: str) -> None:
    name = one_line(name)
    wrapped = [
        one_line(part)
        for line in text.splitlines() or [""]
        for part in textwrap.wrap(line, line_width() - 4, break_on_hyphens=False) or [""]
    ]
    if len(wrapped) == 1 and len(name) + len(wrapped[0]) + 4 < line_width():
        print(f"{name}: {wrapped[0]}")
        return
    print(f"{name}:")
    for line in wrapped:
        print(f"    {line}".rstrip())


def _stats(tasks: Sequence[Task], tokenizer: Tokenizer | None, given: Arguments) -> None:
    measured = {task.name: _measured(task, tokenizer, given) for task in tasks}
    if given.json:
        print(json.dumps(measured, indent=2))
        return
    unit = "characters" if tokenizer is None else "tokens"
    for task in tasks:
        _print_stats(task, measured[task.name], unit=unit)


def _measured(task: Task, tokenizer: Tokenizer | None, given: Arguments) -> dict[str, object]:
    require(
        given.max_prompt_tokens is None or given.max_prompt_tokens >= 1,
        f"max_prompt_tokens must be at least 1, got {given.max_prompt_tokens}; leave it out for "
        "no limit",
    )
    prompts = [_prompt_length(row, tokenizer, given.data) for row in task.rows]
    longest = given.max_prompt_tokens
    responses = [
        _length(str(row.fields["response"]), tokenizer)
        for row in task.rows
        if "response" in row.fields
    ]
    levels = Counter(str(row.fields["level"]) for row in task.rows if "level" in row.fields)
    return {
        "rows": len(task.rows),
        "too_long": None if longest is None else sum(length > longest for length in prompts),
        "levels": {level: levels[level] for level in in_order(levels)},
        "prompt_lengths": prompts,
        "response_lengths": responses,
    }


def _prompt_length(row: Row, tokenizer: Tokenizer | None, settings: DataSettings) -> int:
    if tokenizer is not None:
        return len(rendered(row, tokenizer, chat=settings.chat).tokens)
    if isinstance(row.prompt, str):
        return len(row.prompt)
    return sum(len(message["content"]) for message in row.prompt)


def _length(text: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        return len(text)
    return len(tokenizer.encode(text, add_special_tokens=False))


def _print_stats(task: Task, measured: Mapping[str, object], *, unit: str) -> None:
    print(f"{one_line(task.name)}: {len(task.rows):,} rows")
    if measured["too_long"] is not None:
        print(f"{measured['too_long']:,} prompts are too long")
    levels = measured["levels"]
    if isinstance(levels, dict) and levels:
        print("\nlevel")
        _bars([(one_line(level), count) for level, count in levels.items()])
    for name in ("prompt", "response"):
        lengths = measured[f"{name}_lengths"]
        if isinstance(lengths, list) and lengths:
            print(
                f"\n{name} length in {unit}: shortest {min(lengths):,}, "
                f"median {median(lengths):,.0f}, mean {fmean(lengths):,.0f}, "
                f"longest {max(lengths):,}"
            )
            _bars(_bins(lengths))
    print()


def _bins(lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Equal intervals from the shortest to the longest, and the count of each."""
    low, high = min(lengths), max(lengths)
    step = max(1, -(-(high - low + 1) // _BARS))
    counts = Counter((length - low) // step for length in lengths)
    return [
        (f"{low + number * step:,} to {low + (number + 1) * step - 1:,}", counts[number])
        for number in range((high - low) // step + 1)
    ]


def _bars(counts: Sequence[tuple[str, int]]) -> None:
    most = max(count for _, count in counts)
    label_width = max(len(label) for label, _ in counts)
    room = max(10, line_width() - label_width - 14)
    for label, count in counts:
        bar = "█" * round(room * count / most) or ("▏" if count else "")
        print(f"  {label:>{label_width}}  {count:>7,}  {bar}".rstrip())
