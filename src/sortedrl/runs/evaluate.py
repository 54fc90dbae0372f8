"""Evaluates one model on tasks: its answers are generated, scored and saved one by one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from sortedrl.config.data import (
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    RewardSettings,
)
from sortedrl.data.catalogue import Task
from sortedrl.data.stream import tokenized
from sortedrl.environments.pool import opened_rows
from sortedrl.evaluation.results import PAGE, WEIGHTS, ResultsWriter
from sortedrl.evaluation.runner import EvaluationRunner, Question, gold_of
from sortedrl.evaluation.statistics import Asked, Evaluation
from sortedrl.report.evaluation import evaluation_page
from sortedrl.report.terminal import progress, tell, write_text
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.runs.tasks import environment_pool, evaluation_engine, threads, tokenizer_of

_WINDOWS = 256
_WINDOW_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """The tasks of an evaluation, and how they are sampled and scored."""

    tasks: Sequence[Task]
    settings: EvaluationSettings
    rewards: RewardSettings
    data: DataSettings
    device: str | None
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    """The environment, if answers are conversations."""
    described: Mapping[str, object]
    """The settings that answers and scores depend on, as saved with the results."""


def evaluated(
    model: str, plan: EvaluationPlan, *, label: str, folder: Path, is_resumed: bool
) -> Evaluation:
    """Evaluate one model; its answers are saved in a folder one by one."""
    settings, tasks = plan.settings, plan.tasks
    with ExitStack() as stack:
        stack.enter_context(threads(None, workers=plan.rewards.num_workers))
        tokenizer = environments = None
        if plan.environment.is_used:  # the opening of an environment is part of its row
            tokenizer = tokenizer_of(model)
            environments = environment_pool(plan.environment, tokenizer, data=plan.data)
            stack.enter_context(environments)
            tasks = [replace(t, rows=opened_rows(environments, t.rows)) for t in tasks]
        writer = stack.enter_context(
            ResultsWriter(
                folder,
                label=label,
                settings={"model": model, **_weights(model), **plan.described},
                asked={t.name: Asked(prompts=len(t.rows), samples=settings.samples) for t in tasks},
                questions={
                    t.name: [(row.text, gold_of(row.fields)) for row in t.rows] for t in tasks
                },
                resume=is_resumed,
            )
        )
        # Errors in rewards, rows or tokenizer are raised before the weights are loaded.
        pools = _pools(tasks, plan, folder, stack)
        tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
        questions = [
            Question(task, tokenized(task.rows, tokenizer, chat=plan.data.chat).rows, pool)
            for task, pool in zip(tasks, pools, strict=True)
        ]
        engine = evaluation_engine(model, tokenizer, settings, device=plan.device)
        runner = EvaluationRunner(
            questions,
            engine=engine,
            submit=partial(engine.submit, tolerance=None),
            text=engine.text,
            samples=settings.samples,
            seed=settings.seed,
            is_done=writer.is_done,
            environments=environments,
        )
        _write(runner, writer, label=label)
        return writer.finish()


def write_page(evaluation: Evaluation, folder: Path) -> None:
    """Write the page that shows the answers, in their folder."""
    write_text(folder / PAGE, evaluation_page([evaluation], None))


def _weights(model: str) -> dict[str, object]:
    """A fingerprint of local weights, computed from a part of them; a hub name has none.

    A run that is resumed writes its model to the same path, and old answers are of the old model.
    """
    path = Path(model)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            return {}
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as weights:
            for window in range(_WINDOWS):
                weights.seek(size * window // _WINDOWS)
                digest.update(weights.read(_WINDOW_BYTES))
    return {WEIGHTS: digest.hexdigest()[:16]} if files else {}


def _pools(
    tasks: Sequence[Task], plan: EvaluationPlan, folder: Path, stack: ExitStack
) -> list[RewardPool | None]:
    """A pool for each task; tasks with the same reward share one. Environments need none."""
    if plan.environment.gives_rewards:
        return [None for _ in tasks]
    pools: list[RewardPool | None] = []
    for number, task in enumerate(tasks):
        same = [p for t, p in zip(tasks[:number], pools, strict=True) if t.reward == task.reward]
        pools.append(
            same[0]
            if same
            else stack.enter_context(RewardPool(task.reward, plan.rewards, folder=folder))
        )
    return pools


def _write(runner: EvaluationRunner, writer: ResultsWriter, *, label: str) -> None:
    began = time.monotonic()
    try:
        with progress(max(runner.total, 1)) as advance:
            for answer in runner.run():
                if answer is not None:
                    writer.append(answer)
                    continue
                done = runner.progress
                rate = done.tokens / (time.monotonic() - began)
                line = f"{label}: {done.written} of {done.total} answers, {rate:,.0f} tokens/s"
                advance(line, done.written)
    except KeyboardInterrupt:
        tell(f"{writer.num_done} answers are saved; continue with --resume")
        raise
