"""`sortedrl eval`: evaluates models on tasks, with confidence intervals, and compares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.config.checks import (
    PositiveFloat,
    PositiveInt,
    check_device,
    require,
    require_native,
)
from sortedrl.config.data import (
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    RewardSettings,
)
from sortedrl.config.parsing import options_from
from sortedrl.core.files import refuse_foreign
from sortedrl.data.catalogue import Task, reward_from
from sortedrl.environments.builtin import environment_source
from sortedrl.errors import ConfigError
from sortedrl.evaluation.comparison import Comparison, compare
from sortedrl.evaluation.results import PAGE, SAMPLES, read_results, refuse_answers
from sortedrl.evaluation.statistics import Evaluation, Summary, summarise
from sortedrl.evaluation.tables import (
    Table,
    comparison_rows,
    comparison_table,
    summary_rows,
    summary_table,
)
from sortedrl.models.shape import refuse_wrong_path
from sortedrl.report.evaluation import evaluation_page, notes
from sortedrl.report.terminal import PAGE as PAGE_MARK
from sortedrl.report.terminal import one_line, refuse_unwritable_folder, table, tell, write_text
from sortedrl.runs.evaluate import EvaluationPlan, evaluated, write_page
from sortedrl.runs.tasks import opened, with_options

HELP = """Evaluate models on tasks: mean@k, pass@k, per level, with confidence intervals.

  sortedrl eval MODEL --tasks gsm8k math500 --samples 4     a hub name, a folder or a GGUF file
  sortedrl eval MODEL --tasks knights_knaves:people=3-7,count=500
  sortedrl eval MODEL --tasks mine.jsonl --reward my_module:my_reward
  sortedrl eval BEFORE AFTER --tasks gsm8k                  both, compared by paired bootstrap
  sortedrl eval MODEL --tasks rows.jsonl --environment calculator     conversations
  sortedrl eval evals/before evals/after                    compare saved evaluations

Tasks with splits are evaluated on test, unless the task names a split: gsm8k:split=train.
Answers are saved as they are generated (samples.jsonl). --resume continues an interrupted
evaluation; it may ask for more samples, rows and tasks, but not for fewer.
Tasks: sortedrl data --help.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to evaluate, and on which tasks."""

    models: tyro.conf.Positional[tuple[str, ...]]
    """Models (hub name, folder, GGUF file), or folders of earlier evaluations."""
    tasks: tuple[str, ...] = ()
    """Tasks: name, or name:option=value,option=value; or files and hub names with --reward."""
    folder: Path | None = None
    """Folder with data set files; by default $SORTEDRL_DATA, and then the hub."""
    reward: str | None = None
    """A reward for all tasks instead of their own: my_module:my_function or my_file.py:..."""
    reward_options: tuple[str, ...] = ()
    """Keyword arguments of the reward, written name=value, such as right=3 unparsable=-1."""
    environment: str | None = None
    """Evaluate conversations with this environment: a built-in one, or my_file.py:Class."""
    environment_arguments: tuple[str, ...] = ()
    """Keyword arguments of the environment, written name=value."""
    environment_reward: Literal["environment", "function"] = "environment"
    """Which reward a conversation gets. environment: that of the environment. function: that of the
    task or of --reward."""
    max_turns: PositiveInt = 16
    """Turns of the model after which a conversation is cut off."""
    reply_seconds: PositiveFloat = 10.0
    """Timeout of one reply of the environment."""
    out: Path = Path("evals")
    """Where results are saved: a folder for each model."""
    resume: bool = False
    """Continue an evaluation that was interrupted."""
    device: str | None = None
    """cuda, cpu, ...; by default the GPU if there is one."""
    json: bool = False
    """Print one JSON object instead of tables."""
    settings: EvaluationSettings = field(default_factory=EvaluationSettings)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    data: DataSettings = field(default_factory=DataSettings)


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl eval", description=HELP)
    require(bool(given.models), "give at least one model; see sortedrl eval --help")
    check_device(given.device)
    labels = _labels(given.models)
    is_saved = [_is_saved(model) for model in given.models]
    if not all(is_saved):
        require_native("sortedrl eval")
    refuse_unwritable_folder(given.out)
    pages = [given.out / f"{labels[0]}-and-{label}.html" for label in labels[1:]]
    pages += [
        given.out / label / PAGE for label, saved in zip(labels, is_saved, strict=True) if not saved
    ]
    for path in pages:
        refuse_foreign(path, mark=PAGE_MARK)
    # Check every model before the first one is evaluated.
    for model, label, saved in zip(given.models, labels, is_saved, strict=True):
        if not saved:
            refuse_wrong_path(model)
            if not given.resume:
                refuse_answers(given.out / label)
    plan = None if all(is_saved) else _plan(given)
    evaluations = [
        replace(read_results(Path(model)), label=label)
        if saved or plan is None
        else _evaluated(given, plan, model, label)
        for model, label, saved in zip(given.models, labels, is_saved, strict=True)
    ]
    summaries = [summarise(evaluation) for evaluation in evaluations]
    comparisons = [compare(evaluations[0], other) for other in evaluations[1:]]
    for other, comparison in zip(evaluations[1:], comparisons, strict=True):
        path = given.out / f"{evaluations[0].label}-and-{other.label}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, evaluation_page([evaluations[0], other], comparison))
    if given.json:
        print(json.dumps(_as_json(evaluations, summaries, comparisons), indent=2))
    else:
        _print(evaluations, summaries, comparisons)


def _tasks(given: Arguments) -> list[Task]:
    require(bool(given.tasks), "give at least one task with --tasks; see sortedrl data --help")
    reward = None if given.reward is None else reward_from(given.reward)
    if _environment(given).gives_rewards:
        require(
            reward is None,
            f"the environment {given.environment!r} gives the rewards, so --reward is not used, "
            f"got {given.reward!r}; leave it out, or add --environment-reward function",
        )
        reward = environment_source(_environment(given))
    tasks = [
        opened(spec, split="test", folder=given.folder, reward=reward, data=given.data)
        for spec in given.tasks
    ]
    if len({task.name for task in tasks}) < len(tasks):
        raise ConfigError(f"each task can be given once, got {', '.join(given.tasks)}")
    options = options_from(given.reward_options)
    return [
        replace(with_options(task, options), rows=task.rows[: given.settings.limit])
        for task in tasks
    ]


def _evaluated(given: Arguments, plan: EvaluationPlan, model: str, label: str) -> Evaluation:
    folder = given.out / label
    tell(f"{folder}: loading {one_line(model)}")
    evaluation = evaluated(model, plan, label=label, folder=folder, is_resumed=given.resume)
    write_page(evaluation, folder)
    return evaluation


def _plan(given: Arguments) -> EvaluationPlan:
    return EvaluationPlan(
        tasks=_tasks(given),
        settings=given.settings,
        rewards=given.rewards,
        data=given.data,
        device=given.device,
        environment=_environment(given),
        described=_described(given),
    )


def _environment(given: Arguments) -> EnvironmentSettings:
    return EnvironmentSettings(
        name=given.environment,
        arguments=given.environment_arguments,
        reward=given.environment_reward,
        max_turns=given.max_turns,
        reply_seconds=given.reply_seconds,
    )


def _described(given: Arguments) -> dict[str, object]:
    """Everything that answers and scores depend on; rows and samples may grow later."""
    return {
        "temperature": given.settings.sampling_temperature,
        "top_p": given.settings.top_p,
        "max_tokens": given.settings.max_tokens,
        "seed": given.settings.seed,
        "chat": given.data.chat,
        "system": given.data.system,
        "reward": given.reward,
        "reward_options": list(given.reward_options),
        **_environment(given).described,
    }


def _print(
    evaluations: Sequence[Evaluation],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
) -> None:
    for evaluation, summary in zip(evaluations, summaries, strict=True):
        print(one_line(evaluation.label))
        _table(summary_table(summary))
        for note in notes(evaluation, summary):
            print(one_line(f"note: {note}"))
        print()
    for comparison in comparisons:
        print(one_line(f"{comparison.before} vs {comparison.after}, paired by prompt"))
        _table(comparison_table(comparison))
        print()


def _table(shown: Table) -> None:
    (first, _, *columns), lines = shown
    rows = [[f"  {level}" if level else task, *numbers] for task, level, *numbers in lines]
    table([first, *columns], rows)


def _as_json(
    evaluations: Sequence[Evaluation],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
) -> dict[str, object]:
    return {
        "evaluations": [
            {"label": evaluation.label, "rows": summary_rows(summary)}
            for evaluation, summary in zip(evaluations, summaries, strict=True)
        ],
        "comparisons": [
            {"before": c.before, "after": c.after, "rows": comparison_rows(c)} for c in comparisons
        ],
    }


def _is_saved(model: str) -> bool:
    return (Path(model) / SAMPLES).exists()


def _labels(models: Sequence[str]) -> list[str]:
    """Short unique names of the models: as many trailing path parts as it takes.

    The model of a run is in a folder `model`, so its label includes the run's name.
    """
    parts = [
        [part for part in Path(model).parts if part not in ("/", "..", ".")] for model in models
    ]
    for length in range(1, max(len(part) for part in parts) + 1):
        labels = [
            "-".join(part[-length - (part[-1:] == ["model"]) :]).removesuffix(".gguf")
            for part in parts
        ]
        if len(set(labels)) == len(labels):
            return labels
    raise ConfigError(f"each model can be given once, got {', '.join(models)}")
