"""`sortedrl train`: the main job. A model, prompts and a reward become a better model."""

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
from sortedrl.config.parsing import read_toml, settings_over, under_new_keys
from sortedrl.config.sizes import (
    Chosen,
    names_in,
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

HELP = """Train a model with rewards, its rollouts scheduled by length.

  sortedrl train config.toml                        a file with the settings below, by section
  sortedrl train config.toml --mode coupled --learning-rate 2e-6
  sortedrl train --model Qwen/Qwen2.5-0.5B --task gsm8k --out runs/gsm8k
  sortedrl train --model MODEL --task rows.jsonl --reward my_file.py:score --algorithm grpo
  sortedrl train config.toml --dry-run              what it will need and how long it will take
  sortedrl train config.toml --smoke                its layout with a tiny model on CPU processes
  sortedrl train runs/gsm8k --resume                resume a run that was stopped or killed

A run can be stopped at any time: Ctrl-C and SIGTERM finish the round and save first, and a killed
run resumes from its last checkpoint. The trained model is left in the run's folder, in model/.
Sizes that you do not set (group-prompts, update-batch, slots) follow the number of rows; the first
lines of a run and of a dry run show them.
"""

ALIASES = {
    "--algorithm": "--algorithm.name",
    "--samples": "--schedule.samples-per-prompt",
    "--engine": "--rollout.engine",
    "--eval-tasks": "--evaluation.tasks",
}
"""Short names of flags, those that `sortedrl.train` has too."""

COMMON = (
    *("--model", "--task", "--reward", "--out", "--epochs", "--max-updates", "--seed"),
    *("--algorithm", "--mode", "--lookahead", "--samples", "--slots", "--max-tokens"),
    *("--learning-rate", "--engine", "--lora.rank", "--eval-tasks"),
    *("--resume", "--dry-run", "--smoke"),
)
"""The flags that most runs need, in the order in which --help shows them."""
_WIDTH, _INDENT = 98, 6 * " "


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to do with the settings."""

    resume: bool = False
    """Resume from the newest complete checkpoint in the run's folder."""
    dry_run: bool = False
    """Load nothing: print the plan, the memory it takes and how long it will run."""
    smoke: bool = False
    """Try the layout first: the same workers, ranks, algorithm and schedule with a tiny model on
    CPU processes, two updates. The first lines list what is replaced."""
    card: str | None = None
    """Dry run only: the hardware to plan for (h100, h200, a100, rtx-4090, cpu); by default that
    of this machine."""
    memory_gib: float | None = None
    """Dry run only, with --card: the memory of one card; by default that of its data sheet."""
    mean_length: float | None = None
    """Dry run only: the mean length of answers that you expect; by default a guess."""
    rows: int | None = None
    """Dry run only: how many rows there are to train on, such as 17000; nothing is then read. By
    default the rows of the task, which must be accessible."""
    prompt_tokens: int | None = None
    """Dry run only: how long the prompts are; by default counted, if the
    tokenizer is on this machine."""
    turns: float | None = None
    """Dry run only, with an environment: turns of a conversation (median); by default a guess."""
    tool_seconds: float | None = None
    """Dry run only, with an environment: seconds that a reply takes (median)."""
    given_tokens: float | None = None
    """Dry run only, with an environment: tokens of a reply (median)."""
    conversations: Path | None = None
    """Dry run only, with an environment: observed conversations as JSON lines, in place of these;
    as conversations.log of the simulator."""
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
    """The settings of a smoke run; no size of it follows the data."""
    from sortedrl.runs.start import smoke_run

    require(
        not given.resume,
        "--smoke is a new run of its own, got it with --resume; leave one of them out",
    )
    smoke = smoke_run(given.settings)
    for line in smoke.lines:
        tell(f"smoke run: {line}")
    return smoke.settings


def _short_help() -> str:
    """The flags that most runs need; what each means is the text beside its field."""
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
            f"{error}; a dry run can go without the data: give the number of rows to train on "
            "(--rows 17000) and about how long prompts are (--prompt-tokens 200)"
        ) from error
    return task.rows


def _given(arguments: Sequence[str]) -> tuple[Arguments, Chosen]:
    """The flags, over the file or the run that the positional word names; and what was chosen."""
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
    """The settings of a file or a run, and which of them it names."""
    folder = RunFolder(source)
    path = folder.config if folder.holds_run else source
    if path.suffix != ".toml":
        raise ConfigError(
            f"the first word must be a .toml file or the folder of a run, got {str(source)!r}"
            + ("" if source.exists() else ", which does not exist")
            + "; see sortedrl train --help"
        )
    if not folder.holds_run:
        return settings_of_file(path)
    table = under_new_keys(read_toml(path))
    settings = settings_over(TrainSettings(), table, path=path)
    return settings_at(settings, source), frozenset(names_in(table))


def _print(ending: Ending, settings: TrainSettings, *, as_json: bool) -> None:
    from sortedrl.runs.output import as_row, rows, words

    if as_json:
        print(json.dumps(as_row(ending, settings.out), indent=2))
        return
    table(("", ""), rows(ending))
    print("\n".join(words(ending, settings.out)))
