"""The tasks of a run: opened with progress, training rows kept apart from held-out ones.

Tokenizer and engine of an evaluation are opened here too, and the threads of a run are set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.config.checks import require
from sortedrl.config.data import (
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    PeriodicEvaluation,
)
from sortedrl.config.parsing import options_from, parsed
from sortedrl.config.sizes import cpu_limit, threads_for
from sortedrl.config.train import TrainSettings
from sortedrl.data.catalogue import Task, open_task, reward_from, shared_rows
from sortedrl.data.knights_puzzle import Split
from sortedrl.data.rows import SUFFIXES
from sortedrl.data.stream import Tokenizer
from sortedrl.environments.builtin import environment_source
from sortedrl.errors import ConfigError
from sortedrl.report.terminal import progress, tell
from sortedrl.rewards.functions import RewardSource
from sortedrl.runs.folder import RunFolder

if TYPE_CHECKING:
    from sortedrl.engines.native import NativeEngine
    from sortedrl.environments.pool import EnvironmentPool


def opened(
    spec: str,
    *,
    split: Split | None,
    folder: Path | None,
    reward: RewardSource | None,
    data: DataSettings,
) -> Task:
    """The task of a spec; the default folder is that of $SORTEDRL_DATA.

    `split` is used where the spec names none; training on a test split gives a warning.
    """
    if split == "train":
        _warn_of_test_rows(spec)
    environment = os.environ.get("SORTEDRL_DATA")
    with progress(1.0) as show:
        return open_task(
            spec,
            split=split,
            folder=folder or (Path(environment) if environment else None),
            reward=reward,
            data=data,
            advance=lambda share: show(f"making {spec}", share),
        )


def training_tasks(
    settings: TrainSettings, *, reward: RewardSource | None = None
) -> tuple[Task, list[Task]]:
    """The task that a run is trained on, and those it is evaluated on, with other rows.

    The options of the reward also apply to held-out tasks with the same reward function.
    A `reward` replaces the one that the settings name.
    """
    options = options_from(settings.reward_options)
    if reward is None and settings.reward is not None:
        reward = reward_from(settings.reward)
    if settings.environment.gives_rewards:
        require(
            reward is None,
            "environment.reward is 'environment', so no reward function is used, but one was "
            "given; leave it out, or set environment.reward to 'function'",
        )
        reward = environment_source(settings.environment)
    task = _with_reward(settings, settings.task, reward, split="train")
    tasks = settings.evaluation.tasks
    held_out = [_with_reward(settings, spec, reward, split="test") for spec in tasks]
    task = _without_shared_rows(task, held_out, settings.evaluation)
    function = task.reward.function
    return with_options(task, options), [
        with_options(other, options) if other.reward.function == function else other
        for other in held_out
    ]


def _warn_of_test_rows(spec: str) -> None:
    if spec.lower().endswith(SUFFIXES):
        return
    split = parsed(spec)[1].get("split", "train")
    if "test" in split:
        tell(
            f"warning: {spec} trains on the split {split!r}, which is meant for evaluation; "
            "scores of this model on it will be meaningless"
        )


def _without_shared_rows(
    task: Task, held_out: Sequence[Task], evaluation: PeriodicEvaluation
) -> Task:
    """The task without the rows that are evaluated on; by default, having any is an error."""
    if evaluation.shared_rows == "allow":
        return task
    left_out: set[int] = set()
    for other in held_out:
        evaluated = other.rows[: evaluation.limit]
        shared = shared_rows(task.rows, evaluated)
        if not shared.asked:
            continue
        found = (
            f"{len(shared.asked):,} of the {len(evaluated):,} rows of {other.name} have "
            f"the question of a row of {task.name} (first: {evaluated[shared.asked[0]].place})"
        )
        if evaluation.shared_rows == "refuse":
            raise ConfigError(
                f"evaluation.tasks must not have questions that are trained on, but {found}; "
                "evaluate on other rows (another split, seed or file), or set "
                "evaluation.shared_rows to leave_out (these rows are not trained on) or to allow"
            )
        tell(f"{found}; {len(shared.trained):,} rows are not trained on")
        left_out |= shared.trained
    rows = [row for number, row in enumerate(task.rows) if number not in left_out]
    require(
        bool(rows),
        f"evaluation.shared_rows is leave_out, but every row of {task.name} is evaluated on, "
        "which leaves none to train on; evaluate on other rows",
    )
    return replace(task, rows=rows) if left_out else task


def _with_reward(
    settings: TrainSettings, spec: str, reward: RewardSource | None, *, split: Split
) -> Task:
    task = opened(spec, split=split, folder=settings.folder, reward=reward, data=settings.data)
    # The names of numbers must not depend on the folder, so that runs can be compared.
    is_input = Path(spec).parent == RunFolder(settings.out).inputs
    return replace(task, name=Path(spec).stem) if is_input else task


def with_options(task: Task, options: Mapping[str, object]) -> Task:
    """The task with more keyword arguments of its reward."""
    reward = replace(task.reward, options={**task.reward.options, **options})
    return replace(task, reward=reward)


@contextmanager
def threads(count: int | None, *, workers: int) -> Iterator[None]:
    """Set the CPU threads inside the block; by default as many as the machine has free cores.

    OMP_NUM_THREADS takes precedence over the default. `workers` are other processes of the run.
    """
    import torch

    before = torch.get_num_threads()
    if count is None and "OMP_NUM_THREADS" not in os.environ:
        count = threads_for(cores=min(before, cpu_limit()), workers=workers)
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model; the weights stay where they are."""
    from sortedrl.models.loading import load_tokenizer

    tokenizer: Tokenizer = load_tokenizer(model)
    return tokenizer


def environment_pool(
    settings: EnvironmentSettings, tokenizer: Tokenizer, *, data: DataSettings
) -> EnvironmentPool:
    """Processes that run the environment of the settings; to be used in a `with` block."""
    from sortedrl.environments.pool import EnvironmentPool
    from sortedrl.environments.rendering import Renderer

    renderer = Renderer(tokenizer, chat=data.chat)
    return EnvironmentPool(environment_source(settings), settings, renderer=renderer)


def evaluation_engine(
    model: str, tokenizer: Tokenizer, settings: EvaluationSettings, *, device: str | None
) -> NativeEngine:
    """A native engine with its own copy of the model, for an evaluation."""
    from sortedrl.engines.native import NativeEngine, Sampling
    from sortedrl.models.loading import load_model

    return NativeEngine(
        load_model(model, dtype=None, device=device),
        slots=settings.slots,
        max_tokens=settings.max_tokens,
        sampling=Sampling(temperature=settings.sampling_temperature, top_p=settings.top_p),
        tokenizer=tokenizer,
    )
