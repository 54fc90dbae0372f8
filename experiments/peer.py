"""Table 6: GRPO with `sortedrl train`, and the same training with TRL.

Both start from the same model, with the same prompts in the same order, the same reward, number of
answers per update and optimiser settings. The TOML has the format of experiments/learning.py, plus
[trl.NAME] with arguments of TRL's `GRPOConfig` per arm. Held-out puzzles are evaluated by the same
evaluator with the same noise, and evaluation time is not counted; TRL's weights are saved and
evaluated afterwards.

The loss is the same: clipped ratios, the mean over the tokens of each answer, then over answers,
without KL; an update is one optimiser step, so no ratio of fresh answers is clipped. Differences
that neither side can avoid are listed in `experiments.peer_section.DIFFERENCES`.

TRL runs in its own process, with the interpreter `SORTEDRL_TRL_PYTHON`, by default this one. It
needs: pip install trl (tested: 1.16.0, with transformers 5.17). The process watches the pipe of its
jobs and exits as soon as its parent has closed it or died. An interrupted training leaves its
metrics in metrics.jsonl in its folder, and a line per update in trl.log.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import learning
from experiments.peer_job import AskedRow, Job, write_rows
from experiments.peer_numbers import curve_numbers, speeds
from experiments.peer_scores import with_scores
from experiments.peer_section import section
from experiments.trials import ROOT, Setup, Trial
from sortedrl.config.checks import require
from sortedrl.core.files import read_metrics

if TYPE_CHECKING:
    from sortedrl.config.train import TrainSettings

__all__ = [
    "TrlArm",
    "TrlProcess",
    "asked_rows",
    "trials",
    "section",
    "trl_arms",
    "trl_job",
    "trl_numbers",
]

_ALGORITHM = "grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlArm:
    """One training with TRL."""

    name: str
    seed: int

    @property
    def trial(self) -> str:
        """The name of its trial."""
        return f"trl-{self.name}-{self.seed}"


def trials(setup: Setup) -> list[Trial]:
    """For each seed the warm start, our own runs, then those of TRL."""
    python = os.environ.get("SORTEDRL_TRL_PYTHON", sys.executable)
    process = TrlProcess(setup.scratch / "trl.log", python=python)
    made = []
    for trial in learning.trials(setup):
        is_run = trial.name.startswith(f"{_ALGORITHM}-")
        made.append(replace(trial, run=partial(_own_numbers, setup, trial)) if is_run else trial)
    for arm in trl_arms(setup.settings):
        run = partial(trl_numbers, setup, arm, process=process)
        made.append(Trial(name=arm.trial, seconds=setup.settings["seconds"][arm.name], run=run))
    # An interrupted table then has all arms of its first seeds.
    return sorted(made, key=lambda trial: int(trial.name.rpartition("-")[2]))


def trl_arms(settings: Mapping[str, Any]) -> list[TrlArm]:
    """The trainings with TRL, in order."""
    return [TrlArm(name=name, seed=seed) for seed in settings["seeds"] for name in settings["trl"]]


def trl_numbers(setup: Setup, arm: TrlArm, *, process: TrlProcess) -> dict[str, Any]:
    """The numbers of a training with TRL; an interrupted one is restarted."""
    from sortedrl.runs.tasks import training_tasks

    settings = _settings(setup, arm)
    task, _ = training_tasks(settings)
    rows = asked_rows(settings)
    job = trl_job(
        settings,
        rows=rows,
        device=setup.device,
        reward=task.reward.function,
        reward_options=task.reward.options,
        options=setup.settings["trl"][arm.name],
    )
    write_rows(rows, Path(job.rows))
    versions = process.train(job)
    load = os.getloadavg()[0]
    if job.options.get("use_vllm", False):
        process.close()  # vLLM releases all its memory only when its process exits
    with_scores(job, settings)
    return {
        "kind": "run",
        "algorithm": _ALGORITHM,
        "arm": f"trl-{arm.name}",
        "schedule": "trl",
        "seed": arm.seed,
        "runs_at_once": 1,
        "versions": versions,
        "load": load,
        **curve_numbers(settings.out, targets=setup.settings["targets"]),
        **speeds(read_metrics(job.metrics), first=setup.settings["first_updates"]),
    }


def trl_job(
    settings: TrainSettings,
    *,
    rows: Sequence[AskedRow],
    device: str,
    reward: str,
    reward_options: Mapping[str, object],
    options: Mapping[str, Any],
) -> Job:
    """The TRL job that is equivalent to `sortedrl train` with these settings."""
    schedule, optimiser = settings.schedule, settings.optimiser
    answers = len(rows) * schedule.samples_per_prompt
    require(
        optimiser.schedule == "constant" and optimiser.warmup_steps == 0,
        "the peer table needs a constant learning rate; leave out optimiser.schedule and "
        f"optimiser.warmup_steps, got {optimiser.schedule!r} and {optimiser.warmup_steps}",
    )
    require(
        answers % schedule.update_batch == 0,
        f"the {answers} answers must be a multiple of update_batch {schedule.update_batch}, as TRL "
        "drops the remainder; change the task's count",
    )
    is_bf16 = settings.precision == "bfloat16" or (settings.precision == "auto" and device != "cpu")
    return Job(
        model=str(Path(settings.model).resolve()),
        rows=str((settings.out / "rows.jsonl").resolve()),
        out=str(settings.out.resolve()),
        seed=settings.seed,
        device=device,
        threads=settings.threads,
        is_bf16=is_bf16,
        samples_per_prompt=schedule.samples_per_prompt,
        update_batch=schedule.update_batch,
        updates=answers // schedule.update_batch,
        max_tokens=settings.engine.max_tokens,
        temperature=settings.rollout.temperature,
        clip=settings.algorithm.effective_clip,
        learning_rate=optimiser.learning_rate,
        beta1=optimiser.beta1,
        beta2=optimiser.beta2,
        epsilon=optimiser.epsilon,
        weight_decay=optimiser.weight_decay,
        max_norm=optimiser.max_grad_norm or 0.0,
        evaluate_every=settings.evaluation.every,
        reward=reward,
        reward_options=dict(reward_options),
        options=dict(options),
    )


def asked_rows(settings: TrainSettings) -> list[AskedRow]:
    """The prompts of a run of ours, in order."""
    from sortedrl.data.stream import PromptStream, tokenized
    from sortedrl.runs.tasks import tokenizer_of, training_tasks

    task, _ = training_tasks(settings)
    tokenizer = tokenizer_of(settings.model)
    rows = tokenized(task.rows, tokenizer, chat=settings.data.chat).rows
    stream = PromptStream(rows, epochs=settings.epochs, seed=settings.seed)
    return [
        AskedRow(tokenizer.decode(list(prompt.tokens)), list(prompt.tokens), prompt.fields)
        for prompt in stream.take(stream.total)
    ]


def _own_numbers(setup: Setup, trial: Trial) -> dict[str, Any]:
    """The numbers of a run of ours, with speeds computed as for TRL."""
    rows_of = setup.scratch / trial.name / "metrics.jsonl"
    numbers = dict(trial.run())
    load = os.getloadavg()[0]
    found = speeds(read_metrics(rows_of), first=setup.settings["first_updates"])
    return {**numbers, **found, "load": load}


def _settings(setup: Setup, arm: TrlArm) -> TrainSettings:
    """The settings of our synchronous run, with TRL's folder."""
    name = next(iter(setup.settings["arms"]))
    own = learning.Arm(algorithm=_ALGORITHM, name=name, seed=arm.seed)
    model = learning.warmed(setup, arm.seed)
    return replace(learning.train_settings(setup, own, model=model), out=setup.scratch / arm.trial)


class TrlProcess:
    """A process that runs TRL jobs one after another; started by the first."""

    def __init__(self, log: Path, *, python: str) -> None:
        """TRL's output goes to `log`, a line per update."""
        self._log = log
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def train(self, job: Job) -> dict[str, str]:
        """Run a job; returns the library versions, and raises if TRL fails."""
        answer = self._answer(job)
        if not answer:
            self.close()
            raise RuntimeError(
                f"TRL failed in {self._python}: see "
                f"{self._log}; set SORTEDRL_TRL_PYTHON to another interpreter"
            )
        versions: dict[str, str] = json.loads(answer)
        return versions

    def close(self) -> None:
        """Wait for the process to exit; the next job starts another."""
        if self._process is None:
            return
        self._process.communicate()
        self._process = None

    def _answer(self, job: Job) -> str:
        """The reply of the process to a job; empty if it died."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{job.to_json()}\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
            with self._log.open("ab") as log:
                now = datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S")
                log.write(f"{now} {self._python} starts\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [self._python, "-m", "experiments.peer_trl"],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return self._process
