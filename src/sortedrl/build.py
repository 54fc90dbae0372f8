"""From settings to objects: the only module that names concrete classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller
from sortedrl.data.chat import Tokenizer
from sortedrl.engines.simulated import (
    SimulatedEngine,
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
)
from sortedrl.evaluation.settings import EvaluationSettings
from sortedrl.events import Record
from sortedrl.journal import Journal
from sortedrl.loop import Loop
from sortedrl.simulate.lengths import Lengths
from sortedrl.simulate.settings import Simulation

if TYPE_CHECKING:
    from sortedrl.engines.native import NativeEngine


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


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model; the weights stay where they are."""
    from sortedrl.models.loading import load_tokenizer

    tokenizer: Tokenizer = load_tokenizer(model)
    return tokenizer


def evaluation_engine(
    model: str, tokenizer: Tokenizer, settings: EvaluationSettings, *, device: str | None
) -> NativeEngine:
    """The native engine with a model of its own, for the answers of an evaluation."""
    from sortedrl.engines.native import NativeEngine, Sampling
    from sortedrl.models.loading import load_model

    return NativeEngine(
        load_model(model, dtype=None, device=device),
        slots=settings.slots,
        max_tokens=settings.max_tokens,
        sampling=Sampling(temperature=settings.sampling_temperature, top_p=settings.top_p),
        tokenizer=tokenizer,
    )
