"""What is fuzzed: every name of the package that the fuzzers use, imported in this one place."""

# ruff: noqa: F401

from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from sortedrl.cli import COMMANDS, main
from sortedrl.cli.arguments import parse
from sortedrl.config.data import DataSettings
from sortedrl.config.parsing import read_toml, settings_over, settings_to_toml
from sortedrl.config.train import SupervisedSettings, TrainSettings
from sortedrl.data.catalogue import open_task, reward_from
from sortedrl.data.gym import GymSettings, _entries, _rows
from sortedrl.data.stream import tokenized
from sortedrl.errors import SortedRLError
from sortedrl.models.tiny import tiny_tokenizer
from sortedrl.rewards.functions import load
from sortedrl.rewards.pool.score import NoScoreError, checked_score
from sortedrl.simulate.compare import row, simulate
from sortedrl.simulate.lengths import read_lengths
from sortedrl.simulate.settings import PRESETS, Simulation, simulation_from, simulation_to_toml
from sortedrl.types import Prompt

sortedrl_source = Path(import_module("sortedrl").__file__).parent


def command_arguments(name):
    """The dataclass of a command's arguments."""
    return import_module(f"sortedrl.cli.{name}").Arguments


def fields_of(kind, *path):
    """Every field of a dataclass and of its sections: the path of names, and the type."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from fields_of(hint, *path, name)
        else:
            yield (*path, name), hint


def gym_rows_here(settings):
    """Rows of reasoning-gym without a child process, which takes seconds to start."""
    return _rows(_entries(settings), settings)


def gym_names():
    """All tasks of reasoning-gym."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})
