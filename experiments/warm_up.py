"""Meet every size of pass once before time is taken.

On a GPU the engine compiles its layers at the first pass and captures a graph for every size of
pass at the second. The sizes differ by the rows of a pass and by the longest context in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sortedrl.engines.native import NativeEngine
from sortedrl.types import Prompt, Segment, Trajectory

_PROMPT_TOKENS = 96
_FIRST_CONTEXT = 512


def warm_up(engine: NativeEngine, *, max_tokens: int) -> list[Trajectory]:
    """Run down from all slots to one, with ever longer contexts; gives answers of all lengths."""
    written: list[Trajectory] = []
    context = _FIRST_CONTEXT
    while context <= max_tokens:
        written = _run_down(engine, longest=context - _PROMPT_TOKENS - 2 * engine.slots)
        context *= 2
    return written


def _run_down(engine: NativeEngine, *, longest: int) -> list[Trajectory]:
    """Twice as many answers as slots, each one token longer than the one before; one is long."""
    count = 2 * engine.slots
    trajectories = [_trajectory(number, cached=0) for number in range(count - 1)]
    long = _trajectory(count, cached=max(1, longest))
    limits = [*(1 + number % engine.slots for number in range(count - 1)), longest + 2 * count]
    ordered = [long, *trajectories]
    for trajectory, limit in zip(ordered, [limits[-1], *limits[:-1]], strict=True):
        sampling = replace(engine.sampling, max_tokens=limit)
        engine.submit([trajectory], tolerance=None, sampling=sampling)
    finished: list[Trajectory] = []
    while len(finished) < count:
        finished += engine.step().finished
    return finished


def _trajectory(number: int, *, cached: int) -> Trajectory:
    tokens = _tokens(cached, first=number)
    segments = (Segment(tokens, [0.0] * cached, 0),) if cached else ()
    prompt = Prompt(id=number, tokens=_tokens(_PROMPT_TOKENS, first=7 * number))
    return Trajectory(prompt=prompt, sample_index=0, group=0, seed=number, segments=segments)


def _tokens(count: int, *, first: int) -> Sequence[int]:
    return [(first + 31 * place) % 1000 for place in range(count)]
