"""Host time per decode step of the native engine, with a device of infinite speed.

    python benchmarks/host_time.py                       1,024 slots, 32k context
    python benchmarks/host_time.py --slots 256 --profile

Engine, planner and CUDA runner are the real ones; only the forward pass is replaced by precomputed
tensors. What remains is what an infinitely fast GPU would wait for: planning, filling and sending
the rows, and reading the tokens. All copies are within main memory. CPU time of one thread is
measured, which other processes hardly affect.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from unittest.mock import patch

import torch
import tyro
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from provenance import provenance
from sortedrl.engines.native import NativeEngine, Sampling, cuda_runner, native_engine
from sortedrl.engines.native.cuda_runner import CudaRunner, _Size
from sortedrl.engines.native.hf_model import HFModel
from sortedrl.engines.sampling import CacheSize
from sortedrl.types import Prompt, Trajectory

_VOCABULARY = 512
_STOP_TOKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    slots: int = 1024
    """Answers decoded at the same time."""
    context: int = 32768
    """Maximum tokens of prompt and answer."""
    prompt_tokens: int = 512
    """Tokens of each prompt."""
    steps: int = 100
    """Decode steps of one repeat."""
    repeats: int = 5
    """Repeats; block tables keep growing."""
    profile: bool = False
    """Print a profile instead."""


class _Event:
    """An event that is always complete."""

    def record(self) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _FreeRunner(CudaRunner):
    """The CUDA runner, without the forward pass."""

    _is_recordable = False
    _results: Tensor | None = None

    def _run(self, size: _Size) -> Tensor:
        if self._results is None or self._results.shape[1] < size.sampled:
            self._results = torch.zeros(4, self._max_rows, dtype=torch.int32)
            self._results[0] = torch.arange(self._max_rows) % (_VOCABULARY - 2) + 2
            self._results[1] = torch.tensor(-1.0).view(torch.int32)
        return self._results[:, : size.sampled]


@contextmanager
def free_device() -> Iterator[None]:
    """Make new engines of this process use a device without forward passes."""

    def runner(
        hf_model: HFModel,
        size: CacheSize,
        *,
        slots: int,
        max_rows: int,
        is_compiled: bool,
    ) -> CudaRunner:
        del is_compiled  # there is no forward pass
        return _FreeRunner(hf_model, size=size, slots=slots, max_rows=max_rows, is_compiled=False)

    with (
        patch.object(torch.cuda, "Event", _Event),
        patch.object(torch.cuda, "graph_pool_handle", lambda: None),
        patch.object(cuda_runner, "no_split_k", nullcontext),
        patch.object(native_engine, "_runner", runner),
        patch.object(NativeEngine, "_verify_model", lambda self, model: None),
    ):
        yield


def engine_for(settings: Settings) -> NativeEngine:
    """An engine whose slots are all decoding."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=settings.context,
    )
    engine = NativeEngine(
        LlamaForCausalLM(config),
        slots=settings.slots,
        max_tokens=settings.context - settings.prompt_tokens,
        sampling=Sampling(),
        stop_tokens=(_STOP_TOKEN,),
        cache_bytes=settings.slots * (settings.context + 64) * 2 * 8 * 4,
        chunk_tokens=settings.slots * 4,
    )
    prompts = [
        Prompt(id=n, tokens=[(n + place) % 500 for place in range(settings.prompt_tokens)])
        for n in range(settings.slots)
    ]
    answers = [
        Trajectory(prompt=prompt, sample_index=0, group=0, seed=prompt.id) for prompt in prompts
    ]
    engine.submit(answers, tolerance=None)
    while engine.step().decoded_tokens < settings.slots:
        pass
    return engine


def milliseconds_per_step(engine: NativeEngine, steps: int) -> float:
    """CPU time of a decode step."""
    began = time.process_time()
    for _ in range(steps):
        engine.step()
    return (time.process_time() - began) / steps * 1000


def main() -> None:
    """Measure and print."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    with free_device(), torch.inference_mode():
        engine = engine_for(settings)
        milliseconds_per_step(engine, settings.steps)
        if settings.profile:
            profile = cProfile.Profile()
            profile.runcall(milliseconds_per_step, engine, settings.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            return
        taken = [milliseconds_per_step(engine, settings.steps) for _ in range(settings.repeats)]
    print(
        f"{settings.slots:,} slots, {settings.context:,} tokens of context: "
        f"{median(taken):.2f} ms per step ({min(taken):.2f} to {max(taken):.2f})"
    )
    json.dump(provenance("cpu") | {"milliseconds": taken}, sys.stderr, indent=2, default=str)


if __name__ == "__main__":
    main()
