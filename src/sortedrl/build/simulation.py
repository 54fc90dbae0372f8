"""A simulated run from its settings."""

from __future__ import annotations

from dataclasses import replace

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller
from sortedrl.engines.simulated import (
    SimulatedEngine,
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
)
from sortedrl.engines.simulated_pool import SimulatedPool
from sortedrl.events import Record
from sortedrl.journal import Journal
from sortedrl.loop import Loop
from sortedrl.protocols import Engine
from sortedrl.simulate.lengths import Lengths
from sortedrl.simulate.pool_settings import PoolSettings
from sortedrl.simulate.settings import Simulation


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
