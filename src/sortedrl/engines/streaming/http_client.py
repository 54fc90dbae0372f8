"""An HTTP client for inference servers: short calls with a time limit, and streams of events.

A broken connection raises `EngineLost`; an error response raises `Refused`, with the status and the
text of the server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from sortedrl.errors import EngineError, EngineLost

_CONNECT_SECONDS = 10.0
_SHOWN_LETTERS = 300
_DONE = "[DONE]"


class Refused(EngineError):
    """The server responded with an error."""

    def __init__(self, message: str, *, status: int) -> None:
        """Keep the HTTP status."""
        super().__init__(message)
        self.status = status


class Server:
    """One server, on one event loop."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        """Nothing is sent yet."""
        self.url = url.rstrip("/")
        # One stream per request: the engine decides how many run, not the client.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # A queued request is silent while others run.
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=timeout, trust_env=False
        )

    async def get(self, path: str, *, seconds: float = 30.0) -> Any:  # noqa: ANN401
        """The response to a GET: JSON, or text if it is not JSON."""
        return await self._call("GET", path, seconds=seconds)

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> Any:  # noqa: ANN401
        """The response to a POST of a JSON object: JSON, or text if it is not JSON."""
        return await self._call("POST", path, body=body, query=query, seconds=seconds)

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
        query: Mapping[str, str] | None = None,
        seconds: float,
    ) -> Any:  # noqa: ANN401
        try:
            response = await self._client.request(
                method, path, json=body, params=query, timeout=seconds
            )
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
