"""Run one simulation, or compare strategies and modes on the same prompts and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from sortedrl.config.schedule import ModeName, Schedule, StrategyName
from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event, Finish, Interrupt, Record, Start, SyncWeights
from sortedrl.core.loop import Loop
from sortedrl.core.meter import LengthBias, Meter, Metrics, length_bias, numbers
from sortedrl.core.protocols import Engine
from sortedrl.core.recorder import Journal
from sortedrl.simulate.conversations import Conversations, SimulatedEnvironments
from sortedrl.simulate.engine import (
    SimulatedEngine,
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
)
from sortedrl.simulate.lengths import Lengths
from sortedrl.simulate.pool import SimulatedPool
from sortedrl.simulate.settings import PoolSettings, Simulation
from sortedrl.types import Key, Prompt


def simulated_loop(simulation: Simulation, *, lengths: Lengths, record: Record) -> Loop:
    """The loop with simulated parts on a virtual clock."""
    clock, costs, pool = VirtualClock(), simulation.costs.costs(), simulation.pool
    # All machines train: each takes its share of the tokens of an update.
    shared = replace(costs, update_token_seconds=costs.update_token_seconds / pool.engines)
    environments = None
    if simulation.conversations.is_used:
        environments = SimulatedEnvironments(
            Conversations(simulation.conversations, lengths=lengths),
            limit=simulation.max_open,
            clock=clock,
        )
    return Loop(
        prompts=SimulatedPrompts(
            simulation.num_prompts, prompt_tokens=simulation.lengths.prompt_tokens
        ),
        buffer=Buffer(unit_size=simulation.schedule.unit_size),
        controller=Controller(simulation.schedule),
        engine=_engine(simulation, lengths=lengths, clock=clock, environments=environments),
        scorer=SimulatedScorer(),
        trainer=SimulatedTrainer(costs=shared, clock=clock),
        journal=Journal(record, clock=clock),
        seed=simulation.seed,
        environments=environments,
    )


def _engine(
    simulation: Simulation,
    *,
    lengths: Lengths,
    clock: VirtualClock,
    environments: SimulatedEnvironments | None,
) -> Engine:
    """A single engine, or a pool (slower to simulate) if the settings need one."""
    slots, costs = simulation.engine.slots, simulation.costs.costs()
    if environments is not None:
        return SimulatedEngine(
            slots=slots,
            lengths=environments.conversations,
            costs=costs,
            clock=clock,
            until=lambda: environments.next_reply,
        )
    if simulation.pool == PoolSettings():
        return SimulatedEngine(slots=slots, lengths=lengths, costs=costs, clock=clock)
    return SimulatedPool(
        simulation.pool,
        slots=slots,
        lengths=lengths,
        costs=costs,
        clock=clock,
        seed=simulation.seed,
    )


def simulated_lengths(simulation: Simulation) -> Lengths:
    """The lengths of a simulation's answers."""
    return Lengths(
        simulation.lengths,
        seed=simulation.seed,
        max_tokens=simulation.engine.max_tokens,
        samples_per_prompt=simulation.schedule.samples_per_prompt,
    )


PREDICTION_ERROR = 0.1
"""Relative error of a simulated speed: most runs in docs/results.md are predicted within it.
Smaller differences are not significant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The result of a simulated run."""

    simulation: Simulation
    metrics: Metrics
    bias: LengthBias
    early_bias: LengthBias
    """Of the first half of the trained answers: below 1 if long answers starve."""
    trajectory_events: int
    """Starts, finishes and interruptions, each handled by the controller."""
    weight_sync_seconds: float

    @property
    def events_per_second(self) -> float:
        """Trajectory events per second, the load of the controller."""
        return self.trajectory_events / self.metrics.run.seconds

    @property
    def weight_sync_share(self) -> float:
        """Share of the run spent in weight sync."""
        return self.weight_sync_seconds / self.metrics.run.seconds

    @property
    def name(self) -> str:
        """Short name: strategy, mode and lookahead."""
        return self.simulation.schedule.name


def simulate(
    simulation: Simulation,
    *,
    record: Record | None = None,
    on_update: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Run one simulation.

    `record` receives every event; `on_update` receives the number of trajectories trained so far.
    """
    lengths = simulated_lengths(simulation)
    meter = Meter()
    trajectory_events, weight_sync_seconds = 0, 0.0

    def counted(event: Event) -> None:
        nonlocal trajectory_events, weight_sync_seconds
        meter(event)
        if isinstance(event, Start | Finish | Interrupt):
            trajectory_events += 1
        elif isinstance(event, SyncWeights):
            weight_sync_seconds += event.took_seconds
        if record is not None:
            record(event)

    loop = simulated_loop(simulation, lengths=lengths, record=counted)
    for _ in loop.run():
        if on_update is not None:
            on_update(loop.buffer.num_trained)
    metrics = meter.metrics()
    trained = [tokens for _, _, tokens in metrics.trained_lengths]
    reference = list(_reference(simulation, lengths, metrics))
    return SimulationResult(
        simulation=simulation,
        metrics=metrics,
        bias=length_bias(trained, reference),
        early_bias=length_bias(trained[: len(trained) // 2], reference),
        trajectory_events=trajectory_events,
        weight_sync_seconds=weight_sync_seconds,
    )


def variants(
    schedule: Schedule,
    *,
    strategies: Sequence[StrategyName] = get_args(StrategyName),
    modes: Sequence[ModeName] = ("on_policy", "partial", "coupled"),
    lookaheads: Sequence[int] = (0, 2),
) -> Iterator[Schedule]:
    """The schedules worth comparing: each strategy with the modes and lookaheads it supports.

    sync, minibatch and posthoc never interrupt, so they appear once; settings that a variant does
    not support are removed.
    """
    for strategy in strategies:
        never_interrupts = strategy in ("sync", "minibatch", "posthoc")
        for mode in ("on_policy",) if never_interrupts else modes:
            for lookahead in lookaheads if strategy == "sorted" else (0,):
                yield replace(
                    schedule,
                    strategy=strategy,
                    mode=mode,
                    lookahead=lookahead,
                    tolerance=schedule.tolerance if mode == "coupled" else None,
                    max_staleness=schedule.max_staleness if mode == "partial" else None,
                )


def results_of(
    simulation: Simulation,
    *,
    strategies: Sequence[StrategyName],
    modes: Sequence[ModeName],
    lookaheads: Sequence[int],
    advance: Callable[[str, float], None] = lambda name, done: None,
) -> list[SimulationResult]:
    """The runs to compare, sync first; the schedule of the simulation is always included.

    `advance` is called with the name of the current run and the number of finished ones.
    """
    schedules = list(
        variants(
            simulation.schedule,
            strategies=("sync", *(name for name in strategies if name != "sync")),
            modes=modes,
            lookaheads=lookaheads,
        )
    )
    schedule = simulation.schedule
    is_chosen = not schedule.never_interrupts and schedule.name != Schedule().name
    if is_chosen and schedule not in schedules:
        schedules.append(schedule)
    results = []
    for number, schedule in enumerate(schedules):
        advance(schedule.name, number)
        results.append(simulate(replace(simulation, schedule=schedule)))
    return results


def best_of(results: Sequence[SimulationResult]) -> SimulationResult:
    """The fastest schedule without starving prompts: a sorted one, if there is any."""
    safe = [o for o in results if o.simulation.schedule.strategy == "sorted"]
    return max(safe or results, key=lambda result: result.metrics.run.goodput)


def row(result: SimulationResult, *, sync: SimulationResult | None = None) -> dict[str, object]:
    """A result as one flat row, for tables and scripts."""
    schedule, run, steady = result.simulation.schedule, result.metrics.run, result.metrics.steady
    return {
        "name": result.name,
        "strategy": schedule.strategy,
        "mode": schedule.mode,
        "lookahead": schedule.lookahead,
        **numbers(run),
        "steady_bubble": None if steady is None else steady.bubble,
        "steady_goodput": None if steady is None else steady.goodput,
        "goodput_vs_sync": None if sync is None else run.goodput / sync.metrics.run.goodput,
        "length_bias": result.bias.ratio,
        "length_ks": result.bias.ks_distance,
        "early_length_bias": result.early_bias.ratio,
        "rounds": len(result.metrics.rounds),
        "engines": result.simulation.pool.engines,
        "events_per_second": result.events_per_second,
        "hand_over_share": result.weight_sync_share,
    }


def _reference(simulation: Simulation, lengths: Lengths, metrics: Metrics) -> Iterator[int]:
    """For each trained answer, its length without interruptions at that version."""
    versions: dict[Key, int] = {key: version for key, version, _ in metrics.trained_lengths}
    for prompt_id in sorted({prompt_id for prompt_id, _ in versions}):
        fresh = open_group(
            [Prompt(id=prompt_id)],
            group=0,
            samples_per_prompt=simulation.schedule.samples_per_prompt,
            seed=simulation.seed,
        )
        for trajectory in fresh:
            yield lengths.length(trajectory, version=versions[trajectory.key])


def agent_variants(simulation: Simulation) -> Iterator[tuple[str, Simulation]]:
    """The slot policies for conversations, by name, from lock step to slots per turn."""
    conversations, schedule = simulation.conversations, simulation.schedule
    ours = replace(
        schedule, strategy="sorted", mode="partial", lookahead=0, tolerance=None, max_staleness=None
    )
    sync = replace(ours, strategy="sync", mode="on_policy")
    per_trajectory = replace(conversations, max_open=simulation.engine.slots)
    serial = replace(conversations, is_lock_step=True, has_serial_tools=True)
    together = replace(conversations, is_lock_step=True)
    yield "lock step, serial tools", replace(simulation, schedule=sync, conversations=serial)
    yield "lock step", replace(simulation, schedule=sync, conversations=together)
    yield (
        "slot per trajectory, sync",
        replace(simulation, schedule=sync, conversations=per_trajectory),
    )
    for chosen in (ours, replace(ours, mode="coupled")):
        for name, turns in (("trajectory", per_trajectory), ("turn", conversations)):
            yield (
                f"slot per {name}, {chosen.name}",
                replace(simulation, schedule=chosen, conversations=turns),
            )
    ahead = replace(ours, lookahead=1)
    yield f"slot per turn, {ahead.name}", replace(simulation, schedule=ahead)
