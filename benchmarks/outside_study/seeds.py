"""What vLLM's own seeds give: an answer that is redrawn with the randomness it had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outside_study.answers import common_beginning, same_answers
from outside_study.engine import SEEDED_SAMPLER, Setting, vllm_engine, write
from outside_study.finding import Finding
from outside_study.world import World


def study_seeds(world: World) -> Iterator[Finding]:
    """How much of an answer its seed brings back, in another batching and with other weights."""
    fresh = world.trajectories
    plain = Setting(with_noise=False)
    # Not in chunks: a seeded request whose prompt is cut ends the CPU engine of vLLM 0.32.
    other = Setting(with_noise=False, slots=7, prefix_caching=False)
    with vllm_engine(world.old_folder, plain) as llm:
        old = write(llm, fresh, way=SEEDED_SAMPLER)
        redrawn = write(llm, [replace(t, attempt=1) for t in fresh], way=SEEDED_SAMPLER)
    with vllm_engine(world.old_folder, other) as llm:
        again = write(llm, fresh[::-1], way=SEEDED_SAMPLER)[::-1]
    with vllm_engine(world.new_folder, plain) as llm:
        new = write(llm, fresh, way=SEEDED_SAMPLER)
    yield Finding("answers equal in another batching", same_answers(old, again), "answers", "seeds")
    for note, answers in (("same seed, changed weights", new), ("another seed", redrawn)):
        share = common_beginning(old, answers)
        yield Finding("common beginning with the old answer", share, "share", note)
