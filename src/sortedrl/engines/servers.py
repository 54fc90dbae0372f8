"""Connects to a running vLLM or SGLang server by its URL."""

from __future__ import annotations

import re
from pathlib import Path

from sortedrl.engines.sglang.sglang_server import SglangServer
from sortedrl.engines.streaming.backend import Backend, ServerRequirements
from sortedrl.engines.streaming.http_client import Refused, Server
from sortedrl.engines.streaming.weight_files import WeightFolder
from sortedrl.engines.vllm.vllm_server import VllmServer
from sortedrl.errors import EngineError, EngineLost

_NO_TOKEN = 2**31 - 1
_SIZE = re.compile(r"Vocabulary size: (\d+)|valid range is \[0, (\d+)\)")


async def connect_server(
    url: str, required: ServerRequirements, *, weights_folder: Path | WeightFolder
) -> Backend:
    """A vLLM or SGLang server that meets the requirements."""
    kind = SglangServer if await _is_sglang(url) else VllmServer
    return await kind.connect(url, required, weights_folder=weights_folder)


async def _is_sglang(url: str) -> bool:
    server = Server(url)
    try:
        await server.get("/model_info")
    except Refused:
        return False
    except EngineLost as error:
        raise EngineError(
            f"{error}; start a vLLM or SGLang server there first (docs/how-to/engines.md has the "
            "commands), or give the address of one that runs"
        ) from error
    finally:
        await server.close()
    return True


async def served_vocabulary(url: str) -> int:
    """The vocabulary size of the model behind a URL.

    No server reports it, but all name it when they refuse a token that no model has.
    """
    server = Server(url)
    try:
        refusal = await _refusal(server)
    finally:
        await server.close()
    size = _SIZE.search(refusal)
    if size is None:
        raise EngineError(
            f"{server.url} must be a vLLM or SGLang server, but does not report its "
            f"vocabulary as they do: {refusal}"
        )
    return int(size[1] or size[2])


async def _refusal(server: Server) -> str:
    """Its error for an impossible token; one of the two requests fits its kind."""
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
