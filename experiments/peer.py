"""Table 6: GRPO with `sortedrl train`, and the same training with TRL.

Both begin with the same model and have the same prompts in the same order, the same reward, the
same number of answers per update and the same optimiser settings; the TOML has the format of
experiments/learning.py, and in [trl.NAME] the arguments of TRL's `GRPOConfig` that differ from arm
to arm. The held-out puzzles are asked by the same evaluator, with the same noise, while the clock
of the training stands still; of TRL's training the weights are kept and asked afterwards.

The loss is the same: clipped ratios, the mean over the tokens of each answer, then over the
answers, no divergence term; an update is one optimiser step, so of fresh answers no ratio is
clipped. What differs, as neither side can be told otherwise:

- TRL pads answers to the longest of a batch, we pack them.
- TRL writes with fp32 weights under autocast on a GPU, we with a bf16 copy; both learn in fp32.
  With continuous batching TRL casts the weights it trains to bf16 as well.
- Advantages are divided by the standard deviation of a prompt's rewards plus 1e-4 (TRL) or plus
  1e-6 (ours).
- TRL scores in its own process between generation and update, we in a worker process meanwhile.
- `sorted` forms its update batches from the answers that are complete first, so their order is
  another, and partial mode corrects tokens of older weights by truncated importance sampling.
  TRL with vLLM leaves out answers whose probability differs too much between vLLM and the trainer.

TRL runs in a process of its own. `SORTEDRL_TRL_PYTHON` names its interpreter; by default it is
this one. It needs: pip install trl (tried: 1.16.0, with transformers 5.17).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import learning
from experiments.curves import ALONG, curve, mean_score, reached
from experiments.pieces import ROOT, Piece, Trial
from experiments.record import Record
from sortedrl.config import require
from sortedrl.errors import DataError
from sortedrl.run_log import MetricsFile, Value, read_metrics

if TYPE_CHECKING:
    from experiments.peer_trl import AskedRow, Job
    from sortedrl.runs.evaluating import Scores
    from sortedrl.training.settings import TrainSettings

_ALGORITHM = "grpo"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlArm:
    """One training with TRL."""

    name: str
    seed: int

    @property
    def piece(self) -> str:
        """The name of its piece."""
        return f"trl-{self.name}-{self.seed}"


class TrlProcess:
    """A process that trains one job after the other with TRL; it starts with the first."""

    def __init__(self, log: Path, *, python: str) -> None:
        """Nothing is started yet; what TRL says goes to `log`."""
        self._log = log
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def train(self, job: Job) -> dict[str, str]:
        """Do a job, and say with which versions of which libraries; raises if TRL fails."""
        answer = self._answer(job)
        if not answer:
            self.close()
            raise RuntimeError(
                f"TRL must be importable by {self._python} and do its job, but it failed: see "
                f"{self._log}; SORTEDRL_TRL_PYTHON names another interpreter"
            )
        versions: dict[str, str] = json.loads(answer)
        return versions

    def close(self) -> None:
        """Let the process end; the next job starts another."""
        if self._process is None:
            return
        self._process.communicate()
        self._process = None

    def _answer(self, job: Job) -> str:
        """What the process says when the job is done; nothing if it ended before."""
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


def pieces(trial: Trial) -> list[Piece]:
    """For each seed its warm start, our own runs, then those of TRL."""
    python = os.environ.get("SORTEDRL_TRL_PYTHON", sys.executable)
    process = TrlProcess(trial.scratch / "trl.log", python=python)
    made = []
    for piece in learning.pieces(trial):
        is_run = piece.name.startswith(f"{_ALGORITHM}-")
        made.append(replace(piece, run=partial(_own_numbers, trial, piece)) if is_run else piece)
    for arm in trl_arms(trial.settings):
        run = partial(trl_numbers, trial, arm, process=process)
        made.append(Piece(name=arm.piece, seconds=trial.settings["seconds"][arm.name], run=run))
    # A table that is cut has all arms of its first seeds.
    return sorted(made, key=lambda piece: int(piece.name.rpartition("-")[2]))


def trl_arms(settings: Mapping[str, Any]) -> list[TrlArm]:
    """The trainings with TRL, in the order in which they are made."""
    return [TrlArm(name=name, seed=seed) for seed in settings["seeds"] for name in settings["trl"]]


def trl_numbers(trial: Trial, arm: TrlArm, *, process: TrlProcess) -> dict[str, Any]:
    """A training with TRL in numbers; one that was cut begins anew."""
    from experiments.peer_trl import write_rows
    from sortedrl.runs.tasks import training_tasks

    settings = _settings(trial, arm)
    task, _ = training_tasks(settings)
    rows = asked_rows(settings)
    job = trl_job(
        settings,
        rows=rows,
        device=trial.device,
        reward=task.reward.function,
        reward_options=task.reward.options,
        options=trial.settings["trl"][arm.name],
    )
    write_rows(rows, Path(job.rows))
    versions = process.train(job)
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
        **curve_numbers(settings.out, targets=trial.settings["targets"]),
        **speeds(read_metrics(job.metrics), first=trial.settings["first_updates"]),
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
    from experiments.peer_trl import Job

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
        clip=settings.algorithm.clip,
        learning_rate=optimiser.learning_rate,
        beta1=optimiser.beta1,
        beta2=optimiser.beta2,
        epsilon=optimiser.epsilon,
        weight_decay=optimiser.weight_decay,
        max_norm=optimiser.max_norm or 0.0,
        evaluate_every=settings.evaluation.every,
        reward=reward,
        reward_options=dict(reward_options),
        options=dict(options),
    )


def asked_rows(settings: TrainSettings) -> list[AskedRow]:
    """The prompts of a run of ours, in the order in which it asks them."""
    from experiments.peer_trl import AskedRow
    from sortedrl.build.evaluation import tokenizer_of
    from sortedrl.data.stream import PromptStream, tokenized
    from sortedrl.runs.tasks import training_tasks

    task, _ = training_tasks(settings)
    tokenizer = tokenizer_of(settings.model)
    rows = tokenized(task.rows, tokenizer, chat=settings.data.chat).rows
    stream = PromptStream(rows, epochs=settings.epochs, seed=settings.seed)
    return [
        AskedRow(tokenizer.decode(list(prompt.tokens)), list(prompt.tokens), prompt.fields)
        for prompt in stream.take(stream.total)
    ]


def with_scores(job: Job, settings: TrainSettings) -> None:
    """Put the held-out scores of the kept weights among the numbers of TRL's updates."""
    updates = {int(_number(row, "update")): row for row in read_metrics(job.metrics)}
    require(
        sorted(updates) == list(range(1, job.updates + 1)),
        f"{job.metrics} must have the numbers of {job.updates} updates, got {len(updates)}",
    )
    scores = scored(settings, {update: job.weights(update) for update in job.evaluated})
    file = MetricsFile(job.metrics)
    for update in range(job.updates + 1):
        if update in updates:
            file(updates[update])
        if update in scores:
            file({"update": update, **scores[update].row()})
    file.close()


def scored(settings: TrainSettings, weights: Mapping[int, Path]) -> dict[int, Scores]:
    """The held-out scores of the model a run begins with (update 0), and of other weights."""
    import torch

    from sortedrl.build.evaluation import tokenizer_of
    from sortedrl.build.training import trained_model
    from sortedrl.data.stream import tokenized
    from sortedrl.engines.native import NativeEngine
    from sortedrl.engines.native.weights import read_safetensors
    from sortedrl.evaluation.runner import Question
    from sortedrl.rewards.pool import RewardPool
    from sortedrl.runs.evaluating import Evaluator
    from sortedrl.runs.tasks import training_tasks
    from sortedrl.types import Weights

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    asked, cache_gib = settings.evaluation, settings.rollout.cache_gib
    _, held_out = training_tasks(settings)
    tokenizer = tokenizer_of(settings.model)
    engine = NativeEngine(
        trained_model(settings),
        slots=settings.engine.slots,
        max_tokens=settings.engine.max_tokens,
        tokenizer=tokenizer,
        cache_bytes=None if cache_gib is None else int(cache_gib * _GIB),
        is_compiled=False,
    )
    with ExitStack() as stack:
        questions = []
        for task in held_out:
            pool = RewardPool(task.reward, settings.rewards, folder=settings.out)
            rows = tokenized(task.rows, tokenizer, chat=settings.data.chat).rows
            questions.append(Question(task, rows, stack.enter_context(pool)))
        evaluator = Evaluator(
            questions,
            engine,
            text=engine.text,
            temperature=0.0 if asked.temperature is None else asked.temperature,
            max_tokens=settings.engine.max_tokens,
            samples=asked.samples,
            seed=settings.seed,
        )
        found = {0: evaluator.scores(Weights(0), advance=_say_nothing)}
        for update, path in weights.items():
            kept = Weights(update, read_safetensors(path))
            found[update] = evaluator.scores(kept, advance=_say_nothing)
    return found


def curve_numbers(folder: Path, *, targets: Sequence[float]) -> dict[str, Any]:
    """What the table says of a curve, as `experiments.curves` says it of our own runs."""
    points = curve(folder)
    return {
        "first_score": points[0].score,
        "last_score": points[-1].score,
        "best_score": max(point.score for point in points),
        "mean_score": mean_score(points),
        "reached": {
            f"{target:g}": {along: reached(points, target, along=along) for along in ALONG}
            for target in targets
        },
        "curve": [asdict(point) for point in points],
    }


def speeds(rows: Sequence[Mapping[str, Value]], *, first: int) -> dict[str, float]:
    """How fast a training was: over all, and `later`, after its first updates.

    >>> rows = [
    ...     {"update": n, "total/seconds": 3.0 + n, "total/samples": 8 * n,
    ...      "total/trained_tokens": 80 * n, "rollout/rollout_seconds": 0.5}
    ...     for n in (1, 2, 3)
    ... ]
    >>> found = speeds(rows, first=1)
    >>> found["samples_per_second"], found["later_samples_per_second"]
    (4.0, 8.0)
    """
    updates = [row for row in rows if row.get("total/seconds") is not None]
    require(
        len(updates) > first,
        f"first_updates must be below the {len(updates)} updates of a run, got {first}",
    )
    start, end = updates[first - 1] if first else None, updates[-1]
    generated = sum(_number(row, "rollout/rollout_seconds") for row in updates)
    numbers = {
        "samples": _number(end, "total/samples"),
        "trained_tokens": _number(end, "total/trained_tokens"),
        "updates": len(updates),
        "seconds": _number(end, "total/seconds"),
        "generation_share": generated / _number(end, "total/seconds"),
    }
    for name, since in (("", None), ("later_", start)):
        seconds = _gained(since, end, "total/seconds")
        numbers[f"{name}samples_per_second"] = _gained(since, end, "total/samples") / seconds
        numbers[f"{name}tokens_per_second"] = _gained(since, end, "total/trained_tokens") / seconds
    return numbers


def table(records: Sequence[Record], *, against: str = "trl-generate") -> list[dict[str, Any]]:
    """A row for each arm: the mean of its seeds, the least and the most; `against` is 1 x."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record.numbers.get("kind") == "run":
            arms.setdefault(record.numbers["arm"], []).append(record.numbers)
    rows = []
    for arm, runs in arms.items():
        row: dict[str, Any] = {"arm": arm, "seeds": sorted(run["seed"] for run in runs)}
        for name in _SHOWN:
            row[name] = _spread([run[name] for run in runs])
        for target in runs[0]["reached"]:
            for along in ("samples", "seconds"):
                found = [run["reached"][target][along] for run in runs]
                row[f"{along}_to_{target}"] = None if None in found else _spread(found)
        rows.append(row)
    _add_ratios(rows, against=against)
    return rows


_SHOWN = (
    "samples_per_second",
    "tokens_per_second",
    "later_samples_per_second",
    "later_tokens_per_second",
    "generation_share",
    "seconds",
    "first_score",
    "last_score",
)


def _add_ratios(rows: Sequence[dict[str, Any]], *, against: str) -> None:
    """How many times as fast as one of the arms, where that one was measured."""
    base = next((row for row in rows if row["arm"] == against), None)
    for row in rows:
        for name in ("samples_per_second", "later_samples_per_second"):
            ratio = None if base is None else row[name]["mean"] / base[name]["mean"]
            row[f"{name}_ratio"] = ratio


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "least": min(values), "most": max(values)}


def _own_numbers(trial: Trial, piece: Piece) -> dict[str, Any]:
    """A run of ours in numbers, with its speeds counted as those of TRL."""
    rows_of = trial.scratch / piece.name / "metrics.jsonl"
    numbers = dict(piece.run())
    found = speeds(read_metrics(rows_of), first=trial.settings["first_updates"])
    return {**numbers, **found}


def _settings(trial: Trial, arm: TrlArm) -> TrainSettings:
    """The settings of our own synchronous run, in TRL's folder."""
    name = next(iter(trial.settings["arms"]))
    own = learning.Arm(algorithm=_ALGORITHM, name=name, seed=arm.seed)
    model = learning.warmed(trial, arm.seed)
    return replace(learning.train_settings(trial, own, model=model), out=trial.scratch / arm.piece)


def _gained(since: Mapping[str, Value] | None, end: Mapping[str, Value], name: str) -> float:
    return _number(end, name) - (0.0 if since is None else _number(since, name))


def _number(row: Mapping[str, Value], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float):
        raise DataError("metrics.jsonl", f"{name} must be a number, got {value!r}")
    return float(value)


def _say_nothing(_: str) -> None:
    """Nobody watches."""
