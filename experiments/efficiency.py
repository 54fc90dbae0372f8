"""The efficiency table: every schedule on a real engine, with real updates and forced lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from experiments.trials import Setup, Trial
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.meter import length_bias, numbers
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import Simulation

if TYPE_CHECKING:
    from experiments.bench_world import BenchWorld, Measured

_MARGIN = 1.1
_PROMPT_TOKENS = 192


def trials(setup: Setup) -> list[Trial]:
    """One trial for each model and schedule; a model is loaded with its first trial."""
    found = []
    for model in setup.settings["run"]:
        about = setup.settings["models"][model]
        world = opener(setup, about)
        for arm in arms_of(setup.settings["arms"], about):
            schedule = schedule_of(arm, setup.settings["workload"])
            seconds = _MARGIN * expected_seconds(arm, setup.settings["workload"], about["costs"])
            found.append(
                Trial(
                    name=f"{model}--{trial_name(schedule)}",
                    seconds=seconds,
                    run=partial(_with_bias, setup, world, model, schedule, arm["groups"]),
                    opens=model,
                    opening_seconds=about.get("start_seconds", 0.0),
                )
            )
    return found


def arms_of(arms: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arms of one model, which may override the number of `groups` by name."""
    groups = model.get("groups", {})
    default = {"group": 1, "batch": 1, "tolerance": 0.0}
    names = [trial_name(schedule_of(arm, default)) for arm in arms]
    if unknown := sorted(set(groups) - set(names)):
        raise ValueError(f"groups must name arms, got {', '.join(unknown)} (of {', '.join(names)})")
    return [
        {**arm, "groups": groups.get(name, arm["groups"])}
        for arm, name in zip(arms, names, strict=True)
    ]


def schedule_of(arm: Mapping[str, Any], workload: Mapping[str, Any]) -> Schedule:
    """The schedule of an arm of the TOML."""
    mode = arm.get("mode", "partial")
    given = {name: value for name, value in arm.items() if name not in ("groups", "mode")}
    return Schedule(
        mode=mode,
        tolerance=workload["tolerance"] if mode == "coupled" else None,
        group_prompts=workload["group"],
        update_batch=workload["batch"],
        **given,
    )


def trial_name(schedule: Schedule) -> str:
    """The name of a schedule, usable in a file name.

    >>> trial_name(Schedule(mode="partial", lookahead=1))
    'sorted-partial-1'
    """
    mode = "" if schedule.strategy == "sync" else f"-{schedule.mode}"
    ahead = f"-{schedule.lookahead}" if schedule.lookahead else ""
    return f"{schedule.strategy}{mode}{ahead}"


def simulation_of(
    arm: Mapping[str, Any],
    workload: Mapping[str, Any],
    costs: Mapping[str, float],
    *,
    prompt_tokens: int,
) -> Simulation:
    """The same run in the simulator."""
    return Simulation(
        prompts=arm["groups"] * workload["group"],
        seed=workload["seed"],
        schedule=schedule_of(arm, workload),
        engine=EngineSettings(slots=workload["slots"], max_tokens=workload["max_tokens"]),
        lengths=LengthSettings(
            median=workload["median"], sigma=workload["sigma"], prompt_tokens=prompt_tokens
        ),
        costs=CostSettings(hardware="ticks", **costs),
    )


def expected_seconds(
    arm: Mapping[str, Any], workload: Mapping[str, Any], costs: Mapping[str, float]
) -> float:
    """The simulated time of a run."""
    simulation = simulation_of(arm, workload, costs, prompt_tokens=_PROMPT_TOKENS)
    return simulate(simulation).metrics.run.seconds


def opener(setup: Setup, about: Mapping[str, Any]) -> Callable[[], BenchWorld]:
    """Opens a model once, when it is first needed."""

    @cache
    def opened() -> BenchWorld:
        from experiments.bench_world import BenchWorld, Workload

        known = setup.settings["workload"]
        workload = Workload(**{name: known[name] for name in known if name != "tolerance"})
        return BenchWorld.opened(about, workload, device=setup.device)

    return opened


def measured_arm(
    setup: Setup,
    world: BenchWorld,
    model: str,
    *,
    schedule: Schedule,
    groups: int,
) -> tuple[Measured, dict[str, Any]]:
    """Run one schedule on a model; events are kept in the scratch folder."""
    folder = setup.scratch / f"{model}--{trial_name(schedule)}"
    folder.mkdir(parents=True, exist_ok=True)
    measured = world.run(schedule, groups=groups, events=folder / "events.jsonl")
    given = {name: value for name, value in asdict(schedule).items() if value is not None}
    return measured, {
        "model": model,
        "schedule": schedule.name,
        "arm": {"groups": groups, **given},
        "workload": dict(setup.settings["workload"]),
        **outcome(measured),
    }


def _with_bias(
    setup: Setup,
    world: Callable[[], BenchWorld],
    model: str,
    schedule: Schedule,
    groups: int,
) -> dict[str, Any]:
    opened = world()
    measured, found = measured_arm(setup, opened, model, schedule=schedule, groups=groups)
    bias = length_bias(list(measured.lengths.values()), opened.reference(list(measured.lengths)))
    return found | {
        "length_bias": bias.ratio,
        "length_ks": bias.ks_distance,
        "reference_mean": bias.reference_mean,
    }


def outcome(measured: Measured) -> dict[str, Any]:
    """The numbers of a run, as JSON values."""
    metrics = measured.metrics
    return {
        "run": numbers(metrics.run),
        "steady": None if metrics.steady is None else numbers(metrics.steady),
        "group_bubbles": [group.figures.bubble for group in metrics.groups],
        "update_seconds": measured.update_seconds,
        "hand_over_seconds": measured.hand_over_seconds,
        "engine_trainer_gap": measured.gap,
    }
