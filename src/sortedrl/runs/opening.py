"""A training run made ready to go: data, rewards, model, logs, in the order of what can go wrong.

What is wrong with rows, rewards or tokenizer shows before any weights are loaded, and what is
wrong with these before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from sortedrl.answer_log import AnswerFile
from sortedrl.arguments import all_to_toml
from sortedrl.build.evaluation import tokenizer_of
from sortedrl.build.rollout import check_engine
from sortedrl.build.training import Saved, TrainingParts, training_parts
from sortedrl.data.chat import Tokenizer
from sortedrl.data.row import Row
from sortedrl.data.stream import TokenizedRow, tokenized
from sortedrl.evaluation.runner import Question
from sortedrl.evaluation.settings import EvaluationSettings
from sortedrl.events import Event, EventFile, Finish, read_events
from sortedrl.meter import Meter
from sortedrl.models.shape import shape_of
from sortedrl.report.live.view import Source, View
from sortedrl.rewards.pool import RewardPool
from sortedrl.run_log import MetricsFile, read_metrics
from sortedrl.runs.evaluating import Evaluator
from sortedrl.runs.folder import RunFolder
from sortedrl.runs.training import Counters, Logs, TrainingRun
from sortedrl.tasks.task import Task
from sortedrl.trackers import TrackedRun, open_trackers
from sortedrl.training.checkpoints import Checkpoints
from sortedrl.training.settings import TrainSettings

if TYPE_CHECKING:
    from sortedrl.build.cluster import RunningCluster

Tell = Callable[[str], None]


@contextmanager
def opened_run(
    settings: TrainSettings,
    *,
    task: Task,
    held_out: Sequence[Task],
    is_resumed: bool,
    view: View,
) -> Iterator[TrainingRun]:
    """A run that can go; everything it holds is let go of afterwards."""
    tell = view.tell
    settings.tracking.check_installed()
    check_engine(settings.rollout)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = RunFolder(settings.out)
    checkpoints = Checkpoints(
        folder.checkpoints,
        keep_last=settings.saving.keep_last,
        keep_best=settings.saving.keep_best,
        warn=tell,
    )
    if not is_resumed:
        folder.refuse_second_run()
    with ExitStack() as stack:
        pool = stack.enter_context(RewardPool(task.reward, settings.rewards, folder=folder.root))
        tokenizer = tokenizer_of(settings.model)
        rows = _readable(task.rows, tokenizer, settings, name=task.name, tell=tell)
        questions = _questions(held_out, tokenizer, settings, folder, stack, tell=tell)
        saved = _saved(folder, checkpoints, tell=tell) if is_resumed else None
        watch = _Watch()
        parts = training_parts(
            settings,
            rows,
            tokenizer=tokenizer,
            pool=pool,
            record=watch,
            saved=saved,
            cluster=_cluster(settings, stack, tell=tell),
            held_out_tokens=max(
                (len(row.tokens) for question in questions for row in question.rows), default=0
            ),
            tell=tell,
        )
        stack.callback(parts.close)
        config = all_to_toml(settings, TrainSettings())
        folder.write(config)  # of a resumed run too, as some settings may have changed
        meter = Meter()
        view.watch(_source(settings, parts, meter))
        _replay(folder, saved, meter=meter, view=view)
        logs = _logs(settings, folder, saved, meter=meter, tell=tell)
        stack.callback(logs.trackers.close)
        stack.callback(logs.answers.close)
        stack.callback(logs.metrics.close)
        stack.callback(logs.events.close)
        run = TrainingRun(
            settings=settings,
            parts=parts,
            tokenizer=tokenizer,
            folder=folder,
            logs=logs,
            checkpoints=checkpoints,
            evaluator=_evaluator(settings, questions, parts) if questions else None,
            view=view,
            counters=Counters() if saved is None else Counters.from_json(saved.state["run"]),
        )
        watch.run = run
        yield run


class _Watch:
    """Records events, and shows them to the person who waits."""

    def __init__(self) -> None:
        self.run: TrainingRun | None = None

    def __call__(self, event: Event) -> None:
        run = self.run
        assert run is not None, "nothing happens before the run goes"
        run.logs.meter(event)
        run.logs.events(event)
        run.view(event)
        if isinstance(event, Finish):
            ready = run.parts.loop.buffer.num_harvestable
            run.show(f"{ready} answers ready, {event.running} being written")


def _saved(folder: RunFolder, checkpoints: Checkpoints, *, tell: Tell) -> Saved | None:
    """The checkpoint to go on from; `None` where the run begins."""
    newest = checkpoints.newest()
    if newest is not None:
        tell(f"going on from {newest}")
        return Saved.read(newest)
    if folder.holds_run:
        tell(f"{folder.root} has no complete checkpoint yet; the run begins anew")
    return None


def _readable(
    rows: Sequence[Row], tokenizer: Tokenizer, settings: TrainSettings, *, name: str, tell: Tell
) -> Sequence[TokenizedRow]:
    """The rows whose prompts leave room for an answer."""
    most = shape_of(settings.model).context - 1
    if settings.max_prompt_tokens is not None:
        most = min(most, settings.max_prompt_tokens)
    found = tokenized(rows, tokenizer, chat=settings.data.chat, max_prompt_tokens=most)
    if found.num_too_long:
        tell(
            f"{name}: {found.num_too_long} of {len(rows)} prompts are left out, "
            f"they have more than {most} tokens"
        )
    return found.rows


def _questions(
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    settings: TrainSettings,
    folder: RunFolder,
    stack: ExitStack,
    *,
    tell: Tell,
) -> list[Question]:
    questions = []
    for task in tasks:
        short = replace(task, rows=task.rows[: settings.evaluation.limit])
        rows = _readable(short.rows, tokenizer, settings, name=task.name, tell=tell)
        pool = RewardPool(task.reward, settings.rewards, folder=folder.root)
        questions.append(Question(short, rows, stack.enter_context(pool)))
    return questions


def _cluster(settings: TrainSettings, stack: ExitStack, *, tell: Tell) -> RunningCluster | None:
    if not settings.cluster.is_used:
        return None
    from sortedrl.build.cluster import opened_cluster

    return stack.enter_context(opened_cluster(settings, tell=tell))


def _source(settings: TrainSettings, parts: TrainingParts, meter: Meter) -> Source:
    journal = parts.loop.journal
    return Source(
        schedule=settings.schedule.name,
        slots=parts.engine.slots,
        update_batch=settings.schedule.update_batch,
        max_tokens=settings.engine.max_tokens,
        device=parts.trainer.device,
        decoded=lambda: journal.engine_decoded,
        seconds=parts.clock.seconds,
        figures=lambda: meter.run,
    )


def _replay(folder: RunFolder, saved: Saved | None, *, meter: Meter, view: View) -> None:
    """Show meter and view all that happened up to the checkpoint."""
    # A run that was stopped before it began has no events yet.
    if saved is None or not saved.state["events_bytes"]:
        return
    EventFile(folder.events, keep_bytes=saved.state["events_bytes"]).close()
    MetricsFile(folder.metrics, keep_bytes=saved.state["metrics_bytes"]).close()
    for event in read_events(folder.events):
        meter(event)
        view(event)
    for row in read_metrics(folder.metrics):
        view.updated(row)


def _logs(
    settings: TrainSettings,
    folder: RunFolder,
    saved: Saved | None,
    *,
    meter: Meter,
    tell: Tell,
) -> Logs:
    lengths = {} if saved is None else saved.state
    return Logs(
        events=EventFile(folder.events, keep_bytes=lengths.get("events_bytes"), is_watched=True),
        metrics=MetricsFile(folder.metrics, keep_bytes=lengths.get("metrics_bytes")),
        answers=AnswerFile(folder.answers, keep_bytes=lengths.get("answers_bytes")),
        trackers=open_trackers(
            settings.tracking,
            TrackedRun(
                folder=folder.root,
                settings=json.loads(json.dumps(asdict(settings), default=str)),
                resumed_step=None if saved is None else saved.state["run"]["updates"],
            ),
            warn=tell,
        ),
        meter=meter,
    )


def _evaluator(
    settings: TrainSettings, questions: Sequence[Question], parts: TrainingParts
) -> Evaluator:
    asked = settings.evaluation
    sampling = EvaluationSettings(samples=asked.samples, temperature=asked.temperature)
    return Evaluator(
        questions,
        parts.engine,
        text=parts.text,
        temperature=sampling.sampling_temperature,
        max_tokens=settings.engine.max_tokens,
        samples=asked.samples,
        seed=settings.seed,
    )
