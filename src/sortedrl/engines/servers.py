"""Connects to a running inference server by its URL; asks it whether it is vLLM or SGLang."""

from __future__ import annotations

from pathlib import Path

from sortedrl.engines.sglang.sglang_server import SglangServer
from sortedrl.engines.streaming.backend import Backend
from sortedrl.engines.streaming.http_client import Refused, Server
from sortedrl.engines.vllm.vllm_server import VllmServer
from sortedrl.errors import EngineError, EngineLost


async def opened_server(
    url: str,
    *,
    vocabulary: int,
    context: int,
    temperature: float,
    slots: int | None,
    hand_over: Path,
) -> Backend:
    """A vLLM or SGLang server, checked to be fit for what it will be asked."""
    kind = SglangServer if await _is_sglang(url) else VllmServer
    return await kind.opened(
        url,
        vocabulary=vocabulary,
        context=context,
        temperature=temperature,
        slots=slots,
        hand_over=hand_over,
    )


async def _is_sglang(url: str) -> bool:
    server = Server(url)
    try:
        await server.get("/model_info")
    except Refused:
        return False
    except EngineLost as error:
        raise EngineError(
            f"{error}; start a vLLM or SGLang server there first (docs/engines.md has the "
            "commands), or give the address of one that runs"
        ) from error
    finally:
        await server.close()
    return True
