"""Generates and scores the answers of an evaluation, with all slots full and scoring in parallel.

Every scored answer is recorded at once, so an interrupted run can be resumed: the noise of an
answer depends only on the seed, its task, its row and its sample index. With environments, answers
are conversations, and slots belong to turns as in training: a conversation that waits for its
environment has no slot, and one that returns goes before those that have not begun.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sortedrl.core.protocols import Engine
from sortedrl.core.randomness import mix
from sortedrl.data.catalogue import Task
from sortedrl.data.stream import TokenizedRow
from sortedrl.environments.pool import EnvironmentPool
from sortedrl.evaluation.statistics import Answer, AnswerKey
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.rewards.pool.score import CallResult, Failure, Score
from sortedrl.types import Key, Prompt, Trajectory

TURNS, OUTSIDE_SECONDS = "turns", "outside_seconds"
"""Reward parts of every conversation: turns of the policy, and time in its environment."""


@dataclass(frozen=True, slots=True)
class Question:
    """A task with its tokenized rows, and the pool that scores it.

    Without a pool, its answers are conversations with rewards from their environments.
    """

    task: Task
    rows: Sequence[TokenizedRow]
    pool: RewardPool | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an evaluation."""

    written: int
    total: int
    tokens: int


class EvaluationRunner:
    """Generates and scores the answers of an evaluation."""

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        engine: Engine,
        submit: Callable[[Sequence[Trajectory]], None],
        text: Callable[[Trajectory], str],
        samples: int,
        seed: int,
        is_done: Callable[[AnswerKey], bool] = lambda _: False,
        environments: EnvironmentPool | None = None,
    ) -> None:
        """`submit` passes work to the engine; answers with `is_done` are skipped.

        With `environments`, which must be idle, all answers are conversations.
        """
        self._engine = engine
        self._submit = submit
        self._text = text
        self._environments = environments
        pools = {id(question.pool): question.pool for question in questions}
        self._pools = [pool for pool in pools.values() if pool is not None]
        self._questions: dict[int, tuple[Question, int]] = {}
        self._open: dict[tuple[RewardPool, int], tuple[Trajectory, str]] = {}
        self._trajectories: list[Trajectory] = []
        self._returned: deque[Trajectory] = deque()
        self._outside: dict[Key, float] = {}
        self._outside_seconds: dict[Key, float] = defaultdict(float)
        self._cut: list[Trajectory] = []
        self._begun = self._running = 0
        self._written = self._tokens = 0
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
        self._fresh = deque(self._trajectories)

    @property
    def total(self) -> int:
        """Answers to generate."""
        return len(self._trajectories)

    @property
    def progress(self) -> Progress:
        """The current progress."""
        return Progress(self._written, self.total, self._tokens)

    def run(self) -> Iterator[Answer | None]:
        """The answers in the order of scoring; `None` after every engine step."""
        while self._written < self.total:
            self._start()
            if self._running:
                step = self._engine.step()
                self._tokens += step.decoded_tokens
                for trajectory in step.finished:
                    yield from self._end_turn(trajectory)
            yield from self._take_replies()
            for pool in self._pools:
                yield from (self._answer(pool, result) for result in pool.completed())
            yield None
        yield from self._score_cut()
        for pool in self._pools:
            tickets = [ticket for of, ticket in self._open if of is pool]
            yield from (self._answer(pool, result) for result in pool.wait(tickets))

    def _start(self) -> None:
        """Submit work: without environments, everything at once."""
        limit, room = None, len(self._fresh)
        if self._environments is not None:
            limit = self._environments.limit
            room = self._engine.slots - self._running
        started: list[Trajectory] = []
        while len(started) < room:
            if self._returned:
                started.append(self._returned.popleft())
            elif self._fresh and (limit is None or self._begun < limit):
                started.append(self._fresh.popleft())
                self._begun += 1
            else:
                break
        self._running += len(started)
        if started:
            self._submit(started)

    def _end_turn(self, trajectory: Trajectory) -> Iterator[Answer]:
        self._running -= 1
        if self._environments is not None and trajectory.finish_reason == "stop":
            self._outside[trajectory.key] = time.monotonic()
            self._environments.submit(replace(trajectory, finish_reason=None))
        else:
            yield from self._finish(trajectory)

    def _take_replies(self) -> Iterator[Answer]:
        if self._environments is None:
            return
        for trajectory in self._environments.collect(wait=not self._running):
            since = self._outside.pop(trajectory.key)
            self._outside_seconds[trajectory.key] += time.monotonic() - since
            if trajectory.finish_reason is None:
                self._returned.append(trajectory)
            else:
                yield from self._finish(trajectory)
        if not (self._running or self._outside or self._returned):
            yield from self._score_cut()  # they occupy environments that others wait for

    def _finish(self, trajectory: Trajectory) -> Iterator[Answer]:
        question, _ = self._questions[trajectory.prompt.id]
        self._written += 1
        if question.pool is not None:
            if self._environments is not None:
                self._environments.cancel(trajectory)
                self._begun -= 1
            response = self._text(trajectory)
            ticket = question.pool.submit(
                trajectory.prompt, response, sample_index=trajectory.sample_index
            )
            self._open[question.pool, ticket] = (trajectory, response)
        elif trajectory.reward is None:
            self._cut.append(trajectory)
        else:
            self._begun -= 1
            score = Score(trajectory.reward, trajectory.reward_parts)
            yield self._scored_as(trajectory, self._text(trajectory), score)

    def _score_cut(self) -> Iterator[Answer]:
        """Score truncated conversations by their last reply; that may need a replay."""
        for trajectory in self._cut:
            assert self._environments is not None, "a question without a pool has environments"
            reward = self._environments.reward(trajectory)
            self._begun -= 1
            yield self._scored_as(
                trajectory,
                self._text(trajectory),
                None if reward is None else Score(reward),
                failure="timeout" if reward is None else None,
            )
        self._cut.clear()

    def _answer(self, pool: RewardPool, result: CallResult) -> Answer:
        trajectory, response = self._open.pop((pool, result.ticket))
        return self._scored_as(trajectory, response, result.score, failure=result.failure)

    def _scored_as(
        self,
        trajectory: Trajectory,
        response: str,
        score: Score | None,
        *,
        failure: Failure | None = None,
    ) -> Answer:
        question, index = self._questions[trajectory.prompt.id]
        fields = trajectory.prompt.fields
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
            parts={**self._turns(trajectory), **({} if score is None else score.parts)},
            is_correct=score is not None
            and failure is None
            and score.is_correct(question.task.correct_from),
            num_tokens=trajectory.num_tokens,
            finish_reason=trajectory.finish_reason,
            failure=failure,
        )

    def _turns(self, trajectory: Trajectory) -> dict[str, float]:
        """Reward parts of a conversation."""
        if self._environments is None:
            return {}
        return {
            TURNS: float(trajectory.num_turns),
            OUTSIDE_SECONDS: round(self._outside_seconds.pop(trajectory.key, 0.0), 3),
        }


def gold_of(fields: Mapping[str, object]) -> str | None:
    """The gold answer of a row as text."""
    return _text_or_none(fields.get("answer"))


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
