"""Station 1: from prompts to the trajectories of a group."""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.randomness import mix
from sortedrl.types import Prompt, Trajectory


def open_group(
    prompts: Sequence[Prompt], *, group: int, samples_per_prompt: int, seed: int
) -> list[Trajectory]:
    """Fresh trajectories for the prompts, each with a noise seed of its own."""
    return [
        Trajectory(
            prompt=prompt,
            sample_index=sample_index,
            group=group,
            seed=mix(seed, prompt.id, sample_index),
        )
        for prompt in prompts
        for sample_index in range(samples_per_prompt)
    ]
