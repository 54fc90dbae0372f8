"""Table 6: GRPO with `sortedrl train`, and the same training with TRL.

Both begin with the same model and have the same prompts in the same order, the same reward, the
same number of answers per update and the same optimiser settings; the TOML has the format of
experiments/learning.py, and in [trl.NAME] the arguments of TRL's `GRPOConfig` that differ from arm
to arm. The held-out puzzles are asked by the same evaluator, with the same noise, while the clock
of the training stands still; of TRL's training the weights are kept and asked afterwards.

The loss is the same: clipped ratios, the mean over the tokens of each answer, then over the
answers, no divergence term; an update is one optimiser step, so of fresh answers no ratio is
clipped. What differs, as neither side can be told otherwise, is listed in
`experiments.peer_section.DIFFERENCES`.

TRL runs in a process of its own. `SORTEDRL_TRL_PYTHON` names its interpreter; by default it is
this one. It needs: pip install trl (tried: 1.16.0, with transformers 5.17). A training that was
cut leaves the numbers of its updates in metrics.jsonl in its folder, and a line for each in
trl.log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import learning
from experiments.peer_job import AskedRow, Job, write_rows
from experiments.peer_numbers import curve_numbers, speeds
from experiments.peer_process import TrlProcess
from experiments.peer_scores import with_scores
from experiments.peer_section import section
from experiments.pieces import Piece, Setup
from sortedrl.config.checks import require
from sortedrl.core.files import read_metrics

if TYPE_CHECKING:
    from sortedrl.config.train import TrainSettings

__all__ = ["TrlArm", "asked_rows", "pieces", "section", "trl_arms", "trl_job", "trl_numbers"]

_ALGORITHM = "grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlArm:
    """One training with TRL."""

    name: str
    seed: int

    @property
    def piece(self) -> str:
        """The name of its piece."""
        return f"trl-{self.name}-{self.seed}"


def pieces(setup: Setup) -> list[Piece]:
    """For each seed its warm start, our own runs, then those of TRL."""
    python = os.environ.get("SORTEDRL_TRL_PYTHON", sys.executable)
    process = TrlProcess(setup.scratch / "trl.log", python=python)
    made = []
    for piece in learning.pieces(setup):
        is_run = piece.name.startswith(f"{_ALGORITHM}-")
        made.append(replace(piece, run=partial(_own_numbers, setup, piece)) if is_run else piece)
    for arm in trl_arms(setup.settings):
        run = partial(trl_numbers, setup, arm, process=process)
        made.append(Piece(name=arm.piece, seconds=setup.settings["seconds"][arm.name], run=run))
    # A table that is cut has all arms of its first seeds.
    return sorted(made, key=lambda piece: int(piece.name.rpartition("-")[2]))


def trl_arms(settings: Mapping[str, Any]) -> list[TrlArm]:
    """The trainings with TRL, in the order in which they are made."""
    return [TrlArm(name=name, seed=seed) for seed in settings["seeds"] for name in settings["trl"]]


def trl_numbers(setup: Setup, arm: TrlArm, *, process: TrlProcess) -> dict[str, Any]:
    """A training with TRL in numbers; one that was cut begins anew."""
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
        process.close()  # vLLM does not give back all its memory while its process lives
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
    """What TRL is asked to do so that it does the same as `sortedrl train`."""
    schedule, optimiser = settings.schedule, settings.optimiser
    answers = len(rows) * schedule.samples_per_prompt
    require(
        optimiser.schedule == "constant" and optimiser.warmup_steps == 0,
        "the peer table compares a constant learning rate; leave optimiser.schedule and "
        f"optimiser.warmup_steps out, got {optimiser.schedule!r} and {optimiser.warmup_steps}",
    )
    require(
        answers % schedule.update_batch == 0,
        f"the {answers} answers must fill update batches of {schedule.update_batch}, as TRL "
        "leaves out the rest; change the task's count",
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
    """The prompts of a run of ours, in the order in which it asks them."""
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


def _own_numbers(setup: Setup, piece: Piece) -> dict[str, Any]:
    """A run of ours in numbers, with its speeds counted as those of TRL."""
    rows_of = setup.scratch / piece.name / "metrics.jsonl"
    numbers = dict(piece.run())
    load = os.getloadavg()[0]
    found = speeds(read_metrics(rows_of), first=setup.settings["first_updates"])
    return {**numbers, **found, "load": load}


def _settings(setup: Setup, arm: TrlArm) -> TrainSettings:
    """The settings of our own synchronous run, in TRL's folder."""
    name = next(iter(setup.settings["arms"]))
    own = learning.Arm(algorithm=_ALGORITHM, name=name, seed=arm.seed)
    model = learning.warmed(setup, arm.seed)
    return replace(learning.train_settings(setup, own, model=model), out=setup.scratch / arm.piece)
