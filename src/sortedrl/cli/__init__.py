"""The command line: one module per command, each with `run(arguments)`; errors are one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from sortedrl.errors import SortedRLError, unknown_name

COMMANDS = (
    *("simulate", "compare", "tune", "fit", "presets", "data", "eval", "train", "sft", "demo"),
    *("report", "watch", "trace", "plot", "serve", "engines", "cluster"),
)

HELP = """\
SortedRL trains language models with rewards, fast: it schedules rollouts by length.

Train a model:

  sortedrl demo                             a tiny model on a CPU, in minutes
  sortedrl sft sft.toml                     a warm start on written answers
  sortedrl train config.toml                train; --dry-run plans, --resume resumes

See the run:

  sortedrl report runs/logic                one page: slots, learning, answers
  sortedrl watch runs/logic                 the same page, live
  sortedrl trace runs/logic                 a trace for Perfetto
  sortedrl plot learning runs/* --out c.svg  for docs and papers

Simulate: the real scheduler on a simulated engine, in seconds, without a GPU:

  sortedrl compare paper                    all strategies on the paper's workload
  sortedrl compare paper --plot c.svg       the same, as a picture
  sortedrl simulate paper --lookahead 2     one strategy, round by round
  sortedrl tune paper                       the best settings for a workload
  sortedrl fit events.jsonl                 the costs of your machine, from a run
  sortedrl presets                          the named workloads and hardware

Data and evaluation:

  sortedrl data show knights_knaves         the rows of a task
  sortedrl eval MODEL --tasks gsm8k         models on tasks, with intervals

Engines, agents and clusters:

  sortedrl engines                          installed engines, with self-tests
  sortedrl serve MODEL                      for agents: token ids in and out
  sortedrl cluster check                    Ray: placement, versions, memory

Help for a command: sortedrl COMMAND --help
"""

_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "numpy", "tokenizers"), "native"),
    **dict.fromkeys(("httpx", "packaging"), "servers"),
    **dict.fromkeys(("datasets", "pyarrow"), "data"),
    **dict.fromkeys(("gguf", "accelerate"), "gguf"),
    **{"peft": "lora", "math_verify": "maths", "reasoning_gym": "gym", "ray": "cluster"},
}
"""The extra that installs each optional package."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 2 invalid input, 130 Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        # Escape what the terminal's encoding lacks instead of failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] in ("-V", "--version"):
        print(f"sortedrl {import_module('sortedrl').__version__}")
        return 0
    name, *rest = words
    if name.startswith("-") and any(word in COMMANDS for word in rest):
        return _refuse(f"the command must come before its options, got {name} first")
    if name not in COMMANDS:
        return _refuse(unknown_name("command", name, COMMANDS) + "; see sortedrl --help")
    return _run(name, rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        import_module(f"sortedrl.cli.{name}").run(arguments)
    except SortedRLError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        return _refuse(
            f"sortedrl {name} needs {package}, not installed; "
            f"pip install 'sortedrl[{_EXTRAS[package]}]'"
        )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:
            raise
        return _refuse(f"{error.filename}: {error.strerror}; check the path and its permissions")
    return 0


def _refuse(message: str) -> int:
    print(f"sortedrl: {message}", file=sys.stderr)
    return 2
