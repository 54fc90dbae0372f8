"""Prompts and answer lengths, drawn from a seed."""

from __future__ import annotations

import math
import random
from statistics import mean

from engine_peers.peer import Workload
from engine_peers.settings import Settings

_SIGMA = 1.0
_FIRST_TOKEN = 3
"""Lower token ids are often special."""


def draw(settings: Settings, *, vocabulary: int) -> Workload:
    """Prompts and lengths from a seed."""
    source = random.Random(settings.seed)
    count = settings.slots if settings.requests is None else settings.requests
    shortest, longest = _range(settings.prompt_tokens)
    sizes = [source.randint(shortest, longest) for _ in range(count)]
    kind, _, numbers = settings.workload.partition(":")
    if kind == "fixed":
        lengths = [int(numbers)] * count
    elif kind == "uniform":
        shortest, longest = _range(numbers)
        lengths = [source.randint(shortest, longest) for _ in range(count)]
    elif kind == "long-tail":
        lengths = long_tail(count, mean_length=settings.mean, most=settings.max, source=source)
    else:
        raise ValueError(
            f"workload must be fixed:N, uniform:N-M or long-tail, got {settings.workload!r}"
        )
    return Workload(
        prompts=[[source.randrange(_FIRST_TOKEN, vocabulary) for _ in range(n)] for n in sizes],
        lengths=lengths,
        slots=settings.slots,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
    )


def long_tail(count: int, *, mean_length: int, most: int, source: random.Random) -> list[int]:
    """Lognormal lengths in 1..most, scaled until they have this mean."""
    if not 1 <= mean_length < most:
        raise ValueError(f"mean must lie in 1..max, below max, got {mean_length} and {most}")
    draws = [math.exp(_SIGMA * source.gauss(0, 1)) for _ in range(count)]
    low, high = 0.0, float(most) / min(draws)
    for _ in range(60):
        scale = (low + high) / 2
        lengths = [min(most, max(1, round(scale * value))) for value in draws]
        low, high = (scale, high) if mean(lengths) < mean_length else (low, scale)
    return lengths


def described(workload: Workload) -> dict[str, float]:
    """The sizes of a workload, for the record."""
    return {
        "requests": len(workload.lengths),
        "tokens": workload.tokens,
        "mean_length": mean(workload.lengths),
        "max_length": max(workload.lengths),
        "prompt_tokens": sum(map(len, workload.prompts)),
    }


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    numbers = (first, last or first)
    if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(numbers[1]):
        raise ValueError(f"lengths must be a number or a range such as 8-48, got {text!r}")
    return int(numbers[0]), int(numbers[1])
