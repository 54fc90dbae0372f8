"""`python -m experiments TABLE`: measure a table, or write the page of all of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.record import Results
from experiments.trials import (
    ROOT,
    Deadline,
    Setup,
    Trial,
    assigned,
    merged,
    run_at_once,
    run_in_turn,
    this_command,
)
from sortedrl.cli.arguments import parse
from sortedrl.config.checks import require
from sortedrl.config.parsing import read_toml
from sortedrl.errors import ConfigError, SortedRLError, unknown_name
from sortedrl.report.terminal import tell
from sortedrl.runs.folder import commit

TABLES = {
    "efficiency": "Every schedule on a real engine: bubble, goodput, ledger, length bias.",
    "long_run": "Forty groups, the whole run counted: sync, partial, coupled.",
    "prediction": "The simulator, fitted to one run of the efficiency table, against the others.",
    "natural": "Length bias where the model itself decides when an answer ends.",
    "ablations": "One setting changed at a time: group, batch, lookahead, tolerance, harvest unit.",
    "learning_logic": "Score against samples, tokens and seconds: Knights and Knaves.",
    "learning_seeds": "Order and freshness separated: six schedules, 16 seeds, three rates.",
    "learning_rates": "Small update batches on a CPU: 16 seeds, three learning rates.",
    "learning_maths": "The same for arithmetic, with PPO and with GRPO.",
    "learning_questions": "SmolLM2-135M on small questions, with lengths of its own.",
    "learning_puzzles": "The paper's logic run in small: SmolLM2-135M, puzzles in words.",
    "peer": "The same training with TRL.",
    "grpo_trl": "TRL's trainer on vLLM against SortedGRPOTrainer, one script.",
    "eight_billion": "LLaMA-3.1-8B's shape on one card, all weights trained: memory and speed.",
    "paper": "The paper's own two set-ups, predicted.",
}

HELP = """Measure a table of docs/results.md, one trial at a time.

Every finished trial has a result file; --resume skips those and runs the rest.
On a laptop, use --small --device cpu: it takes minutes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure, and for how long."""

    device: str = "cuda"
    """cuda or cpu."""
    small: bool = False
    """Use the smaller sizes in the section [small] of the table's TOML."""
    resume: bool = False
    """Skip trials that already have results."""
    only: tuple[str, ...] = ()
    """Run only trials whose names contain one of these words; by default all."""
    budget: float | None = None
    """Time limit in seconds: a trial that is not expected to finish in time is not started."""
    results: Path = Path("runs/experiments/results")
    """Folder of the results."""
    scratch: Path = Path("runs/experiments/work")
    """Folder for logs and models."""
    settings: Path | None = None
    """A TOML file to use instead of the table's own."""
    set: tuple[str, ...] = ()
    """Override values of the TOML, such as workload.seed=1."""
    list: bool = False
    """List the trials and their expected times without running them."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    names = (*TABLES, "page")
    if not arguments or arguments[0] in ("-h", "--help"):
        tell(f"usage: python -m experiments {{{','.join(names)}}} [--help]")
        return 0 if arguments else 2
    table, rest = arguments[0], arguments[1:]
    try:
        require(table in names, unknown_name("table", table, names))
        if table == "page":
            from experiments.page import main as write_page

            code: int = write_page(rest)
            return code
        description = f"{TABLES[table]}\n\n{HELP}"
        given = parse(
            Arguments, rest, prog=f"python -m experiments {table}", description=description
        )
        return _measure(table, given)
    except SortedRLError as error:
        tell(f"error: {error}")
        return 1


def _measure(table: str, given: Arguments) -> int:
    setup = Setup(
        table=table,
        device=given.device,
        is_small=given.small,
        settings=_settings(table, given),
        results=Results(given.results),
        scratch=given.scratch / table,
        changes=given.set,
        commit=commit(ROOT) or "unknown",
    )
    module = "learning" if table.startswith("learning_") else table
    trials = chosen(importlib.import_module(f"experiments.{module}").trials(setup), given.only)
    done = [trial.name for trial in trials if setup.results.has(table, trial.name)]
    if given.list:
        for trial in trials:
            first = f", {trial.opening_seconds:,.0f} s more for the first"
            note = f"about {trial.seconds:,.0f} s{first if trial.opening_seconds else ''}"
            tell(f"{trial.name:<40} {'done' if trial.name in done else note}")
        return 0
    require(
        given.resume or not done,
        f"{setup.results.folder / table} already has results of {len(done)} trials; continue with "
        "--resume, or give another folder (--results)",
    )
    waiting = [trial for trial in trials if trial.name not in done]
    left = _run(waiting, setup, given)
    if left:
        tell(f"no time for {len(left)} trials ({', '.join(left)}); continue with --resume")
    return 3 if left else 0


def _run(trials: Sequence[Trial], setup: Setup, given: Arguments) -> list[str]:
    deadline = Deadline.after(given.budget)
    most = setup.settings.get("at_once", 1)
    if most <= 1 or len(trials) == 1:
        return run_in_turn(trials, setup, deadline=deadline, tell=tell)
    words = ["--device", given.device, "--resume", "--results", str(given.results)]
    words += ["--scratch", str(given.scratch), *(["--small"] if given.small else [])]
    words += [] if given.settings is None else ["--settings", str(given.settings)]
    words += ["--set", *given.set] if given.set else []
    return run_at_once(
        trials,
        setup,
        most=most,
        command=lambda name: this_command(setup.table, *words, "--only", name),
        deadline=deadline,
        tell=tell,
    )


def _settings(table: str, given: Arguments) -> Mapping[str, Any]:
    path = ROOT / "experiments" / f"{table}.toml" if given.settings is None else given.settings
    settings = read_toml(path)
    small = settings.pop("small", None)
    if given.small and small is None:
        raise ConfigError(f"{path} has no section [small]; leave --small out")
    whole = merged(settings, small or {}) if given.small else settings
    for assignment in given.set:
        whole = merged(whole, assigned(assignment))
    return whole


def chosen(trials: Sequence[Trial], words: Sequence[str]) -> list[Trial]:
    """The trials with these names; any other word selects all names that contain it."""
    names = {trial.name for trial in trials}
    exact, parts = {w for w in words if w in names}, [w for w in words if w not in names]
    found = [p for p in trials if not words or p.name in exact or any(w in p.name for w in parts)]
    require(bool(found), f"no trial name contains {' or '.join(words)}; see --list")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
