"""Training and evaluation from Python: `sortedrl.train`, `sortedrl.evaluate`, and their results.

    run = sortedrl.train("Qwen/Qwen2.5-0.5B-Instruct", rows, reward)

They are the commands `sortedrl train` and `sortedrl eval`, with the same settings, defaults and
errors. Python objects are written to the folder of the run, under `inputs`, so that the folder is
complete; only a reward that no other process can import stays an object.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sortedrl.config.checks import require, require_native
from sortedrl.config.data import (
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    RewardSettings,
)
from sortedrl.config.parsing import flat, nested, read_toml, settings_over, settings_with
from sortedrl.config.sizes import Chosen, changed_names, settings_of_file, with_siblings
from sortedrl.config.train import TrainSettings
from sortedrl.core.files import Value, free_path, read_metrics
from sortedrl.data.catalogue import reward_from
from sortedrl.data.rows import records_from, rows_of, write_records
from sortedrl.environments.builtin import environment_source
from sortedrl.errors import ConfigError, ModelError
from sortedrl.evaluation.statistics import Answer, Evaluation, Summary, summarise
from sortedrl.evaluation.tables import summary_rows, summary_table
from sortedrl.report.page import runs_page
from sortedrl.report.record import read_runs
from sortedrl.report.terminal import refuse_unwritable_folder, write_text
from sortedrl.rewards.functions import OBJECT, RewardSource, source_of_object
from sortedrl.runs.evaluate import EvaluationPlan, evaluated, write_page
from sortedrl.runs.folder import RunFolder, settings_at
from sortedrl.runs.output import show_page
from sortedrl.runs.start import Callback
from sortedrl.runs.start import train as train_run
from sortedrl.runs.tasks import opened
from sortedrl.simulate.calls import html_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sortedrl.runs.training import Ending

Config = TrainSettings | Mapping[str, Any] | str | Path
"""All settings: as an object, as tables such as `{"lora": {"rank": 8}}`, or a TOML file."""
Reward = str | Callable[..., object] | Sequence[Callable[..., object]]
"""A function of (prompt, response), several of them, or text as on the command line."""
Rows = str | Path | Iterable[object]
"""A task's name, a file or a hub name; or rows: dicts, a `datasets.Dataset`, any iterable."""


def train(
    model: str | Path | PreTrainedModel,
    rows: Rows,
    reward: Reward | None = None,
    *,
    algorithm: str | None = None,
    mode: str | None = None,
    lookahead: int | None = None,
    learning_rate: float | None = None,
    samples: int | None = None,
    slots: int | None = None,
    max_tokens: int | None = None,
    engine: str | None = None,
    out: str | Path | None = None,
    eval_rows: Rows | None = None,
    callbacks: Sequence[Callback] = (),
    epochs: int | None = None,
    seed: int | None = None,
    prompt_field: str | None = None,
    config: Config | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Run:
    """Train a model with rewards, its rollouts scheduled by length; waits until the run ends.

    The reward may be left out for tasks that have one of their own. `samples` are answers per
    prompt, `prompt_field` is the column with the question, `config` has every other setting.
    Without `out` every call makes a new folder: runs/train, runs/train-2 and so on. Each callback
    is given the numbers of every update; one that returns "stop" ends the run. A model object is
    copied, and needs its tokenizer.
    """
    require_native("training")
    base, chosen = _settings(config)
    arguments = {
        "algorithm.name": algorithm,
        "schedule.mode": mode,
        "schedule.lookahead": lookahead,
        "schedule.samples_per_prompt": samples,
        "engine.slots": slots,
        "engine.max_tokens": max_tokens,
        "rollout.engine": engine,
        "optimiser.learning_rate": learning_rate,
        "data.prompt_field": prompt_field,
        "epochs": epochs,
        "seed": seed,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    chosen |= frozenset(given)
    tables = with_siblings(nested(given), chosen=chosen)
    source = None if reward is None else _source(reward)
    if source is not None:
        tables["reward"] = source.function
    folder = _folder(out, base, is_chosen="out" in chosen)
    refuse_unwritable_folder(folder)
    tables["out"] = str(folder)
    with _inputs(folder) as inputs:
        data = settings_with(base, tables).data
        tables["task"] = _task(rows, inputs / "rows.jsonl", data=data)
        if eval_rows is not None:
            spec = _task(eval_rows, inputs / "eval_rows.jsonl", data=data)
            tables["evaluation"] = {"tasks": [spec]}
        tables["model"] = _model(model, inputs, tokenizer)
        settings = settings_with(base, tables)
        run = Run(folder, reward=source, callbacks=callbacks)
        run.ending = train_run(
            settings, chosen=chosen, reward=_only_here(source), callbacks=callbacks
        )
    return run


class Run:
    """A training run and its folder: numbers, model, report, and how to resume it."""

    def __init__(
        self,
        folder: str | Path,
        *,
        reward: Reward | RewardSource | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """The run in a folder; a reward that was a Python object must be given to resume it."""
        self.folder = Path(folder)
        """The folder of the run."""
        self.ending: Ending | None = None
        """How it ended; `None` for a run that was opened from its folder."""
        self._reward = reward
        self._callbacks = callbacks
        self._model: PreTrainedModel | None = None

    @property
    def metrics(self) -> list[dict[str, Value]]:
        """One row for every update and every evaluation, as in metrics.jsonl."""
        path = RunFolder(self.folder).metrics
        return read_metrics(path) if path.exists() else []

    @property
    def settings(self) -> TrainSettings:
        """Every setting, as resolved."""
        config = RunFolder(self.folder).config
        settings = settings_over(
            TrainSettings(), read_toml(config), path=config, takes_old_keys=True
        )
        return settings_at(settings, self.folder)

    @property
    def trained_folder(self) -> Path:
        """The folder of the trained model; an error for a run that has not finished."""
        folder = RunFolder(self.folder).model
        if not folder.exists():
            raise ModelError(
                f"{self.folder} has no trained model yet: the run has not finished; continue it "
                "with run.resume()"
            )
        return folder

    @property
    def model(self) -> PreTrainedModel:
        """The trained model, on the device of the run."""
        if self._model is None:
            from sortedrl.models.loading import load_model

            self._model = load_model(self.trained_folder, dtype=None, device=self.settings.device)
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the trained model."""
        from sortedrl.models.loading import load_tokenizer

        tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.trained_folder)
        return tokenizer

    def report(self) -> Path:
        """Write the page that shows the run, and show it under the cell of a notebook."""
        page = runs_page(read_runs([self.folder]), title=self.folder.name)
        path = self.folder / "report.html"
        write_text(path, page)
        show_page(page)
        return path

    def resume(
        self,
        *,
        epochs: int | None = None,
        max_updates: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> Run:
        """Resume from the newest checkpoint, until `epochs` in all or `max_updates` in all."""
        if not RunFolder(self.folder).holds_run:
            raise ConfigError(f"{self.folder} holds no run to resume; check the path")
        settings = self.settings
        given = {"epochs": epochs, "max_updates": max_updates}
        settings = settings_with(settings, {k: v for k, v in given.items() if v is not None})
        source = self._reward
        if source is not None and not isinstance(source, RewardSource):
            source = _source(source)
        if source is None and settings.reward is not None:
            source = reward_from(settings.reward)  # says what is missing where it was an object
        self._model = None
        if callbacks is not None:
            self._callbacks = callbacks
        self.ending = train_run(
            settings, is_resumed=True, reward=_only_here(source), callbacks=self._callbacks
        )
        return self

    def __repr__(self) -> str:
        """The folder, and how far the run has come."""
        rows = [row for row in self.metrics if "reward/mean" in row]
        last = (
            f", {rows[-1]['update']} updates, reward {rows[-1]['reward/mean']:.3f}" if rows else ""
        )
        is_stopped = self.ending is not None and self.ending.reason == "asked"
        stopped = "; stopped, resume() continues" if is_stopped else ""
        return f"Run({str(self.folder)!r}{last}{stopped})"


def evaluate(
    model: str | Path | PreTrainedModel | Run,
    rows: Rows,
    reward: Reward | None = None,
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_tokens: int = 1024,
    slots: int = 32,
    limit: int | None = None,
    seed: int = 0,
    prompt_field: str = "prompt",
    environment: str | EnvironmentSettings | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Evaluated:
    """How good a model is on rows or a task: the share of right answers, with its interval.

    With an `environment`, by its name or its settings, every answer is a conversation.
    The answers and a page that shows them are kept in `out`, if it is given.
    """
    require_native("evaluation")
    settings = EvaluationSettings(
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        slots=slots,
        limit=limit,
        seed=seed,
    )
    data = DataSettings(prompt_field=prompt_field)
    talk = environment if environment is not None else EnvironmentSettings()
    talk = EnvironmentSettings(name=talk) if isinstance(talk, str) else talk
    source = None if reward is None else _source(reward)
    if talk.gives_rewards:
        require(
            source is None,
            f"the environment {talk.name!r} gives the rewards, so no reward function is used, but "
            "one was given; leave it out, or give EnvironmentSettings(..., reward='function')",
        )
        source = environment_source(talk)
    with TemporaryDirectory(prefix="sortedrl-") as scratch:
        inputs = Path(scratch)
        if isinstance(model, Run):
            model = model.trained_folder
        name = _model(model, inputs, tokenizer)
        spec = _task(rows, inputs / "rows.jsonl", data=data)
        task = opened(spec, split="test", folder=None, reward=source, data=data)
        label = task.name if isinstance(rows, str | Path) else "rows"
        task = replace(task, name=label, rows=task.rows[:limit])
        plan = EvaluationPlan(
            tasks=[task],
            settings=settings,
            rewards=RewardSettings(),
            data=data,
            device=device,
            environment=talk,
            described={
                "seed": seed,
                "temperature": settings.sampling_temperature,
                **talk.described,
            },
        )
        folder = Path(out) if out is not None else inputs / "results"
        evaluation = evaluated(name, plan, label=Path(name).name, folder=folder, is_resumed=False)
        if out is not None:
            write_page(evaluation, folder)
    return Evaluated(evaluation, summarise(evaluation))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The answers of a model, and their statistics."""

    evaluation: Evaluation
    summary: Summary

    @property
    def score(self) -> float:
        """The share of right answers."""
        return self.summary.parts[0].mean.value

    @property
    def interval(self) -> tuple[float, float]:
        """Where the score lies with 95 % confidence."""
        mean = self.summary.parts[0].mean
        return mean.low, mean.high

    @property
    def reward(self) -> float | None:
        """The mean reward; `None` where no answer could be scored."""
        return self.summary.parts[0].reward

    @property
    def answers(self) -> Sequence[Answer]:
        """Every answer with its reward."""
        return self.evaluation.answers

    @property
    def rows(self) -> list[dict[str, object]]:
        """The numbers, one row for each level and for all together."""
        return summary_rows(self.summary)

    def __repr__(self) -> str:
        """The score with its interval, and the mean reward where that is another number."""
        low, high = self.interval
        is_other = self.reward is not None and self.reward != self.score
        reward = f", reward={self.reward:.3f}" if is_other else ""
        return f"Evaluated(score={self.score:.3f}, interval=({low:.3f}, {high:.3f}){reward})"

    def _repr_html_(self) -> str:
        """A table, as notebooks show it."""
        columns, lines = summary_table(self.summary)
        return html_table(columns, lines)


def _settings(config: Config | None) -> tuple[TrainSettings, Chosen]:
    """The base settings, and which of them were chosen."""
    if config is None:
        return TrainSettings(), frozenset()
    if isinstance(config, TrainSettings):
        return config, changed_names(config)
    if isinstance(config, Mapping):
        settings = settings_with(TrainSettings(), with_siblings(config))
        return settings, frozenset(flat(config))
    if not isinstance(config, str | Path):
        raise ConfigError(
            "config must be a TrainSettings, a dict such as {'lora': {'rank': 8}}, or the path of "
            f"a TOML file, got {config!r:.80}"
        )
    return settings_of_file(Path(config))


def _source(reward: Reward) -> RewardSource:
    return reward_from(reward) if isinstance(reward, str) else source_of_object(reward)


def _only_here(source: RewardSource | None) -> RewardSource | None:
    """The reward, if settings cannot name it."""
    return source if source is not None and source.function.startswith(OBJECT) else None


def _folder(out: str | Path | None, base: TrainSettings, *, is_chosen: bool) -> Path:
    """The folder of a new run: the given one, or a free one."""
    if out is None and not is_chosen:
        numbered = (f"{base.out.name}-{number}" for number in count(2))
        return free_path(base.out.parent, chain([base.out.name], numbered))
    folder = base.out if out is None else Path(out)
    if RunFolder(folder).holds_run:
        raise ConfigError(
            f"{folder} already holds a run; resume it (sortedrl.Run({str(folder)!r}).resume()), "
            "choose another out, or omit out to get a new folder each time"
        )
    return folder


@contextmanager
def _inputs(folder: Path) -> Iterator[Path]:
    """A folder for inputs that are objects; removed if no run starts."""
    with RunFolder(folder).left_as_found():
        inputs = RunFolder(folder).inputs
        if inputs.exists():
            raise ConfigError(
                f"{inputs} exists but does not belong to a run; move it, or choose another out"
            )
        try:
            yield inputs
        except BaseException:
            if not RunFolder(folder).holds_run:
                shutil.rmtree(inputs, ignore_errors=True)
            raise


def _model(
    model: str | Path | PreTrainedModel,
    inputs: Path,
    tokenizer: PreTrainedTokenizerBase | None,
) -> str:
    """The name of the model; an object is saved first."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"a tokenizer is given with a model object only, and {str(model)!r} brings its "
                "own; leave tokenizer out, or save yours into the folder of the model "
                "(tokenizer.save_pretrained)"
            )
        return str(model)
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            "model must be a hub name, a folder, a GGUF file, 'tiny' or a transformers model, got "
            f"{type(model).__name__}; of a PEFT model pass model.merge_and_unload(), and of a run "
            "run.trained_folder"
        )
    from sortedrl.models.loading import without_bars

    if tokenizer is None:
        tokenizer = _own_tokenizer(model)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            "tokenizer must be a tokenizer of transformers, got "
            f"{tokenizer!r:.80}; give AutoTokenizer.from_pretrained(...)"
        )
    folder = inputs / "model"
    folder.mkdir(parents=True)
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    from sortedrl.models.loading import load_tokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(model.name_or_path or "")
    except ModelError as error:
        raise ConfigError(
            "a model object needs its tokenizer, but "
            + (f"{model.name_or_path!r} has none" if model.name_or_path else "it has no name")
            + "; pass tokenizer=..."
        ) from error
    return tokenizer


def _task(rows: Rows, path: Path, *, data: DataSettings) -> str:
    """The spec of a task; rows that are objects are written to `path` first."""
    if isinstance(rows, str | Path):
        return str(rows)
    if not isinstance(rows, Iterable):
        raise ConfigError(
            "rows must be a list of dicts, a Dataset, a path, or the name of a task, got "
            f"{rows!r:.80}"
        )
    records = list(records_from(rows))
    if not records:
        raise ConfigError("rows must hold at least one row, got none")
    for _ in rows_of(records, data):  # what is wrong is named by the row, not by a file of ours
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(records, path)
    return str(path)
