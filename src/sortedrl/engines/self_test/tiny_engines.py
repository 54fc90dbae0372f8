"""Opens an engine for its self-test, as small as it gets, or connects to a running server.

No server reports its vocabulary when asked; but all name it when they refuse a token that no model
has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.installed import Kind
from sortedrl.engines.self_test.scenario import CONTEXT, MAX_TOKENS, SAMPLING, SLOTS
from sortedrl.engines.streaming.backend import Backend
from sortedrl.engines.streaming.http_client import Refused, Server
from sortedrl.errors import EngineError

_NO_TOKEN = 2**31 - 1
_SIZE = re.compile(r"Vocabulary size: (\d+)|valid range is \[0, (\d+)\)")


async def served_vocabulary(url: str) -> int:
    """How many tokens the model behind a URL has."""
    server = Server(url)
    try:
        refusal = await _refusal(server)
    finally:
        await server.close()
    size = _SIZE.search(refusal)
    if size is None:
        raise EngineError(
            f"{server.url} must be a server of vLLM or SGLang, but it does not tell its "
            f"vocabulary as they do: {refusal}"
        )
    return int(size[1] or size[2])


async def _refusal(server: Server) -> str:
    """What it says to a token that it cannot have; one of two ways to ask is that of its kind."""
    vllm = {"prompt": [0], "max_tokens": 1, "logit_bias": {str(_NO_TOKEN): 0.0}}
    sglang = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [_NO_TOKEN],
    }
    said = "nothing was refused"
    for path, body in (("/generate", sglang), ("/v1/completions", vllm)):
        try:
            await server.post(path, body)
        except Refused as error:
            said = str(error)
            if _SIZE.search(said):
                break
    return said


_CACHE_BYTES = 64 << 20


def usual_device() -> torch.device:
    """Where an engine writes unless told otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usual_dtype(device: torch.device) -> torch.dtype:
    """The precision in which it does."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def opened(kind: Kind, model: Path, *, device: torch.device, dtype: torch.dtype) -> RolloutEngine:
    """An engine of this kind with the model in a folder; no token ends its answers."""
    if kind == "native":
        return _native(model, device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    if kind == "vllm":
        from sortedrl.engines.vllm.vllm_process import VllmProcess

        return _streamed(
            lambda: VllmProcess.opened(
                model=str(model),
                slots=SLOTS,
                context=CONTEXT,
                dtype=name,
                options={"kv_cache_memory_bytes": _CACHE_BYTES, "enforce_eager": True},
            )
        )
    from sortedrl.engines.sglang.sglang_process import SglangProcess

    return _streamed(
        lambda: SglangProcess.opened(
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


def opened_at(url: str, *, vocabulary: int, hand_over: Path) -> RolloutEngine:
    """A running server; the folder for new weights stays empty."""
    from sortedrl.engines.servers import opened_server

    return _streamed(
        lambda: opened_server(
            url,
            vocabulary=vocabulary,
            context=CONTEXT,
            temperature=SAMPLING.temperature,
            slots=None,
            hand_over=hand_over,
        )
    )


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
