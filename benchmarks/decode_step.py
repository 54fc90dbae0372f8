"""Where the time of a decode step goes: its kernels on a GPU, or its operations on a CPU.

    python benchmarks/decode_step.py                                   LLaMA-3.1-8B shape, 128 slots
    python benchmarks/decode_step.py --model smollm2-135m --slots 256 --prompt-tokens 256
    python benchmarks/decode_step.py --device cpu --model llama-5m --slots 16 --prompt-tokens 64

Every slot decodes, with random weights. The time of a step on the clock, measured without torch's
profiler, is to be compared with the sum of its kernels: the rest is the host, or gaps between them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch.profiler import ProfilerActivity, profile

from engine_peers.models import load, token_bytes
from provenance import provenance
from sortedrl.engines.native import NativeEngine
from sortedrl.types import Prompt, Trajectory

_WARM_UP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to profile."""

    model: str = "llama-8b"
    """A folder, or a shape with random weights: llama-8b, qwen2.5-1.5b, smollm2-135m."""
    slots: int = 128
    """Answers that decode together."""
    prompt_tokens: int = 512
    """Context at the first step."""
    steps: int = 40
    """Timed steps; half as many are profiled after them."""
    device: str = "cuda"
    """cuda or cpu."""
    shown: int = 16
    """Kernels in the table, those that take longest first."""
    json: Path | None = None
    """Write all kernels to this file."""


def decoding(settings: Settings) -> NativeEngine:
    """An engine all of whose slots decode."""
    dtype = "bfloat16" if settings.device == "cuda" else "float32"
    model = load(settings.model, device=settings.device, dtype=dtype, seed=0)
    longest = settings.prompt_tokens + 2 * settings.steps + 2 * _WARM_UP
    engine = NativeEngine(
        model,
        slots=settings.slots,
        max_tokens=longest - settings.prompt_tokens,
        stop_tokens=(),
        cache_bytes=(settings.slots + 1) * (longest + 64) * token_bytes(model),
    )
    generator = torch.Generator().manual_seed(0)
    size = (settings.slots, settings.prompt_tokens)
    prompts = torch.randint(model.config.vocab_size, size, generator=generator).tolist()
    engine.submit(
        [
            Trajectory(prompt=Prompt(id=n, tokens=prompt), sample_index=0, group=0, seed=n)
            for n, prompt in enumerate(prompts)
        ],
        tolerance=None,
    )
    while engine.stats.prefilled_tokens < settings.slots * (settings.prompt_tokens - 1):
        engine.step()
    advance(engine, _WARM_UP)
    return engine


def advance(engine: NativeEngine, steps: int) -> None:
    """Run some decode steps to their end."""
    for _ in range(steps):
        engine.step()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def main(settings: Settings) -> None:
    """Profile and print."""
    engine = decoding(settings)
    began = time.perf_counter()
    advance(engine, settings.steps)
    seconds = (time.perf_counter() - began) / settings.steps
    profiled = settings.steps // 2
    on_gpu = settings.device == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        advance(engine, profiled)
    taken: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in recorded.events() or ():
        if event.device_type.name == activity.name and not event.name.startswith("Mem"):
            taken[event.name] += (
                event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            )
            calls[event.name] += 1
    kernels = [
        {"kernel": name, "us": total / profiled, "calls": calls[name] / profiled}
        for name, total in taken.most_common()
    ]
    total = sum(taken.values()) / profiled
    print(
        f"{settings.model}, {settings.slots} slots, context {settings.prompt_tokens} and more: "
        f"{settings.slots / seconds:,.0f} tokens/s; a step takes {1e6 * seconds:,.0f} us, "
        f"its kernels {total:,.0f} us"
    )
    for kernel in kernels[: settings.shown]:
        print(f"{kernel['us']:10.1f} us  {kernel['calls']:6.1f} x  {str(kernel['kernel'])[:90]}")
    if settings.json is not None:
        found = {"settings": asdict(settings), "step_seconds": seconds, "kernels": kernels}
        settings.json.write_text(
            json.dumps(provenance(settings.device) | found, indent=1, default=str)
        )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
