"""Table 6b: one TRL script, with TRL's `GRPOTrainer` on vLLM and with `SortedGRPOTrainer`.

Each trial is one run of benchmarks/trl_grpo.py in its own process.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from experiments.markdown import caption, percent, table
from experiments.record import Record
from experiments.trials import ROOT, Setup, Trial

HEAD = (
    "model",
    "trainer and engine",
    "samples/s",
    "x TRL with vLLM",
    "timed steps",
    "tokens of an answer",
    "slots idle, %",
)
_ARMS = {
    "trl": "TRL, transformers",
    "trl-continuous": "TRL, continuous batching",
    "trl-vllm": "TRL, vLLM colocated",
    "sync": "SortedGRPOTrainer, sync",
    "partial": "SortedGRPOTrainer, partial +1",
    "coupled": "SortedGRPOTrainer, coupled +1",
}
_AGAINST = "trl-vllm"
_PRESETS = {
    "smollm2-135m": "SmolLM2-135M shape",
    "qwen2.5-1.5b": "Qwen2.5-1.5B shape",
    "cpu": "tiny",
}
_LIBRARIES = ("trl", "vllm", "transformers", "torch")


def trials(setup: Setup) -> list[Trial]:
    """One trial for each run of the settings."""
    return [
        Trial(
            name=f"{run['preset']}-{run['arm']}".replace(".", "_"),
            seconds=run["seconds"],
            run=partial(_run, setup, run),
        )
        for run in setup.settings["runs"]
    ]


def _run(setup: Setup, run: Mapping[str, Any]) -> dict[str, Any]:
    setup.scratch.mkdir(parents=True, exist_ok=True)
    log = setup.scratch / f"{run['preset']}-{run['arm']}.log"
    command = [sys.executable, str(ROOT / "benchmarks" / "trl_grpo.py")]
    command += ["--preset", run["preset"], "--arm", run["arm"], "--steps", str(run["steps"])]
    with log.open("wb") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{run['arm']} failed, see {log}")
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    versions = {}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"preset": run["preset"], "steps": run["steps"], "versions": versions, **numbers}


def rows(records: Sequence[Record]) -> list[list[str]]:
    """The table's lines, model by model; TRL first."""
    found = []
    for preset, name in _PRESETS.items():
        own = {r.numbers["arm"]: r.numbers for r in records if r.numbers["preset"] == preset}
        base = own.get(_AGAINST)
        for arm in (arm for arm in _ARMS if arm in own):
            numbers = own[arm]
            speed = numbers["samples_per_second"]
            ratio = f"{speed / base['samples_per_second']:.2f}" if base else ""
            found.append(
                [
                    name,
                    _ARMS[arm],
                    f"{speed:.1f}",
                    ratio,
                    str(numbers["steps"] - 1),
                    f"{numbers['mean_length']:.0f}",
                    "" if numbers["bubble"] is None else percent(numbers["bubble"]),
                ]
            )
    return found


def section(records: Sequence[Record]) -> str:
    """One line for each run."""
    versions = records[0].numbers["versions"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{caption(records)}\nVersions: {used}.\n\n{table(HEAD, rows(records))}"
