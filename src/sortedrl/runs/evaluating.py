"""The evaluations of a run: held-out tasks, answered by the engine between two updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sortedrl.engines.guest import Guest, RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.evaluation.runner import Question, Runner
from sortedrl.types import Trajectory, Weights


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
