"""Overhead of the reward pool per call, and its gain over scoring one by one.

    python benchmarks/rewards.py            a few minutes; --json for a script

overhead   a function that does nothing, per call: the cost of the pool itself
speed-up   functions that wait or compute, relative to the same calls one by one in this process
overlap    rewards of 20 ms while the native engine generates (a small random model on the CPU),
           relative to scoring afterwards

Each figure is the median of several repeats, all in one run of this program.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

from sortedrl.config.data import RewardSettings
from sortedrl.engines.generation import fresh_trajectories
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.rewards.functions import RewardSource, load
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.types import Prompt, Trajectory

HERE = str(Path(__file__).resolve())
PROMPT = Prompt(id=0, tokens=tuple(range(200)), fields={"answer": "42", "level": 3})
RESPONSE = "some words of an answer " * 80


def nothing(prompt: Prompt, response: str) -> float:
    """The cheapest reward."""
    return 1.0


def nothing_batched(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """The cheapest batched reward."""
    return [1.0] * len(responses)


async def nothing_async(prompt: Prompt, response: str) -> float:
    """The cheapest async reward."""
    return 1.0


def waits(prompt: Prompt, response: str) -> float:
    """Waits 20 ms, like a remote judge."""
    time.sleep(0.02)
    return 1.0


def computes(prompt: Prompt, response: str) -> float:
    """Computes for about 10 ms, like a sandbox or a proof checker."""
    return float(sum(math.sin(number) for number in range(100_000)) < math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """How much to measure."""

    calls: int = 2000
    """Calls of cheap functions; a tenth for slow ones."""
    repeats: int = 5
    """Repeats of everything."""
    workers: tuple[int, ...] = (1, 2, 4, 8)
    """Sizes of the pool."""
    json: bool = False
    """Print one JSON object."""


def main() -> None:
    """Measure and print."""
    given = tyro.cli(Arguments, description=__doc__)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "overhead_us": _overhead(given),
        "speed_up": _speed_up(given),
        "overlap": _overlap(given),
    }
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(result["machine"])
    for title in ("overhead_us", "speed_up", "overlap"):
        print(f"\n{title}")
        rows = result[title]
        assert isinstance(rows, list)
        for row in rows:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))


def _timed(action: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median, minimum and maximum seconds."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), min(seconds), max(seconds)


def _pool(name: str, workers: int) -> RewardPool:
    return RewardPool(RewardSource(f"{HERE}:{name}"), RewardSettings(workers=workers))


def _score_all(pool: RewardPool, calls: int) -> None:
    pool.wait([pool.submit(PROMPT, RESPONSE) for _ in range(calls)])


def _serial(name: str, calls: int) -> None:
    function = load(RewardSource(f"{HERE}:{name}")).function
    for _ in range(calls):
        function(PROMPT, RESPONSE)


def _overhead(given: Arguments) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in ("nothing", "nothing_batched", "nothing_async"):
        for workers in given.workers[:2]:
            with _pool(name, workers) as pool:
                _score_all(pool, 50)
                times = _timed(lambda pool=pool: _score_all(pool, given.calls), given.repeats)  # type: ignore[misc]
            mid, low, high = (1e6 * seconds / given.calls for seconds in times)
            spread = f"{low:.0f} to {high:.0f}"
            rows.append({"function": name, "workers": workers, "us": round(mid), "spread": spread})
    return rows


def _speed_up(given: Arguments) -> list[dict[str, object]]:
    calls = max(20, given.calls // 10)
    rows: list[dict[str, object]] = []
    for name in ("waits", "computes"):
        serial, *_ = _timed(lambda name=name: _serial(name, calls), given.repeats)  # type: ignore[misc]
        for workers in given.workers:
            with _pool(name, workers) as pool:
                _score_all(pool, workers)
                times = _timed(lambda pool=pool: _score_all(pool, calls), given.repeats)  # type: ignore[misc]
            mid, low, high = (serial / seconds for seconds in times)
            rows.append(
                {
                    "function": name,
                    "workers": workers,
                    "times_serial": round(mid, 2),
                    "spread": f"{high:.2f} to {low:.2f}",
                }
            )
    return rows


def _overlap(given: Arguments) -> list[dict[str, object]]:
    engine = _engine()
    lengths = [8 + 7 * number % 89 for number in range(96)]
    prompts = [[1 + number] * 16 for number in range(len(lengths))]

    def write(done: Callable[[Trajectory], object]) -> None:
        """Long-tailed answers, complete at different times."""
        trajectories = fresh_trajectories(prompts, samples_per_prompt=1, seed=0)
        for trajectory, limit in zip(trajectories, lengths, strict=True):
            engine.submit([trajectory], tolerance=None, sampling=Sampling(max_tokens=limit))
        left = len(trajectories)
        while left:
            for trajectory in engine.step().finished:
                done(trajectory)
                left -= 1

    write(lambda _: None)
    rows: list[dict[str, object]] = []
    for workers in given.workers:
        with _pool("waits", workers) as pool:

            def beside(pool: RewardPool = pool) -> None:
                tickets: list[int] = []
                write(lambda t: tickets.append(pool.submit(t.prompt, RESPONSE)))
                pool.wait(tickets)

            def after(pool: RewardPool = pool) -> None:
                write(lambda _: None)
                _score_all(pool, len(lengths))

            seconds = {
                "writing_s": _timed(lambda: write(lambda _: None), given.repeats),
                "beside_s": _timed(beside, given.repeats),
                "afterwards_s": _timed(after, given.repeats),
            }
        medians = {name: round(times[0], 2) for name, times in seconds.items()}
        rows.append({"workers": workers, "scoring_s": len(lengths) * 0.02 / workers, **medians})
    return rows


def _engine() -> NativeEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    return NativeEngine(LlamaForCausalLM(config).eval(), slots=16, max_tokens=128)


if __name__ == "__main__":
    main()
