"""Held-out scores of weights saved by TRL, evaluated as in `sortedrl train`.

Evaluator, puzzles and noise are those of our own runs, so equal weights get equal scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.peer_job import Job
from experiments.peer_numbers import number
from sortedrl.config.checks import require
from sortedrl.core.files import MetricsFile, read_metrics
from sortedrl.engines.sampling import Sampling

if TYPE_CHECKING:
    from sortedrl.config.train import TrainSettings
    from sortedrl.runs.training import Scores

_GIB = 1 << 30


def with_scores(job: Job, settings: TrainSettings) -> None:
    """Add the held-out scores of the saved weights to the metrics of TRL's updates."""
    updates = {int(number(row, "update")): row for row in read_metrics(job.metrics)}
    require(
        sorted(updates) == list(range(1, job.updates + 1)),
        f"{job.metrics} must have the metrics of {job.updates} updates, got {len(updates)}",
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
    """The held-out scores of the initial model (update 0) and of other weights."""
    import torch

    from sortedrl.data.stream import tokenized
    from sortedrl.engines.native import NativeEngine
    from sortedrl.evaluation.runner import Question
    from sortedrl.models.loading import read_safetensors
    from sortedrl.rewards.pool.pool import RewardPool
    from sortedrl.runs.build_training import ModelSettings, trained_model
    from sortedrl.runs.tasks import tokenizer_of, training_tasks
    from sortedrl.runs.training import Evaluator
    from sortedrl.types import Weights

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    asked, cache_gib = settings.evaluation, settings.rollout.cache_gib
    _, held_out = training_tasks(settings)
    tokenizer = tokenizer_of(settings.model)
    engine = NativeEngine(
        trained_model(ModelSettings.of(settings)),
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
        temperature = 0.0 if asked.temperature is None else asked.temperature
        evaluator = Evaluator(
            questions=questions,
            engine=engine,
            text=engine.text,
            sampling=Sampling(temperature=temperature, max_tokens=settings.engine.max_tokens),
            samples=asked.samples,
            seed=settings.seed,
        )
        found = {0: evaluator.scores(Weights(0), advance=_say_nothing)}
        for update, path in weights.items():
            kept = Weights(update, read_safetensors(path))
            found[update] = evaluator.scores(kept, advance=_say_nothing)
    return found


def _say_nothing(_: str) -> None:
    """Discard status lines."""
