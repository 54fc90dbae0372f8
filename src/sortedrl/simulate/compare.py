"""Simulated runs from their settings: one, or strategies and modes side by side.

Runs that are compared have the same prompts and the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from sortedrl.config.schedule import ModeName, Schedule, StrategyName
from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event, Finish, HandOver, Interrupt, Record, Start
from sortedrl.core.loop import Loop
from sortedrl.core.meter import Meter
from sortedrl.core.metrics import LengthBias, Metrics, length_bias, numbers
from sortedrl.core.protocols import Engine
from sortedrl.core.recorder import Journal
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
    """The loop on simulated parts and a virtual clock."""
    clock, costs, pool = VirtualClock(), simulation.costs.costs(), simulation.pool
    # All machines train: each has its share of the tokens of an update.
    shared = replace(costs, update_token_seconds=costs.update_token_seconds / pool.engines)
    return Loop(
        prompts=SimulatedPrompts(
            simulation.num_prompts, prompt_tokens=simulation.lengths.prompt_tokens
        ),
        buffer=Buffer(unit_size=simulation.schedule.unit_size),
        controller=Controller(simulation.schedule),
        engine=_engine(simulation, lengths=lengths, clock=clock),
        scorer=SimulatedScorer(),
        trainer=SimulatedTrainer(costs=shared, clock=clock),
        journal=Journal(record, clock=clock),
        seed=simulation.seed,
    )


def _engine(simulation: Simulation, *, lengths: Lengths, clock: VirtualClock) -> Engine:
    """One engine where a pool of one would do the same, only slower."""
    slots, costs = simulation.engine.slots, simulation.costs.costs()
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
"""The error of a simulated speed: most of the runs in docs/results.md are predicted to this share.
Differences that are smaller say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated run gave."""

    simulation: Simulation
    metrics: Metrics
    bias: LengthBias
    early_bias: LengthBias
    """Of the first half of the answers trained on: below 1 where long answers starve."""
    trajectory_events: int
    """Starts, finishes and interruptions: each is asked of the controller."""
    hand_over_seconds: float

    @property
    def events_per_second(self) -> float:
        """What the controller has to answer in a second of the run."""
        return self.trajectory_events / self.metrics.run.seconds

    @property
    def hand_over_share(self) -> float:
        """Share of the run in which weights were on their way."""
        return self.hand_over_seconds / self.metrics.run.seconds

    @property
    def name(self) -> str:
        """Strategy, mode and lookahead in a few letters."""
        return self.simulation.schedule.name


@dataclass(slots=True)
class _Tally:
    """What the meter does not count."""

    trajectory_events: int = 0
    hand_over_seconds: float = 0.0

    def __call__(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Start | Finish | Interrupt):
            self.trajectory_events += 1
        elif isinstance(event, HandOver):
            self.hand_over_seconds += event.took_seconds


def simulate(
    simulation: Simulation,
    *,
    record: Record | None = None,
    on_update: Callable[[int], None] | None = None,
) -> Outcome:
    """Run one simulation to its end.

    `record` sees every event; `on_update` is told after each update how many trajectories were
    trained so far.
    """
    lengths = simulated_lengths(simulation)
    meter, tally = Meter(), _Tally()

    def all_of_them(event: Event) -> None:
        meter(event)
        tally(event)
        if record is not None:
            record(event)

    loop = simulated_loop(simulation, lengths=lengths, record=all_of_them)
    for _ in loop.run():
        if on_update is not None:
            on_update(loop.buffer.num_trained)
    metrics = meter.metrics()
    trained = [tokens for _, _, tokens in metrics.trained_lengths]
    reference = list(_reference(simulation, lengths, metrics))
    return Outcome(
        simulation=simulation,
        metrics=metrics,
        bias=length_bias(trained, reference),
        early_bias=length_bias(trained[: len(trained) // 2], reference),
        trajectory_events=tally.trajectory_events,
        hand_over_seconds=tally.hand_over_seconds,
    )


def variants(
    schedule: Schedule,
    *,
    strategies: Sequence[StrategyName] = get_args(StrategyName),
    modes: Sequence[ModeName] = ("on_policy", "partial", "coupled"),
    lookaheads: Sequence[int] = (0, 2),
) -> Iterator[Schedule]:
    """The schedules worth comparing: each strategy with the modes and lookaheads it knows.

    sync, minibatch and posthoc never interrupt, so they appear once; settings that a variant does
    not take are left out of it.
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


def outcomes_of(
    simulation: Simulation,
    *,
    strategies: Sequence[StrategyName],
    modes: Sequence[ModeName],
    lookaheads: Sequence[int],
    advance: Callable[[str, float], None] = lambda name, done: None,
) -> list[Outcome]:
    """The runs to compare, sync first; a schedule that the simulation itself asks for is in it.

    `advance` is told which one runs, and how many are done.
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
    outcomes = []
    for number, schedule in enumerate(schedules):
        advance(schedule.name, number)
        outcomes.append(simulate(replace(simulation, schedule=schedule)))
    return outcomes


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest that lets no prompt starve: of strategy sorted, if it is among them."""
    safe = [o for o in outcomes if o.simulation.schedule.strategy == "sorted"]
    return max(safe or outcomes, key=lambda outcome: outcome.metrics.run.goodput)


def row(outcome: Outcome, *, sync: Outcome | None = None) -> dict[str, object]:
    """An outcome as one flat row, for tables and scripts."""
    schedule, run, steady = outcome.simulation.schedule, outcome.metrics.run, outcome.metrics.steady
    return {
        "name": outcome.name,
        "strategy": schedule.strategy,
        "mode": schedule.mode,
        "lookahead": schedule.lookahead,
        **numbers(run),
        "steady_bubble": None if steady is None else steady.bubble,
        "steady_goodput": None if steady is None else steady.goodput,
        "goodput_vs_sync": None if sync is None else run.goodput / sync.metrics.run.goodput,
        "length_bias": outcome.bias.ratio,
        "length_ks": outcome.bias.ks_distance,
        "early_length_bias": outcome.early_bias.ratio,
        "rounds": len(outcome.metrics.rounds),
        "engines": outcome.simulation.pool.engines,
        "events_per_second": outcome.events_per_second,
        "hand_over_share": outcome.hand_over_share,
    }


def _reference(simulation: Simulation, lengths: Lengths, metrics: Metrics) -> Iterator[int]:
    """For each answer trained on, its length had nothing interrupted it at that version."""
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
