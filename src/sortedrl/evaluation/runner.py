"""From a model and tasks to scored answers: all slots kept full, scoring beside the writing.

Every answer that is scored is recorded at once, so a run that is cut off can be taken up again:
the noise of an answer depends on the seed, its task, its row and its number, and on nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sortedrl.core.protocols import Engine
from sortedrl.core.randomness import mix
from sortedrl.data.stream import TokenizedRow
from sortedrl.evaluation.statistics import Answer, AnswerKey
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.rewards.pool.score import CallResult
from sortedrl.tasks.catalogue import Task
from sortedrl.types import Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class Question:
    """A task with the tokens of its rows, and the pool that scores it."""

    task: Task
    rows: Sequence[TokenizedRow]
    pool: RewardPool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an evaluation has come."""

    written: int
    scored: int
    total: int
    tokens: int


class Runner:
    """Writes and scores the answers of an evaluation."""

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        engine: Engine,
        text: Callable[[Trajectory], str],
        samples: int,
        seed: int,
        is_done: Callable[[AnswerKey], bool] = lambda _: False,
    ) -> None:
        """Answers for which `is_done` holds are left out."""
        self._engine = engine
        self._text = text
        self._pools = list({id(question.pool): question.pool for question in questions}.values())
        self._questions: dict[int, tuple[Question, int]] = {}
        self._open: dict[tuple[RewardPool, int], tuple[Trajectory, str]] = {}
        self._trajectories: list[Trajectory] = []
        self._written = self._scored = self._tokens = 0
        first = 0
        for question in questions:
            for index, row in enumerate(question.rows):
                prompt = Prompt(id=first + index, tokens=row.tokens, fields=row.fields, end=row.end)
                self._questions[prompt.id] = (question, index)
                self._trajectories += [
                    Trajectory(
                        prompt=prompt,
                        sample_index=sample,
                        group=0,
                        seed=mix(seed, _number(question.task.name), index, sample),
                    )
                    for sample in range(samples)
                    if not is_done((question.task.name, index, sample))
                ]
            first += len(question.rows)

    @property
    def total(self) -> int:
        """Answers to be written."""
        return len(self._trajectories)

    @property
    def progress(self) -> Progress:
        """How far it has come."""
        return Progress(self._written, self._scored, self.total, self._tokens)

    def run(self) -> Iterator[Answer | None]:
        """The answers in the order in which they are scored; `None` after every engine step."""
        self._engine.submit(self._trajectories, tolerance=None)
        while self._written < self.total:
            step = self._engine.step()
            self._tokens += step.decoded_tokens
            for trajectory in step.finished:
                self._score(trajectory)
            for pool in self._pools:
                yield from (self._answer(pool, result) for result in pool.completed())
            yield None
        for pool in self._pools:
            tickets = [ticket for of, ticket in self._open if of is pool]
            yield from (self._answer(pool, result) for result in pool.wait(tickets))

    def _score(self, trajectory: Trajectory) -> None:
        question, _ = self._questions[trajectory.prompt.id]
        response = self._text(trajectory)
        ticket = question.pool.submit(
            trajectory.prompt, response, sample_index=trajectory.sample_index
        )
        self._open[question.pool, ticket] = (trajectory, response)
        self._written += 1

    def _answer(self, pool: RewardPool, result: CallResult) -> Answer:
        trajectory, response = self._open.pop((pool, result.ticket))
        question, index = self._questions[trajectory.prompt.id]
        self._scored += 1
        fields, score = trajectory.prompt.fields, result.score
        assert trajectory.finish_reason is not None
        return Answer(
            task=question.task.name,
            prompt_id=index,
            sample_index=trajectory.sample_index,
            level=_text_or_none(fields.get("level")),
            question=question.rows[index].question,
            gold=gold_of(fields),
            response=response,
            reward=None if score is None else score.reward,
            parts={} if score is None else dict(score.parts),
            is_correct=score is not None
            and result.failure is None
            and score.is_correct(question.task.correct_from),
            num_tokens=trajectory.num_tokens,
            finish_reason=trajectory.finish_reason,
            failure=result.failure,
        )


def gold_of(fields: Mapping[str, object]) -> str | None:
    """The gold answer of a row as text."""
    return _text_or_none(fields.get("answer"))


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
