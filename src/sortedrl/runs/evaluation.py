"""Tasks as commands and runs open them: files from a named folder, progress on long work.

The evaluations of a run: held-out tasks, answered by the engine between two updates.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sortedrl.config.schedule import require
from sortedrl.config.spec import options_from, parsed
from sortedrl.config.train import DataSettings, PeriodicEvaluation, TrainSettings
from sortedrl.data.rows import SUFFIXES
from sortedrl.engines.generation import Guest, RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import ConfigError
from sortedrl.evaluation.runner import Question, Runner
from sortedrl.report.terminal import progress, tell
from sortedrl.rewards.functions import RewardSource
from sortedrl.tasks.catalogue import Task, open_task, reward_from, shared_rows
from sortedrl.tasks.knights.puzzle import Split
from sortedrl.types import Trajectory, Weights


def opened(
    spec: str,
    *,
    split: Split | None,
    folder: Path | None,
    reward: RewardSource | None,
    data: DataSettings,
) -> Task:
    """The task of a spec; without a folder the one that $SORTEDRL_DATA names is taken.

    `split` is what its user takes where the spec names none; to train on another is warned of.
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


def training_tasks(settings: TrainSettings) -> tuple[Task, list[Task]]:
    """The task that a run is trained on, and those it is evaluated on, with other rows.

    The options of the reward hold for held-out tasks that are scored by the same function too.
    """
    options = options_from(settings.reward_options)
    task = _with_reward(settings, settings.task, split="train")
    held_out = [_with_reward(settings, spec, split="test") for spec in settings.evaluation.tasks]
    task = _apart(task, held_out, settings.evaluation)
    function = task.reward.function
    return _with_options(task, options), [
        _with_options(other, options) if other.reward.function == function else other
        for other in held_out
    ]


def _warn_of_test_rows(spec: str) -> None:
    if spec.lower().endswith(SUFFIXES):
        return
    split = parsed(spec)[1].get("split", "train")
    if "test" in split:
        tell(
            f"warning: {spec} trains on the split {split!r}, which is kept for evaluation; "
            "scores of this model on it will mean nothing"
        )


def _apart(task: Task, held_out: Sequence[Task], evaluation: PeriodicEvaluation) -> Task:
    """The task without rows that are evaluated on; by default a task that has such is refused."""
    if evaluation.shared_rows == "allow":
        return task
    left_out: set[int] = set()
    for other in held_out:
        asked = other.rows[: evaluation.limit]
        shared = shared_rows(task.rows, asked)
        if not shared.asked:
            continue
        found = (
            f"{len(shared.asked):,} of the {len(asked):,} rows of {other.name} ask what is "
            f"trained on in {task.name} (the first: {asked[shared.asked[0]].place})"
        )
        if evaluation.shared_rows == "refuse":
            raise ConfigError(
                f"evaluation.tasks must not ask what is trained on, but {found}; evaluate on "
                "other rows (another split, seed or file), or set evaluation.shared_rows to "
                "leave_out, so that they are not trained on, or to allow"
            )
        tell(f"{found}; {len(shared.trained):,} rows are not trained on")
        left_out |= shared.trained
    rows = [row for number, row in enumerate(task.rows) if number not in left_out]
    require(
        bool(rows),
        f"evaluation.shared_rows is leave_out, and every row of {task.name} is evaluated on; "
        "evaluate on other rows",
    )
    return replace(task, rows=rows) if left_out else task


def _with_reward(settings: TrainSettings, spec: str, *, split: Split) -> Task:
    reward = None if settings.reward is None else reward_from(settings.reward)
    return opened(spec, split=split, folder=settings.folder, reward=reward, data=settings.data)


def _with_options(task: Task, options: Mapping[str, object]) -> Task:
    reward = replace(task.reward, options={**task.reward.options, **options})
    return replace(task, reward=reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How right the answers to each task were."""

    by_task: dict[str, float]
    """The share of right answers."""
    mean_length: float

    @property
    def mean(self) -> float:
        """The mean over the tasks."""
        return sum(self.by_task.values()) / len(self.by_task)

    def row(self) -> dict[str, float]:
        """The scores as numbers of a metrics row."""
        return {
            **{f"evaluation/{task}": score for task, score in self.by_task.items()},
            "evaluation/score": self.mean,
            "evaluation/length": self.mean_length,
        }


class Evaluator:
    """Asks the same questions again and again, with the same noise."""

    def __init__(
        self,
        questions: Sequence[Question],
        engine: RolloutEngine,
        *,
        text: Callable[[Trajectory], str],
        temperature: float,
        max_tokens: int,
        samples: int,
        seed: int,
    ) -> None:
        """The engine is lent: it must be idle whenever scores are asked for."""
        self._questions = questions
        self._engine = engine
        self._guest = Guest(
            engine, sampling=Sampling(temperature=temperature), max_tokens=max_tokens
        )
        self._text = text
        self._samples = samples
        self._seed = seed

    def scores(self, weights: Weights, *, advance: Callable[[str], None]) -> Scores:
        """The scores of the weights; `advance` is told how far it has come."""
        if self._engine.version != weights.version:
            self._engine.load_weights(weights)
        runner = Runner(
            self._questions,
            engine=self._guest,
            text=self._text,
            samples=self._samples,
            seed=self._seed,
        )
        right: dict[str, list[bool]] = defaultdict(list)
        tokens = 0
        for answer in runner.run():
            if answer is None:
                done = runner.progress
                advance(f"evaluating: {done.written} of {done.total} answers")
                continue
            right[answer.task].append(answer.is_correct)
            tokens += answer.num_tokens
        total = sum(len(answers) for answers in right.values())
        return Scores(
            by_task={task: sum(answers) / len(answers) for task, answers in sorted(right.items())},
            mean_length=tokens / total,
        )
