"""Named simulations, each a starting point that flags and files change."""

from __future__ import annotations

from sortedrl.config import EngineSettings, Schedule
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import Simulation


def paper() -> Simulation:
    """The paper's efficiency study: 10 groups of 512 answers, at most 8,192 tokens, 128 slots."""
    return Simulation()


def long_thoughts() -> Simulation:
    """Long chains of thought: answers up to 32,768 tokens of a 32B model on eight H100."""
    return Simulation(
        groups=4,
        schedule=Schedule(group_prompts=64, samples_per_prompt=8, harvest_unit="prompt"),
        engine=EngineSettings(slots=256, max_tokens=32768),
        lengths=LengthSettings(median=4000, sigma=1.1, prompt_share=0.5),
        costs=CostSettings(hardware="h100x8-qwen-2.5-32b"),
    )


def picture() -> Simulation:
    """Small enough to draw: 4 groups of 32 answers on 8 slots, one second per step."""
    return Simulation(
        groups=4,
        schedule=Schedule(group_prompts=32, update_batch=8),
        engine=EngineSettings(slots=8, max_tokens=256),
        lengths=LengthSettings(median=34, prompt_tokens=0),
        costs=CostSettings(hardware="ticks", update_seconds=12.0),
    )


def six() -> Simulation:
    """Six prompts on four slots, followed tick by tick in docs/how-it-works.md."""
    return Simulation(
        groups=1,
        schedule=Schedule(group_prompts=6, update_batch=3),
        engine=EngineSettings(slots=4, max_tokens=16),
        lengths=LengthSettings(
            values=(2, 7, 3, 5, 4, 9),
            replay=True,
            prompt_tokens=0,
            mismatch_rate=0.25,
        ),
        costs=CostSettings(hardware="ticks", update_seconds=1.0),
    )


PRESETS = {"paper": paper, "long-thoughts": long_thoughts, "picture": picture, "six": six}
