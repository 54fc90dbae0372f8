"""A training run from its start, or a checkpoint, to its end.

After every update, in this order: the numbers and some answers of every length are logged, the
model is evaluated and saved where that is due, and it is decided whether to continue. A checkpoint
is written at an update boundary, when nothing runs. Killed at any instant, the run resumes from its
newest complete checkpoint, and its logs are cut to what they were then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sortedrl.config.train import TrainSettings
from sortedrl.core.buffer_file import save_buffer
from sortedrl.core.events import EventFile
from sortedrl.core.files import AnswerFile, LoggedAnswer, MetricsFile, Value
from sortedrl.core.meter import Figures, Meter, update_row
from sortedrl.data.stream import Tokenizer
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.streaming.weight_files import MOST_NATS
from sortedrl.environments.pool import EnvironmentPool
from sortedrl.errors import EngineError
from sortedrl.evaluation.runner import OUTSIDE_SECONDS, TURNS, EvaluationRunner, Question
from sortedrl.report.live import View
from sortedrl.runs.build_training import TrainingParts
from sortedrl.runs.folder import RunFolder, as_saved
from sortedrl.runs.output import Trackers, evaluation_line, update_line
from sortedrl.runs.start import Stopping
from sortedrl.training.checkpoint import Checkpoints, write_model, write_state
from sortedrl.types import TrainBatch, Trajectory, Weights


def spread(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """At most `count` of them, from the shortest to the longest, evenly spaced by rank."""
    ranked = sorted(trajectories, key=lambda t: (t.num_tokens, t.key))
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return [ranked[len(ranked) // 2]]
    last = len(ranked) - 1
    return [ranked[place * last // (count - 1)] for place in range(count)]


def logged(
    batch: TrainBatch,
    *,
    update: int,
    count: int,
    question: Callable[[Sequence[int]], str],
    response: Callable[[Trajectory], str],
) -> Iterator[LoggedAnswer]:
    """The answers of an update to keep; `question` gives the text of a prompt's tokens."""
    for trajectory in spread(batch.trajectories, count):
        versions = [segment.version for segment in trajectory.segments] or [batch.version]
        yield LoggedAnswer(
            update=update,
            prompt=trajectory.prompt.id,
            sample=trajectory.sample_index,
            group=trajectory.group,
            versions=(min(versions), max(versions)),
            tokens=trajectory.num_tokens,
            is_truncated=trajectory.finish_reason == "length",
            reward=trajectory.reward,
            parts=dict(trajectory.reward_parts),
            question=question(trajectory.prompt.tokens),
            response=response(trajectory),
        )


Reason = Literal["data", "updates", "target", "asked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a run ended, and its results."""

    reason: Reason
    updates: int
    figures: Figures
    first_scores: Scores | None
    last_scores: Scores | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """The logs of a run."""

    events: EventFile
    metrics: MetricsFile
    answers: AnswerFile
    trackers: Trackers
    meter: Meter


@dataclass(slots=True, kw_only=True)
class Counters:
    """The progress of a run."""

    updates: int = 0
    first_scores: Scores | None = None
    last_scores: Scores | None = None
    best_score: float | None = None
    scored_at: int | None = None
    """The update after which the last evaluation took place."""

    def to_json(self) -> dict[str, Any]:
        """The counters as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Counters:
        """The counters of a checkpoint."""
        names = ("first_scores", "last_scores")
        scores = {name: None if row[name] is None else Scores(**row[name]) for name in names}
        return cls(**{**row, **scores})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The loop, and what happens between two updates: logs, evaluations, checkpoints."""

    settings: TrainSettings
    parts: TrainingParts
    tokenizer: Tokenizer
    folder: RunFolder
    logs: Logs
    checkpoints: Checkpoints
    evaluator: Evaluator | None
    view: View
    data: Mapping[str, Any]
    """What must be the same on resume: see `identity_of`."""
    on_row: Callable[[Mapping[str, Value]], None] = lambda row: None
    """Called with the metrics of every update and evaluation, after they are logged."""
    counters: Counters = field(default_factory=Counters)

    def go(self, stopping: Stopping) -> Ending:
        """Train until the data or the updates are used up, the target is reached, or on request."""
        if self.counters.scored_at is None and not stopping.is_requested:
            self._evaluate()
        reason = self._why_stop(stopping)
        batches = self.parts.loop.run() if self._has_work else iter(())
        while reason is None:
            batch = next(batches, None)
            if batch is None:
                self._flush()
                reason = "data"
            else:
                self._after_update(batch)
                reason = self._why_stop(stopping)
        return self._end(reason)

    @property
    def _has_work(self) -> bool:
        """Whether there is anything to train on: nothing if a run is resumed after its end."""
        is_open = self.parts.loop.buffer.oldest_open_group is not None
        return is_open or not self.parts.prompts.is_exhausted

    def show(self, done: str) -> None:
        """Show the current activity to the user."""
        self.view.advance(f"update {self.counters.updates + 1}: {done}", self._share_done())

    def _after_update(self, batch: TrainBatch) -> None:
        counters, trainer = self.counters, self.parts.trainer
        self.checkpoints.check()
        counters.updates += 1
        figures = self.logs.meter.window()
        # A part called `mean` or `std` does not replace the number of the whole reward.
        self._log(figures, {**_reward_parts(batch), **trainer.last, **self.parts.numbers()})
        self._require_agreement()
        self._keep_answers(batch)
        line = update_line(
            counters.updates,
            numbers=trainer.last,
            figures=figures,
            done=self._share_done(),
            seconds=self.parts.clock.seconds(),
        )
        self.view.tell(line)
        is_best = counters.updates % self.settings.evaluation.every == 0 and self._evaluate()
        is_due = counters.updates % self.settings.saving.every == 0
        if is_due or (is_best and self.settings.saving.keep_best):
            self._save()

    def _log(self, figures: Figures, values: Mapping[str, float]) -> None:
        totals = update_row(
            update=self.counters.updates,
            version=self.parts.trainer.version,
            seconds=self.parts.clock.seconds(),
            run=self.logs.meter.run,
            window=figures,
        )
        row = {**totals, **values}
        self.logs.metrics(row)
        self.view.updated(row)
        self.logs.trackers.log(row, step=self.counters.updates)
        self.on_row(row)

    def _require_agreement(self) -> None:
        """Stop where an outside engine does not generate with the trained weights."""
        gap = self.parts.trainer.last.get("gap/mean", 0.0)
        if self.settings.rollout.is_outside and gap > MOST_NATS:
            raise EngineError(
                f"{self.parts.engine.name} and the trainer must agree on fresh tokens, but their "
                f"log-probabilities are {gap:.2g} nats apart on average (at most {MOST_NATS}): the "
                "new weights did not arrive, or not all of them. Test the engine with sortedrl "
                "engines, then resume from the last checkpoint (--resume)"
            )

    def _keep_answers(self, batch: TrainBatch) -> None:
        self.logs.answers(
            logged(
                batch,
                update=self.counters.updates,
                count=self.settings.saving.answers,
                question=lambda tokens: self.tokenizer.decode(list(tokens)),
                response=self.parts.text,
            )
        )

    def _evaluate(self) -> bool:
        """Evaluate on the held-out tasks; returns whether the score is the best so far."""
        counters = self.counters
        if self.evaluator is None or counters.scored_at == counters.updates:
            return False
        with self.parts.clock.paused():
            scores = self.evaluator.scores(self.parts.trainer.weights(), advance=self.show)
        counters.last_scores = scores
        counters.first_scores = counters.first_scores or scores
        counters.scored_at = counters.updates
        row = scores.row()
        self.logs.metrics({"update": counters.updates, **row})
        self.view.updated(row)
        self.logs.trackers.log(row, step=counters.updates)
        self.view.tell(evaluation_line(counters.updates, scores.by_task, scores.rewards_by_task))
        self.on_row({"update": counters.updates, **row})
        is_best = counters.best_score is None or scores.mean > counters.best_score
        counters.best_score = scores.mean if is_best else counters.best_score
        return is_best

    def _save(self, *, is_last: bool = False) -> None:
        """Save a checkpoint, in the background if a copy fits into main memory."""
        counters, logs, parts = self.counters, self.logs, self.parts
        self.folder.require_in_place()
        # Only one at a time, so that memory has no more than one copy.
        self.checkpoints.finish()
        scores = counters.last_scores if counters.scored_at == counters.updates else None
        # After the last one nothing is trained, so no copy is made.
        copy = None if is_last else parts.trainer.snapshot(tokenizer=self.tokenizer)
        buffer = parts.loop.buffer.state()
        state = {
            "settings": as_saved(self.settings),
            "data": dict(self.data),
            "run": counters.to_json(),
            "events_bytes": logs.events.sync(),
            "metrics_bytes": logs.metrics.sync(),
            "answers_bytes": logs.answers.sync(),
            "journal": parts.loop.journal.state().to_json(),
            "engine_version": parts.engine.version,
            "position": parts.prompts.position,
            "fingerprint": parts.prompts.fingerprint,
        }

        def write(folder: Path) -> None:
            if copy is None:
                trainer = parts.trainer.save(folder, tokenizer=self.tokenizer)
            else:
                trainer = copy(folder)
            save_buffer(buffer, folder / "buffer.bin")
            write_state(folder, {**state, "trainer": trainer})

        save = self.checkpoints.save if copy is None else self.checkpoints.save_later
        save(counters.updates, write, score=None if scores is None else scores.mean)

    def _why_stop(self, stopping: Stopping) -> Reason | None:
        counters, target = self.counters, self.settings.evaluation.target
        if stopping.is_requested:
            return "asked"
        if self.settings.max_updates is not None and counters.updates >= self.settings.max_updates:
            return "updates"
        if target is not None and counters.last_scores and counters.last_scores.mean >= target:
            return "target"
        return None

    def _flush(self) -> None:
        """Train on the answers that dynamic sampling has held back, at the end of the data."""
        if self.parts.trainer.flush():
            self.counters.updates += 1
            self._log(Figures(), self.parts.trainer.last)

    def _end(self, reason: Reason) -> Ending:
        counters = self.counters
        if reason != "asked":
            self._evaluate()
        self._save(is_last=True)
        if reason != "asked":
            write_model(
                self.folder.model,
                lambda folder: self.parts.trainer.export(folder, tokenizer=self.tokenizer),
                otherwise="the last checkpoint holds the same weights; free some space, and "
                "resume to write the model again",
            )
        return Ending(
            reason=reason,
            updates=counters.updates,
            figures=self.logs.meter.run if counters.updates else Figures(),
            first_scores=counters.first_scores,
            last_scores=counters.last_scores,
        )

    def _share_done(self) -> float:
        settings, counters = self.settings, self.counters
        answers = self.parts.prompts.total * settings.schedule.samples_per_prompt
        share = self.parts.loop.buffer.num_trained / answers
        if settings.max_updates is not None:
            share = max(share, counters.updates / settings.max_updates)
        return min(1.0, share)


def _reward_parts(batch: TrainBatch) -> dict[str, float]:
    """The mean of each named part of the rewards."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in batch.trajectories:
        for name, value in trajectory.reward_parts.items():
            values[name].append(value)
    return {f"reward/{name}": sum(found) / len(found) for name, found in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The accuracy on each task."""

    by_task: dict[str, float]
    """The share of right answers."""
    mean_length: float
    rewards_by_task: dict[str, float] = field(default_factory=dict)
    """The mean reward, for every task that has other rewards than 1 for right and 0 for wrong."""
    mean_turns: float | None = None
    """Turns of the policy in a conversation; `None` where there are none."""
    mean_outside_seconds: float | None = None
    """Seconds that a conversation waited for its environment, on average."""

    @property
    def mean(self) -> float:
        """The mean over the tasks."""
        return sum(self.by_task.values()) / len(self.by_task)

    def row(self) -> dict[str, float]:
        """The scores as numbers of a metrics row."""
        talk = {"turns": self.mean_turns, "outside_seconds": self.mean_outside_seconds}
        return {
            **{f"evaluation/{task}": score for task, score in self.by_task.items()},
            "evaluation/score": self.mean,
            "evaluation/length": self.mean_length,
            **{f"evaluation/reward/{task}": mean for task, mean in self.rewards_by_task.items()},
            **{f"evaluation/{name}": value for name, value in talk.items() if value is not None},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates on the same questions each time, with the same noise.

    Engine and environments are shared with the training: they must be idle during an evaluation.
    """

    questions: Sequence[Question]
    engine: RolloutEngine
    text: Callable[[Trajectory], str]
    sampling: Sampling
    samples: int
    seed: int
    environments: EnvironmentPool | None = None

    def scores(self, weights: Weights, *, advance: Callable[[str], None]) -> Scores:
        """The scores of the weights; `advance` is given the progress."""
        if self.engine.version != weights.version:
            self.engine.load_weights(weights)
        runner = EvaluationRunner(
            self.questions,
            engine=self.engine,
            submit=partial(self.engine.submit, tolerance=None, sampling=self.sampling),
            text=self.text,
            samples=self.samples,
            seed=self.seed,
            environments=self.environments,
        )
        right: dict[str, list[bool]] = defaultdict(list)
        rewards: dict[str, list[float]] = defaultdict(list)
        tokens = 0
        parts: dict[str, float] = defaultdict(float)
        for answer in runner.run():
            if answer is None:
                done = runner.progress
                advance(f"evaluating: {done.written} of {done.total} answers")
                continue
            right[answer.task].append(answer.is_correct)
            if answer.reward is not None:
                rewards[answer.task].append(answer.reward)
            tokens += answer.num_tokens
            for name, value in answer.parts.items():
                parts[name] += value
        total = sum(len(answers) for answers in right.values())
        telling = (task for task in sorted(rewards) if rewards[task] != right[task])
        has_turns = self.environments is not None
        return Scores(
            by_task={task: sum(answers) / len(answers) for task, answers in sorted(right.items())},
            mean_length=tokens / total,
            rewards_by_task={task: sum(rewards[task]) / len(rewards[task]) for task in telling},
            mean_turns=parts[TURNS] / total if has_turns else None,
            mean_outside_seconds=parts[OUTSIDE_SECONDS] / total if has_turns else None,
        )
