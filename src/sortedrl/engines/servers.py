"""Servers that generate answers: an HTTP client, and detection of the server type.

A broken connection raises `EngineLost`; an error response raises `Refused`, with the status and the
text of the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import httpx

from sortedrl.engines.streaming.backend import Backend, ServerRequirements
from sortedrl.engines.streaming.weight_files import WeightFolder
from sortedrl.errors import EngineError, EngineLost

_CONNECT_SECONDS = 10.0
_SHOWN_LETTERS = 300
_DONE = "[DONE]"
_NO_TOKEN = 2**31 - 1
_SIZE = re.compile(r"Vocabulary size: (\d+)|valid range is \[0, (\d+)\)")


class Refused(EngineError):
    """The server responded with an error."""

    def __init__(self, message: str, *, status: int) -> None:
        """Keep the HTTP status."""
        super().__init__(message)
        self.status = status


class Server:
    """One server, on one event loop."""

    def __init__(self, url: str) -> None:
        """Nothing is sent yet."""
        self.url = url.rstrip("/")
        # One stream per request: the engine decides how many run, not the client.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # A queued request receives nothing while others run.
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._client = httpx.AsyncClient(
            base_url=self.url, limits=limits, timeout=timeout, trust_env=False
        )

    async def get(self, path: str, *, seconds: float = 30.0) -> Any:  # noqa: ANN401
        """The response to a GET: JSON, or text if it is not JSON."""
        return await self._call("GET", path, seconds=seconds)

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        seconds: float = 60.0,
    ) -> Any:  # noqa: ANN401
        """The response to a POST of a JSON object: JSON, or text if it is not JSON."""
        return await self._call("POST", path, body=body, seconds=seconds)

    async def events(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[Any, None]:
        """The server-sent events of a POST, each one a JSON value."""
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code >= httpx.codes.BAD_REQUEST:
                    await response.aread()
                    raise self._refused(path, response)
                async for line in response.aiter_lines():
                    kind, _, data = line.partition(":")
                    if kind == "data" and data.strip() != _DONE:
                        yield json.loads(data)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        except json.JSONDecodeError as error:
            raise EngineLost(f"{self.url}{path} ended within an event: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        seconds: float,
    ) -> Any:  # noqa: ANN401
        try:
            response = await self._client.request(method, path, json=body, timeout=seconds)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if response.status_code >= httpx.codes.BAD_REQUEST:
            raise self._refused(path, response)
        try:
            return response.json()
        except json.JSONDecodeError:
            return response.text

    def _lost(self, error: httpx.HTTPError) -> EngineLost:
        # Several of its errors have no message.
        return EngineLost(f"{self.url} does not respond: {str(error) or type(error).__name__}")

    def _refused(self, path: str, response: httpx.Response) -> Refused:
        text = response.text.strip()[:_SHOWN_LETTERS]
        message = f"{self.url}{path} returned {response.status_code}: {text}"
        return Refused(message, status=response.status_code)


async def connect_server(
    url: str, required: ServerRequirements, *, weights_folder: Path | WeightFolder
) -> Backend:
    """A vLLM or SGLang server that meets the requirements."""
    # Both are clients of this module.
    from sortedrl.engines.sglang.sglang_server import SglangServer
    from sortedrl.engines.vllm.vllm_server import VllmServer

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

    No server reports it, but all mention it when they refuse an impossible token.
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
            f"vocabulary like one: {refusal}"
        )
    return int(size[1] or size[2])


async def _refusal(server: Server) -> str:
    """Its error for an impossible token; one of the two requests matches the server type."""
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
