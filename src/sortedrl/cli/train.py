"""`sortedrl train`: trains a model with rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import tyro

from sortedrl.cli.arguments import (
    flag_help,
    parse,
    parse_over_train_settings,
    source_and_flags,
)
from sortedrl.config.checks import require
from sortedrl.config.parsing import flat, read_toml, settings_over, under_new_keys
from sortedrl.config.sizes import (
    Chosen,
    settings_of_file,
    size_line,
    sized,
)
from sortedrl.config.train import TrainSettings
from sortedrl.data.rows import Row
from sortedrl.errors import ConfigError, DataError
from sortedrl.models.shape import refuse_wrong_path
from sortedrl.report.terminal import table, tell
from sortedrl.runs.folder import RunFolder, settings_at
from sortedrl.runs.start import train
from sortedrl.runs.tasks import training_tasks

if TYPE_CHECKING:
    from sortedrl.runs.training import Ending

HELP = """Train a model with rewards; rollouts are scheduled by length.

  sortedrl train config.toml                        a file with the settings below, by section
  sortedrl train config.toml --mode coupled --learning-rate 2e-6
  sortedrl train --model Qwen/Qwen2.5-0.5B --task gsm8k --out runs/gsm8k
  sortedrl train --model MODEL --task rows.jsonl --reward my_file.py:score --algorithm grpo
  sortedrl train config.toml --dry-run              plan: memory, time, sizes
  sortedrl train config.toml --smoke                test the layout: tiny model, CPU
  sortedrl train runs/gsm8k --resume                resume a run that was stopped or killed

A run can be stopped at any time: Ctrl-C and SIGTERM finish the round and save first, and a killed
run resumes from its last checkpoint. The trained model is saved in the run folder, in model/.
Sizes that are not set (group-prompts, update-batch, slots) follow the number of rows; the first
lines of a run and of a dry run show them.
"""

ALIASES = {
    "--algorithm": "--algorithm.name",
    "--samples": "--schedule.samples-per-prompt",
    "--engine": "--rollout.engine",
    "--eval-tasks": "--evaluation.tasks",
}
"""Short names of flags, also accepted by `sortedrl.train`."""

COMMON = (
    *("--model", "--task", "--reward", "--out", "--epochs", "--max-updates", "--seed"),
    *("--algorithm", "--mode", "--lookahead", "--samples", "--slots", "--max-tokens"),
    *("--learning-rate", "--engine", "--lora.rank", "--eval-tasks"),
    *("--resume", "--dry-run", "--smoke"),
)
"""The most common flags, in the order in which --help shows them."""
_WIDTH, _INDENT = 98, 6 * " "


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """How to run the settings."""

    resume: bool = False
    """Resume from the newest complete checkpoint in the run folder."""
    dry_run: bool = False
    """Load nothing; print the plan, its memory and the expected time."""
    smoke: bool = False
    """Test the layout: the same workers, ranks, algorithm and schedule with a tiny model on CPU
    processes, for two updates. The first lines list what is replaced."""
    card: str | None = None
    """Dry run only: the hardware to plan for (h100, h200, a100, rtx-4090, cpu); by default this
    machine."""
    memory_gib: float | None = None
    """Dry run only, with --card: the memory of one card; by default as in its data sheet."""
    mean_length: float | None = None
    """Dry run only: expected mean answer length; by default a guess."""
    rows: int | None = None
    """Dry run only: the number of training rows, such as 17000, without reading them. By default
    the rows of the task, which must be accessible."""
    prompt_tokens: int | None = None
    """Dry run only: prompt length; by default counted, if the tokenizer is on this machine."""
    turns: float | None = None
    """Dry run only, with an environment: median turns of a conversation; by default a guess."""
    tool_seconds: float | None = None
    """Dry run only, with an environment: median seconds of a reply."""
    given_tokens: float | None = None
    """Dry run only, with an environment: median tokens of a reply."""
    conversations: Path | None = None
    """Dry run only, with an environment: observed conversations as JSON lines, instead of medians;
    same format as conversations.log of the simulator."""
    json: bool = False
    """Print one JSON object at the end instead of a table."""
    settings: Annotated[TrainSettings, tyro.conf.arg(name="")] = field(
        default_factory=TrainSettings
    )


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    if not arguments or (len(arguments) == 1 and arguments[0] in ("-h", "--help")):
        print(_short_help())
        return
    given, chosen = _given(arguments)
    settings = given.settings
    if given.dry_run:
        _dry_run(given, chosen)
        return
    if given.smoke:
        settings = _smoked(given)
    ending = train(settings, is_resumed=given.resume, chosen=None if given.smoke else chosen)
    _print(ending, settings, as_json=given.json)
    if ending.reason == "asked":
        raise SystemExit(130)


def _smoked(given: Arguments) -> TrainSettings:
    """The settings of a smoke run; its sizes are fixed, not derived from the data."""
    from sortedrl.runs.start import smoke_run

    require(
        not given.resume,
        "--smoke starts a new run, got it with --resume; leave one of them out",
    )
    smoke = smoke_run(given.settings)
    for line in smoke.lines:
        tell(f"smoke run: {line}")
    return smoke.settings


def _short_help() -> str:
    """Help for the most common flags, from the strings under their fields."""
    lines = [f"usage: sortedrl train [TOML|RUN] [OPTIONS]\n\n{HELP}"]
    for flag in COMMON:
        text = flag_help(Arguments, ALIASES.get(flag, flag))
        lines += [
            f"  {flag}",
            *wrap(text, _WIDTH, initial_indent="      ", subsequent_indent="      "),
        ]
    lines.append("\nEvery setting, by section: sortedrl train --help-all")
    return "\n".join(lines)


def _dry_run(given: Arguments, chosen: Chosen) -> None:
    from sortedrl.runs.plan.dry_run import Expected, planned_run
    from sortedrl.runs.plan.page import lines, refuse_too_big, to_json

    expected = Expected(
        rows=given.rows,
        prompt_tokens=given.prompt_tokens,
        mean_length=given.mean_length,
        memory_gib=given.memory_gib,
        turns=given.turns,
        tool_seconds=given.tool_seconds,
        given_tokens=given.given_tokens,
        conversations=given.conversations,
    )
    refuse_wrong_path(given.settings.model)
    rows = _rows(given.settings) if given.rows is None else []
    num_rows = len(rows) if given.rows is None else given.rows
    settings = sized(given.settings, num_rows=num_rows, chosen=chosen)
    line = size_line(settings, num_rows=num_rows, chosen=chosen)
    if line is not None:
        tell(line)
    plan = planned_run(
        settings,
        rows,
        card_name=given.card,
        expected=expected,
        tell=tell,
    )
    print(json.dumps(to_json(plan), indent=2) if given.json else "\n".join(lines(plan)))
    refuse_too_big(plan.memory, plan.device_bytes, settings=given.settings)


def _rows(settings: TrainSettings) -> Sequence[Row]:
    try:
        task, _ = training_tasks(settings)
    except DataError as error:
        raise ConfigError(
            f"{error}; to plan without the data, give the number of rows (--rows 17000) and the "
            "prompt length (--prompt-tokens 200)"
        ) from error
    return task.rows


def _given(arguments: Sequence[str]) -> tuple[Arguments, Chosen]:
    """Parse flags over the file or run given as the argument; also gives the chosen settings."""
    prog = "sortedrl train [TOML|RUN]"
    if "--help-all" in arguments or "-h" in arguments or "--help" in arguments:
        parse(
            Arguments,
            ["--help"],
            prog=prog,
            description=HELP,
            default=Arguments(),
            is_dotted=True,
        )
    source, flags = source_and_flags(Arguments, arguments, is_dotted=True, aliases=ALIASES)
    default, chosen = Arguments(), frozenset[str]()
    if source is not None:
        settings, chosen = _settings_from(Path(source))
        default = Arguments(settings=settings)
    return parse_over_train_settings(
        Arguments, flags, default=default, chosen=chosen, prog=prog, aliases=ALIASES
    )


def _settings_from(source: Path) -> tuple[TrainSettings, Chosen]:
    """The settings of a file or a run, and the names of those that it sets."""
    folder = RunFolder(source)
    path = folder.config if folder.holds_run else source
    if path.suffix != ".toml":
        raise ConfigError(
            f"the first argument must be a .toml file or the folder of a run, got {str(source)!r}"
            + ("" if source.exists() else ", which does not exist")
            + "; see sortedrl train --help"
        )
    if not folder.holds_run:
        return settings_of_file(path)
    table = under_new_keys(read_toml(path))
    settings = settings_over(TrainSettings(), table, path=path)
    return settings_at(settings, source), frozenset(flat(table))


def _print(ending: Ending, settings: TrainSettings, *, as_json: bool) -> None:
    from sortedrl.runs.output import as_row, closing_lines, closing_table

    if as_json:
        print(json.dumps(as_row(ending, settings.out), indent=2))
        return
    table(("", ""), closing_table(ending))
    print("\n".join(closing_lines(ending, settings.out)))
