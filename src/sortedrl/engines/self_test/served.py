"""The vocabulary of a server whose model is not known here.

No server tells it when asked. But all name it when they refuse a token that no model has.
"""

from __future__ import annotations

import re

from sortedrl.engines.streamed.http import Refused, Server
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
