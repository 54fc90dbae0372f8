"""`sortedrl sft`: a supervised warm start on written answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from sortedrl.arguments import all_to_toml, parse, read_toml, settings_over
from sortedrl.commands.opening import opened
from sortedrl.errors import ConfigError
from sortedrl.rewards.source import RewardSource
from sortedrl.runs.lines import duration
from sortedrl.runs.stopping import Stopping
from sortedrl.terminal import progress
from sortedrl.training.supervision import SupervisedSettings

HELP = """Train a model to imitate written answers, as a warm start for sortedrl train.

  sortedrl sft sft.toml                             a file with the settings below, by section
  sortedrl sft --model Qwen/Qwen2.5-0.5B --task traces.jsonl --out runs/warm
  sortedrl sft --model tiny --task knights_knaves:people=3,count=4096,style=compact --epochs 4
  sortedrl train config.toml --model runs/warm/model

Rows are those of sortedrl train, with one field more: response, the answer to imitate.
The model is left in the run's folder, in model/; Ctrl-C stops early and keeps what was learnt.
"""
_NO_REWARD = RewardSource("sortedrl.rewards.maths:math_reward")
"""Rows of the user's own need some reward to be opened; none is called here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to do with the settings."""

    json: bool = False
    """Print one JSON object at the end."""
    settings: Annotated[SupervisedSettings, tyro.conf.arg(name="")] = field(
        default_factory=SupervisedSettings
    )


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    has_source = bool(arguments) and not arguments[0].startswith("-")
    default = Arguments()
    if has_source:
        default = Arguments(settings=_settings_from(Path(arguments[0])))
    given = parse(
        Arguments,
        arguments[1:] if has_source else arguments,
        prog="sortedrl sft [TOML]",
        description=HELP,
        default=default,
        is_dotted=True,
    )
    settings = given.settings
    task = opened(settings.task, folder=settings.folder, reward=_NO_REWARD, data=settings.data)
    from sortedrl.runs.supervised import supervised_run

    with Stopping(_tell) as stopping, progress(1.0) as advance:
        ending = supervised_run(
            settings,
            task,
            config=all_to_toml(settings, SupervisedSettings()),
            stopping=stopping,
            advance=advance,
            tell=_tell,
        )
    if given.json:
        print(json.dumps({"folder": str(settings.out), **asdict(ending)}, indent=2))
    else:
        print(
            f"{ending.steps} steps in {duration(ending.seconds)}, loss {ending.loss:.4f}; "
            f"the model is in {settings.out / 'model'}"
        )
    if not ending.is_complete:
        raise SystemExit(130)


def _settings_from(source: Path) -> SupervisedSettings:
    if source.suffix != ".toml":
        raise ConfigError(
            f"the first word must be a .toml file, got {str(source)!r}; see sortedrl sft --help"
        )
    return settings_over(SupervisedSettings(), read_toml(source), path=source, is_dotted=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
