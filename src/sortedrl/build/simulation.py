"""A simulated run from its settings."""

from __future__ import annotations

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller
from sortedrl.engines.simulated import (
    SimulatedEngine,
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
)
from sortedrl.events import Record
from sortedrl.journal import Journal
from sortedrl.loop import Loop
from sortedrl.simulate.lengths import Lengths
from sortedrl.simulate.settings import Simulation


def simulated_loop(simulation: Simulation, *, lengths: Lengths, record: Record) -> Loop:
    """The loop on simulated parts and a virtual clock."""
    clock, costs = VirtualClock(), simulation.costs.costs()
    return Loop(
        prompts=SimulatedPrompts(
            simulation.num_prompts, prompt_tokens=simulation.lengths.prompt_tokens
        ),
        buffer=Buffer(unit_size=simulation.schedule.unit_size),
        controller=Controller(simulation.schedule),
        engine=SimulatedEngine(
            slots=simulation.engine.slots, lengths=lengths, costs=costs, clock=clock
        ),
        scorer=SimulatedScorer(),
        trainer=SimulatedTrainer(costs=costs, clock=clock),
        journal=Journal(record, clock=clock),
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
