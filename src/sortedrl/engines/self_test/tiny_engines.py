"""Starts an engine for its self-test, as small as possible, or connects to a running server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.installed import Kind
from sortedrl.engines.self_test.scenario import CONTEXT, MAX_TOKENS, SAMPLING, SLOTS
from sortedrl.engines.streaming.backend import Backend, ServerRequirements

_CACHE_BYTES = 64 << 20


def default_device() -> torch.device:
    """The default device of engines."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """The default precision on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def start_engine(
    kind: Kind, model: Path, *, device: torch.device, dtype: torch.dtype
) -> RolloutEngine:
    """An engine of this kind with the model in a folder; it has no stop tokens."""
    if kind == "native":
        return _native(model, device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    if kind == "vllm":
        from sortedrl.engines.vllm.vllm_process import VllmProcess

        return _streamed(
            lambda: VllmProcess.start(
                model=str(model),
                slots=SLOTS,
                context=CONTEXT,
                dtype=name,
                options={"kv_cache_memory_bytes": _CACHE_BYTES, "enforce_eager": True},
            )
        )
    from sortedrl.engines.sglang.sglang_process import SglangProcess

    return _streamed(
        lambda: SglangProcess.start(
            model=str(model),
            slots=SLOTS,
            context=CONTEXT,
            dtype=name,
            seed=0,
            memory_share=None,
            device=device.type,
            options={"max_total_tokens": 2 * SLOTS * CONTEXT, "disable_cuda_graph": True},
        )
    )


def connected_engine(url: str, *, vocabulary: int, weights_folder: Path) -> RolloutEngine:
    """A running server; nothing is written to the folder for weights."""
    from sortedrl.engines.servers import connect_server

    required = ServerRequirements(
        vocabulary=vocabulary, context=CONTEXT, temperature=SAMPLING.temperature
    )
    return _streamed(lambda: connect_server(url, required, weights_folder=weights_folder))


def _native(model: Path, *, device: torch.device, dtype: torch.dtype) -> RolloutEngine:
    from sortedrl.engines.native import NativeEngine
    from sortedrl.models.loading import load_model

    return NativeEngine(
        load_model(model, dtype=dtype, device=device),
        slots=SLOTS,
        max_tokens=MAX_TOKENS,
        sampling=SAMPLING,
        stop_tokens=(),
        cache_bytes=_CACHE_BYTES,
    )


def _streamed(opening: Callable[[], Coroutine[Any, Any, Backend]]) -> RolloutEngine:
    from sortedrl.engines.streaming.streamed_engine import StreamedEngine

    return StreamedEngine(opening, max_tokens=MAX_TOKENS, stop_tokens=(), sampling=SAMPLING)
