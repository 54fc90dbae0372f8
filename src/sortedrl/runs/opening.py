"""Opens a training run: data, rewards, model and logs, with the cheapest checks first.

Errors in rows, rewards or tokenizer are raised before any weights are loaded, and errors of the
model before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sortedrl.config.data import EvaluationSettings
from sortedrl.config.parsing import settings_to_toml
from sortedrl.config.train import TrainSettings
from sortedrl.core.events import Event, EventFile, Finish, read_events
from sortedrl.core.files import AnswerFile, MetricsFile, Value, free_path, read_metrics
from sortedrl.core.meter import Meter
from sortedrl.data.catalogue import Task
from sortedrl.data.stream import TokenizedRow, Tokenizer, tokenized
from sortedrl.engines.sampling import Sampling
from sortedrl.environments.pool import EnvironmentPool, opened_rows
from sortedrl.errors import CheckpointError, ConfigError, DataError
from sortedrl.evaluation.runner import Question
from sortedrl.evaluation.tables import several
from sortedrl.models.shape import shape_of
from sortedrl.report.live import View
from sortedrl.report.live_state import Source
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.runs.build_engine import check_engine
from sortedrl.runs.build_training import Saved, TrainingParts, training_parts
from sortedrl.runs.folder import RunFolder, as_saved, refuse_other_settings, run_facts
from sortedrl.runs.output import TrackedRun, open_trackers
from sortedrl.runs.tasks import environment_pool, threads, tokenizer_of
from sortedrl.runs.training import Counters, Evaluator, Logs, TrainingRun
from sortedrl.training.checkpoint import Checkpoints, read_state

if TYPE_CHECKING:
    from sortedrl.runs.build_cluster import RunningCluster

Tell = Callable[[str], None]


@contextmanager
def opened_run(
    settings: TrainSettings,
    *,
    task: Task,
    held_out: Sequence[Task],
    is_resumed: bool,
    view: View,
    on_row: Callable[[Mapping[str, Value]], None] = lambda row: None,
) -> Iterator[TrainingRun]:
    """A run that is ready to start; its resources are released afterwards.

    `on_row` is called with the metrics of every update and evaluation.
    """
    tell = view.tell
    settings.tracking.check_installed()
    check_engine(settings.rollout)
    folder = RunFolder(settings.out)
    checkpoints = Checkpoints(
        folder.checkpoints,
        keep_last=settings.saving.keep_last,
        keep_best=settings.saving.keep_best,
        warn=tell,
    )
    with ExitStack() as stack:
        stack.enter_context(threads(settings.threads, workers=settings.rewards.num_workers))
        stack.enter_context(folder.left_as_found())
        opening = _Opening(settings, folder, stack, tell=tell)
        saved = None
        is_begun = is_resumed and folder.holds_run
        if is_begun:
            stack.enter_context(folder.reopened())
            saved = opening.saved(checkpoints)
        else:
            folder.refuse_second_run()
        if is_resumed and not is_begun:
            tell(f"{folder.root} holds no run to resume; starting a new one")
        environments, task = opening.conversations(task)
        pool = opening.rewards(task)
        rows = opening.tokenized_rows(task)
        data = identity_of(task)
        if saved is not None:
            opening.refuse_other_data(saved, data)
        evaluated = opening.held_out(held_out)
        sink = _EventSink()
        parts = training_parts(
            settings,
            rows,
            tokenizer=opening.tokenizer,
            pool=pool,
            environments=environments,
            record=sink,
            saved=saved,
            cluster=opening.cluster(),
            held_out_tokens=max(
                (len(row.tokens) for q in evaluated.questions for row in q.rows), default=0
            ),
            tell=tell,
        )
        stack.callback(parts.close)
        config = settings_to_toml(settings, TrainSettings())
        if is_begun:
            folder.write(config)  # some settings may have changed
        else:
            facts = run_facts(parts.trainer.device)
            stack.enter_context(folder.created(config, facts=facts))
        # Before the folder is unlocked.
        stack.callback(checkpoints.close)
        meter = Meter()
        view.watch(_source(settings, parts, meter))
        _replay(folder, saved, meter=meter, view=view)
        run = TrainingRun(
            settings=settings,
            parts=parts,
            tokenizer=opening.tokenizer,
            folder=folder,
            logs=opening.logs(saved, meter),
            checkpoints=checkpoints,
            evaluator=_evaluator(settings, evaluated, parts) if evaluated.questions else None,
            view=view,
            data=data,
            on_row=on_row,
            counters=Counters() if saved is None else Counters.from_json(saved.state["run"]),
        )
        sink.run = run
        yield run


class _EventSink:
    """Records events, and shows them in the view."""

    def __init__(self) -> None:
        self.run: TrainingRun | None = None

    def __call__(self, event: Event) -> None:
        run = self.run
        assert run is not None, "no event precedes the start of the run"
        run.logs.meter(event)
        run.logs.events(event)
        run.view(event)
        if isinstance(event, Finish):
            ready = run.parts.loop.buffer.num_harvestable
            run.show(f"{several(ready, 'answer')} ready, {event.running} being generated")


def identity_of(task: Task) -> dict[str, Any]:
    """What must be the same on resume, besides the prompts: gold answers, and their scoring."""
    digest = hashlib.sha256()
    for row in task.rows:
        digest.update(repr(sorted(row.fields.items())).encode(errors="surrogatepass"))
    place = Path(task.reward.place)
    is_file = place.suffix == ".py" and place.is_file()
    return {
        "fields": digest.hexdigest(),
        "reward": task.reward.function,
        "options": {name: repr(value) for name, value in sorted(task.reward.options.items())},
        "reward_file": hashlib.sha256(place.read_bytes()).hexdigest() if is_file else None,
    }


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """The held-out tasks, and the environments of their conversations."""

    questions: Sequence[Question] = ()
    environments: EnvironmentPool | None = None


class _Opening:
    """Opens what a run needs before its parts are built."""

    def __init__(
        self, settings: TrainSettings, folder: RunFolder, stack: ExitStack, *, tell: Tell
    ) -> None:
        self._settings, self._folder, self._stack, self._tell = settings, folder, stack, tell

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self._settings.model)

    def saved(self, checkpoints: Checkpoints) -> Saved | None:
        """The checkpoint to resume from; `None` where none was saved before the run ended."""
        newest, folder = checkpoints.newest(), self._folder
        if newest is None:
            if checkpoints.num_named:
                raise CheckpointError(
                    f"{folder.checkpoints}: none of the {checkpoints.num_named} checkpoints is "
                    "usable, for the reasons above; repair one, or start a new run (another --out)"
                )
            if folder.model.exists():
                raise CheckpointError(
                    f"{folder.root}: a run must have a checkpoint to resume from, but this one has "
                    "only its trained model: it is a run of sortedrl sft, or its checkpoints were "
                    f"deleted; train the model further in a new run (--model {folder.model}, and "
                    "another --out)"
                )
            self._tell(f"{folder.root} has no complete checkpoint yet; starting from the beginning")
            return None
        saved = Saved(newest, read_state(newest))
        for change in refuse_other_settings(saved.state["settings"], self._settings):
            self._tell(f"resumed with a changed setting: {change}")
        self._tell(f"resuming from {newest}")
        return saved

    def refuse_other_data(self, saved: Saved, data: Mapping[str, Any]) -> None:
        before, name = saved.state["data"], self._settings.task
        advice = "resume with the original data and reward, or start a new run (another --out)"
        if before["fields"] != data["fields"]:
            raise CheckpointError(
                f"{saved.folder}: the rows of {name} are not those the run started with: their "
                f"answers or other fields have changed; {advice}"
            )
        for key in ("reward", "options"):
            if before[key] != data[key]:
                raise CheckpointError(
                    f"{saved.folder}: answers must be scored as before, but the {key} of {name} "
                    f"was {before[key]!r}, is {data[key]!r}; {advice}"
                )
        if before["reward_file"] != data["reward_file"]:
            self._tell(
                f"the file of the reward {data['reward']} has changed since the checkpoint; "
                "answers are scored with the new code from now on"
            )

    def tokenized_rows(self, task: Task) -> Sequence[TokenizedRow]:
        """The rows whose prompts leave room for an answer, as token ids."""
        settings, most = self._settings, shape_of(self._settings.model).context - 1
        if settings.max_prompt_tokens is not None:
            most = min(most, settings.max_prompt_tokens)
        chat = settings.data.chat
        found = tokenized(task.rows, self.tokenizer, chat=chat, max_prompt_tokens=most)
        if found.num_too_long:
            self._tell(
                f"{task.name}: {found.num_too_long} of {len(task.rows)} prompts are skipped: "
                f"they are longer than {most} tokens"
            )
        return found.rows

    def rewards(self, task: Task) -> RewardPool | None:
        """The pool that scores a task; `None` where the environments do."""
        if self._settings.environment.gives_rewards:
            return None
        pool = RewardPool(task.reward, self._settings.rewards, folder=self._folder.root)
        return self._stack.enter_context(pool)

    def environments(self) -> EnvironmentPool | None:
        """A pool of environments; `None` where answers are not conversations."""
        settings = self._settings
        if not settings.environment.is_used:
            return None
        pool = environment_pool(settings.environment, self.tokenizer, data=settings.data)
        return self._stack.enter_context(pool)

    def conversations(self, task: Task) -> tuple[EnvironmentPool | None, Task]:
        """The environments of a run, and its task with their opening prompts."""
        pool, schedule = self.environments(), self._settings.schedule
        if pool is None:
            return None, task
        rows = opened_rows(pool, task.rows)
        if schedule.mode == "coupled" and not schedule.never_interrupts and not pool.is_replayable:
            raise ConfigError(
                f"schedule.mode 'coupled' verifies turns and replays them, but the environment "
                f"{self._settings.environment.name!r} is not replayable; set schedule.mode to "
                "'partial', 'redraw' or 'on_policy'"
            )
        return pool, replace(task, rows=rows)

    def held_out(self, tasks: Sequence[Task]) -> _HeldOut:
        """The tasks of the evaluations during training.

        Their conversations have a pool of their own: those of the training may still be open.
        """
        environments = self.environments() if tasks else None
        questions = []
        for task in tasks:
            short = replace(task, rows=task.rows[: self._settings.evaluation.limit])
            if environments is not None:
                short = replace(short, rows=opened_rows(environments, short.rows))
            rows = self.tokenized_rows(short)
            questions.append(Question(short, rows, self.rewards(task)))
        return _HeldOut(questions, environments)

    def cluster(self) -> RunningCluster | None:
        if not self._settings.cluster.is_used:
            return None
        from sortedrl.runs.build_cluster import opened_cluster

        return self._stack.enter_context(opened_cluster(self._settings, tell=self._tell))

    def logs(self, saved: Saved | None, meter: Meter) -> Logs:
        settings, folder, stack = self._settings, self._folder, self._stack
        lengths = {} if saved is None else saved.state
        kept = {name: lengths.get(f"{name}_bytes") for name in ("events", "metrics", "answers")}
        answers = stack.enter_context(closing(self._answers(kept["answers"])))
        metrics = MetricsFile(folder.metrics, keep_bytes=kept["metrics"])
        stack.enter_context(closing(metrics))
        events = EventFile(folder.events, keep_bytes=kept["events"], is_watched=True)
        stack.enter_context(closing(events))
        tracked = TrackedRun(
            folder=folder.root,
            settings=as_saved(settings),
            resumed_step=None if saved is None else saved.state["run"]["updates"],
        )
        trackers = open_trackers(settings.tracking, tracked, warn=self._tell)
        stack.callback(trackers.close)
        return Logs(events=events, metrics=metrics, answers=answers, trackers=trackers, meter=meter)

    def _answers(self, keep_bytes: int | None) -> AnswerFile:
        """The log of answers; a run continues without older ones, since nothing depends on them."""
        path = self._folder.answers
        try:
            return AnswerFile(path, keep_bytes=keep_bytes)
        except DataError as error:
            if keep_bytes is None:
                raise
            if path.exists():
                names = (f"answers-older-{number}.jsonl" for number in count(1))
                path.rename(free_path(self._folder.root, names))
            self._tell(f"{error}. The run continues; its report shows the answers from here on")
            return AnswerFile(path)


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
    """Replay the events up to the checkpoint into meter and view."""
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


def _evaluator(settings: TrainSettings, held_out: _HeldOut, parts: TrainingParts) -> Evaluator:
    periodic = settings.evaluation
    drawn = EvaluationSettings(samples=periodic.samples, temperature=periodic.temperature)
    max_tokens = settings.engine.max_tokens
    return Evaluator(
        questions=held_out.questions,
        engine=parts.engine,
        text=parts.text,
        sampling=Sampling(temperature=drawn.sampling_temperature, max_tokens=max_tokens),
        samples=periodic.samples,
        seed=settings.seed,
        environments=held_out.environments,
    )
