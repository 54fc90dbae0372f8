"""A training run made ready to go: data, rewards, model, logs, in the order of what can go wrong.

What is wrong with rows, rewards or tokenizer shows before any weights are loaded, and what is
wrong with these before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sortedrl.config.data import EvaluationSettings
from sortedrl.config.parsing import settings_to_toml
from sortedrl.config.train import TrainSettings
from sortedrl.core.events import Event, EventFile, Finish, read_events
from sortedrl.core.files import AnswerFile, MetricsFile, Value, read_metrics
from sortedrl.core.meter import Meter
from sortedrl.data.catalogue import Task
from sortedrl.data.rows import Row
from sortedrl.data.stream import TokenizedRow, Tokenizer, tokenized
from sortedrl.environments.pool import EnvironmentPool, opened_rows
from sortedrl.errors import CheckpointError, ConfigError, DataError
from sortedrl.evaluation.runner import Question
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
from sortedrl.training.checkpoint import Checkpoints

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

    `on_row` is given the numbers of every update and evaluation from here on.
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
        saved = None
        is_begun = is_resumed and folder.holds_run
        if is_begun:
            stack.enter_context(folder.taken_up())
            saved = _saved(settings, folder, checkpoints, tell=tell)
        else:
            folder.refuse_second_run()
        if is_resumed and not is_begun:
            tell(f"{folder.root} holds no run to resume; starting a new one")
        tokenizer = tokenizer_of(settings.model)
        environments, task = _conversations(settings, task, tokenizer, stack)
        pool = None
        if environments is None or settings.environment.reward == "function":
            pool = RewardPool(task.reward, settings.rewards, folder=folder.root)
            stack.enter_context(pool)
        rows = _readable(task.rows, tokenizer, settings, name=task.name, tell=tell)
        data = identity_of(task)
        if saved is not None:
            _refuse_other_data(saved, data, name=settings.task, tell=tell)
        asked = _held_out(held_out, tokenizer, settings, folder, stack, tell=tell)
        watch = _Watch()
        parts = training_parts(
            settings,
            rows,
            tokenizer=tokenizer,
            pool=pool,
            environments=environments,
            record=watch,
            saved=saved,
            cluster=_cluster(settings, stack, tell=tell),
            held_out_tokens=max(
                (len(row.tokens) for q in asked.questions for row in q.rows), default=0
            ),
            tell=tell,
        )
        stack.callback(parts.close)
        config = settings_to_toml(settings, TrainSettings())
        if is_begun:
            folder.write(config)  # some settings may have changed
        else:
            facts = run_facts(parts.trainer.device)
            stack.enter_context(folder.begun(config, facts=facts))
        # Before the folder is unlocked.
        stack.callback(checkpoints.close)
        meter = Meter()
        view.watch(_source(settings, parts, meter))
        _replay(folder, saved, meter=meter, view=view)
        logs = _logs(settings, folder, saved, stack=stack, meter=meter, tell=tell)
        run = TrainingRun(
            settings=settings,
            parts=parts,
            tokenizer=tokenizer,
            folder=folder,
            logs=logs,
            checkpoints=checkpoints,
            evaluator=_evaluator(settings, asked, parts) if asked.questions else None,
            view=view,
            data=data,
            on_row=on_row,
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
        assert run is not None, "no event precedes the start of the run"
        run.logs.meter(event)
        run.logs.events(event)
        run.view(event)
        if isinstance(event, Finish):
            ready = run.parts.loop.buffer.num_harvestable
            run.show(f"{ready} answers ready, {event.running} being written")


def _saved(
    settings: TrainSettings, folder: RunFolder, checkpoints: Checkpoints, *, tell: Tell
) -> Saved | None:
    """The checkpoint to resume from; `None` where none was saved before the run ended."""
    newest = checkpoints.newest()
    if newest is None:
        if checkpoints.num_named:
            raise CheckpointError(
                f"{folder.checkpoints}: none of the {checkpoints.num_named} checkpoints is "
                "usable, for the reasons above; repair one, or start a new run (another --out)"
            )
        tell(f"{folder.root} has no complete checkpoint yet; starting from the beginning")
        return None
    saved = Saved.read(newest)
    if "settings" not in saved.state:
        raise CheckpointError(
            f"{newest}: was saved by an older version of sortedrl, without its settings; "
            "resume with that version, or start a new run from its model "
            f"(--model {newest / 'model'}, another --out)"
        )
    for words in refuse_other_settings(saved.state["settings"], settings):
        tell(f"resumed with a changed setting: {words}")
    tell(f"resuming from {newest}")
    return saved


def identity_of(task: Task) -> dict[str, Any]:
    """What a run must find again on resume, beside the prompts: golds, and how they are scored."""
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


def _refuse_other_data(saved: Saved, data: Mapping[str, Any], *, name: str, tell: Tell) -> None:
    before = saved.state["data"]
    advice = "resume with the original data and reward, or start a new run (another --out)"
    if before["fields"] != data["fields"]:
        raise CheckpointError(
            f"{saved.folder}: the rows of {name} are not those the run started with: their "
            f"answers or other fields have changed; {advice}"
        )
    for key in ("reward", "options"):
        if before[key] != data[key]:
            raise CheckpointError(
                f"{saved.folder}: answers must be scored as before, but the {key} of {name} was "
                f"{before[key]!r}, is {data[key]!r}; {advice}"
            )
    if before["reward_file"] != data["reward_file"]:
        tell(
            f"the file of the reward {data['reward']} has changed since the checkpoint; answers "
            "are scored with the new code from now on"
        )


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
            f"{name}: {found.num_too_long} of {len(rows)} prompts are skipped: "
            f"they are longer than {most} tokens"
        )
    return found.rows


def _conversations(
    settings: TrainSettings, task: Task, tokenizer: Tokenizer, stack: ExitStack
) -> tuple[EnvironmentPool | None, Task]:
    """The environments of a run, and its task with the prompts that they open with."""
    if not settings.environment.is_used:
        return None, task
    pool = environment_pool(settings.environment, tokenizer, data=settings.data)
    stack.enter_context(pool)
    rows = opened_rows(pool, task.rows)
    schedule = settings.schedule
    if schedule.mode == "coupled" and not schedule.never_interrupts and not pool.is_replayable:
        raise ConfigError(
            f"schedule.mode 'coupled' verifies turns and replays them, but the environment "
            f"{settings.environment.name!r} is not replayable; set schedule.mode to 'partial', "
            "'redraw' or 'on_policy'"
        )
    return pool, replace(task, rows=rows)


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """The held-out tasks, and the environments that answer in them."""

    questions: Sequence[Question] = ()
    environments: EnvironmentPool | None = None


def _held_out(
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    settings: TrainSettings,
    folder: RunFolder,
    stack: ExitStack,
    *,
    tell: Tell,
) -> _HeldOut:
    """What is asked between two updates.

    Its conversations have environments of their own: those of the training may be outside then.
    """
    if not tasks:
        return _HeldOut()
    environments = None
    if settings.environment.is_used:
        environments = environment_pool(settings.environment, tokenizer, data=settings.data)
        stack.enter_context(environments)
    questions = []
    for task in tasks:
        short = replace(task, rows=task.rows[: settings.evaluation.limit])
        if environments is not None:
            short = replace(short, rows=opened_rows(environments, short.rows))
        rows = _readable(short.rows, tokenizer, settings, name=task.name, tell=tell)
        pool = None
        if environments is None or settings.environment.reward == "function":
            pool = RewardPool(task.reward, settings.rewards, folder=folder.root)
            stack.enter_context(pool)
        questions.append(Question(short, rows, pool))
    return _HeldOut(questions, environments)


def _cluster(settings: TrainSettings, stack: ExitStack, *, tell: Tell) -> RunningCluster | None:
    if not settings.cluster.is_used:
        return None
    from sortedrl.runs.build_cluster import opened_cluster

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
    stack: ExitStack,
    meter: Meter,
    tell: Tell,
) -> Logs:
    lengths = {} if saved is None else saved.state
    kept = {name: lengths.get(f"{name}_bytes") for name in ("events", "metrics", "answers")}
    answers = stack.enter_context(closing(_answers(folder, kept["answers"], tell=tell)))
    metrics = MetricsFile(folder.metrics, keep_bytes=kept["metrics"])
    stack.enter_context(closing(metrics))
    events = EventFile(folder.events, keep_bytes=kept["events"], is_watched=True)
    stack.enter_context(closing(events))
    tracked = TrackedRun(
        folder=folder.root,
        settings=as_saved(settings),
        resumed_step=None if saved is None else saved.state["run"]["updates"],
    )
    trackers = open_trackers(settings.tracking, tracked, warn=tell)
    stack.callback(trackers.close)
    return Logs(events=events, metrics=metrics, answers=answers, trackers=trackers, meter=meter)


def _answers(folder: RunFolder, keep_bytes: int | None, *, tell: Tell) -> AnswerFile:
    """The answers as text; nothing is computed from them, so a run continues without older ones."""
    try:
        return AnswerFile(folder.answers, keep_bytes=keep_bytes)
    except DataError as error:
        if keep_bytes is None:
            raise
        if folder.answers.exists():
            folder.answers.rename(_free_name(folder.answers))
        tell(f"{error}. The run continues; its report shows the answers from here on")
        return AnswerFile(folder.answers)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}-older-{number}{path.suffix}") for number in count(1))
    return next(name for name in names if not name.exists())


def _evaluator(settings: TrainSettings, asked: _HeldOut, parts: TrainingParts) -> Evaluator:
    periodic = settings.evaluation
    sampling = EvaluationSettings(samples=periodic.samples, temperature=periodic.temperature)
    return Evaluator(
        asked.questions,
        parts.engine,
        text=parts.text,
        temperature=sampling.sampling_temperature,
        max_tokens=settings.engine.max_tokens,
        samples=periodic.samples,
        seed=settings.seed,
        environments=asked.environments,
    )
