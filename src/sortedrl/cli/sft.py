"""`sortedrl sft`: supervised fine-tuning on given answers, as a warm start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from sortedrl.cli.arguments import parse, source_and_flags
from sortedrl.config.parsing import read_toml, settings_over
from sortedrl.config.train import SupervisedSettings
from sortedrl.errors import ConfigError
from sortedrl.evaluation.tables import several
from sortedrl.runs.output import duration
from sortedrl.runs.start import warm_start

HELP = """Fine-tune a model on given answers, as a warm start for sortedrl train.

  sortedrl sft sft.toml                             a file with the settings below, by section
  sortedrl sft --model Qwen/Qwen2.5-0.5B --task traces.jsonl --out runs/warm
  sortedrl sft --model tiny --task knights_knaves:people=3,count=4096,style=compact --epochs 4
  sortedrl train config.toml --model runs/warm/model

Rows are those of sortedrl train with one more field: response, the answer to imitate.
The model is saved in the run folder, in model/. Ctrl-C stops early and saves the model.
"""


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
    source, flags = source_and_flags(Arguments, arguments, is_dotted=True)
    default = Arguments()
    if source is not None:
        default = Arguments(settings=_settings_from(Path(source)))
    given = parse(
        Arguments,
        flags,
        prog="sortedrl sft [TOML]",
        description=HELP,
        default=default,
        is_dotted=True,
    )
    settings = given.settings
    ending = warm_start(settings)
    if given.json:
        print(json.dumps({"folder": str(settings.out), **asdict(ending)}, indent=2))
    else:
        print(
            f"{several(ending.steps, 'step')} in {duration(ending.seconds)}, "
            f"loss {ending.loss:.4f}; the model is in {settings.out / 'model'}"
        )
    if not ending.is_complete:
        raise SystemExit(130)


def _settings_from(source: Path) -> SupervisedSettings:
    if source.suffix != ".toml":
        raise ConfigError(
            f"the first argument must be a .toml file, got {str(source)!r}; see sortedrl sft --help"
        )
    return settings_over(SupervisedSettings(), read_toml(source), path=source)
