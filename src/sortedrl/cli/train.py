"""`sortedrl train`: the main job. A model, prompts and a reward become a better model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sortedrl.cli.arguments import parse, source_and_flags
from sortedrl.config.toml import read_toml, settings_over
from sortedrl.config.train import TrainSettings
from sortedrl.data.rows import Row
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.terminal import table, tell
from sortedrl.runs.folder import RunFolder
from sortedrl.runs.start import train
from sortedrl.runs.tasks import training_tasks

if TYPE_CHECKING:
    from sortedrl.runs.training import Ending

HELP = """Train a model with rewards, its rollouts scheduled by length.

  sortedrl train config.toml                        a file with the settings below, by section
  sortedrl train config.toml --schedule.mode coupled --optimiser.learning-rate 2e-6
  sortedrl train --model Qwen/Qwen2.5-0.5B --task gsm8k --out runs/gsm8k
  sortedrl train config.toml --dry-run              what it will need and how long it will take
  sortedrl train runs/gsm8k --resume                go on with a run that was stopped or killed

A run can be stopped at any time: Ctrl-C and SIGTERM finish the round and save first, and a killed
run goes on from its last checkpoint. The trained model is left in the run's folder, in model/.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to do with the settings."""

    resume: bool = False
    """Go on from the newest complete checkpoint of the run's folder."""
    dry_run: bool = False
    """Load nothing: print the plan, the memory it takes and how long it will run."""
    card: str | None = None
    """Dry run only: the hardware to plan for (h100, h200, a100, rtx-4090, cpu); by default the
    one that is here."""
    mean_length: float | None = None
    """Dry run only: the mean length of answers that you expect; by default a guess."""
    rows: int | None = None
    """Dry run only: how many rows there are to train on, such as 17000; nothing is then read. By
    default the rows of the task, which must be within reach."""
    prompt_tokens: int | None = None
    """Dry run only: how long the prompts are; by default counted, where the tokenizer is here."""
    json: bool = False
    """Print one JSON object at the end instead of a table."""
    settings: Annotated[TrainSettings, tyro.conf.arg(name="")] = field(
        default_factory=TrainSettings
    )


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = _given(arguments)
    settings = given.settings
    if given.dry_run:
        _dry_run(given)
        return
    ending = train(settings, is_resumed=given.resume)
    _print(ending, settings, as_json=given.json)
    if ending.reason == "asked":
        raise SystemExit(130)


def _dry_run(given: Arguments) -> None:
    from sortedrl.runs.plan.advice import refuse_too_big
    from sortedrl.runs.plan.dry_run import Expected, planned_run
    from sortedrl.runs.plan.page import lines, to_json

    expected = Expected(
        rows=given.rows, prompt_tokens=given.prompt_tokens, mean_length=given.mean_length
    )
    plan = planned_run(
        given.settings,
        _rows(given.settings) if given.rows is None else [],
        card_name=given.card,
        expected=expected,
        tell=tell,
    )
    print(json.dumps(to_json(plan), indent=2) if given.json else "\n".join(lines(plan)))
    refuse_too_big(plan.memory, plan.device_bytes)


def _rows(settings: TrainSettings) -> Sequence[Row]:
    try:
        task, _ = training_tasks(settings)
    except DataError as error:
        raise ConfigError(
            f"{error}; a dry run can go without the data: give the number of rows to train on "
            "(--rows 17000) and about how long prompts are (--prompt-tokens 200)"
        ) from error
    return task.rows


def _given(arguments: Sequence[str]) -> Arguments:
    """The flags, over the file or the run that the positional word names."""
    source, flags = source_and_flags(Arguments, arguments, is_dotted=True)
    default = Arguments()
    if source is not None:
        default = Arguments(settings=_settings_from(Path(source)))
    return parse(
        Arguments,
        flags,
        prog="sortedrl train [TOML|RUN]",
        description=HELP,
        default=default,
        is_dotted=True,
    )


def _settings_from(source: Path) -> TrainSettings:
    folder = RunFolder(source)
    if folder.holds_run:
        settings = settings_over(
            TrainSettings(), read_toml(folder.config), path=folder.config, takes_old_keys=True
        )
        return replace(settings, out=source)
    if source.suffix != ".toml":
        raise ConfigError(
            f"the first word must be a .toml file or the folder of a run, got {str(source)!r}; "
            "see sortedrl train --help"
        )
    return settings_over(TrainSettings(), read_toml(source), path=source)


def _print(ending: Ending, settings: TrainSettings, *, as_json: bool) -> None:
    from sortedrl.runs.output import as_row, rows, words

    if as_json:
        print(json.dumps(as_row(ending, settings.out), indent=2))
        return
    table(("", ""), rows(ending))
    print("\n".join(words(ending, settings.out)))
