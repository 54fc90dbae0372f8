"""A vLLM server that somebody has started, driven over HTTP.

Prompts go as token ids and answers come as token ids. What the server has sent counts: nothing
else is known of an answer, so nothing is lost or counted twice when one is broken off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sortedrl.engines.streamed.backend import Ask, Piece
from sortedrl.engines.streamed.hand_over import remove_weights, write_weights
from sortedrl.engines.streamed.http import Refused, Server
from sortedrl.engines.vllm.inspection import COMPLETIONS, Found, Wanted, completion_body, inspected
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

_RELOAD_SECONDS = 1800.0
_FORGET_TRIES = 100
_FORGET_PAUSE_SECONDS = 0.1
_ENDS = ("stop", "length", "abort", None)


class VllmServer:
    """A vLLM server, which lives on when this object is closed."""

    def __init__(self, server: Server, found: Found, *, hand_over: Path) -> None:
        """Take over a server that was looked at; see `opened`."""
        self.name = f"vLLM {found.version} at {server.url}"
        self.limits = found.limits
        self._server = server
        self._model = found.model
        self._has_receiver = found.has_receiver
        self._hand_over = hand_over
        self._written: set[str] = set()
        self._broken_off: set[str] = set()

    @classmethod
    async def opened(
        cls,
        url: str,
        *,
        vocabulary: int,
        context: int,
        temperature: float,
        slots: int | None,
        hand_over: Path,
    ) -> VllmServer:
        """Look at the server and refuse one that does not fit.

        `hand_over` is a folder that the server can read too: new weights go through it. `slots` is
        what the server was started with unless given.
        """
        server = Server(url)
        wanted = Wanted(
            vocabulary=vocabulary, context=context, temperature=temperature, slots=slots
        )
        try:
            found = await inspected(server, wanted)
        except BaseException:
            await server.close()
            raise
        return cls(server, found, hand_over=hand_over)

    async def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        """Write an answer; raises `EngineLost` where the server is gone."""
        if ask.id in self._broken_off:
            self._broken_off.discard(ask.id)
            yield Piece(tokens=(), logprobs=(), end="abort")
            return
        self._written.add(ask.id)
        end = None
        try:
            async for event in self._server.events(COMPLETIONS, self._body(ask)):
                piece = self._piece(event)
                end = piece.end
                yield piece
                if end is None and ask.id in self._broken_off:
                    # It was told before it knew of the answer.
                    await self._tell_to_abort([ask.id])
            if end is None and ask.id not in self._broken_off:
                raise EngineLost(f"{self.name} ended an answer in the middle")
        except Refused as error:
            raise await self._judged(error) from error
        finally:
            self._written.discard(ask.id)
            self._broken_off.discard(ask.id)
        if end is None:
            # An answer that has no token yet ends without a word.
            yield Piece(tokens=(), logprobs=(), end="abort")

    async def abort(self, ids: Sequence[str]) -> None:
        """Break these answers off; each stream ends with what it had."""
        self._broken_off |= set(ids)
        known = [id for id in ids if id in self._written]
        if known:
            await self._tell_to_abort(known)

    async def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on, and forget every cached prefix."""
        # Nothing is being written, so these are answers that had ended before.
        self._broken_off.clear()
        folder = await asyncio.to_thread(write_weights, weights, self._hand_over.absolute())
        body: dict[str, object] = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(folder)},
        }
        if self._has_receiver:
            body = {"method": "read_weights", "kwargs": {"folder": str(folder)}}
        try:
            await self._server.post("/collective_rpc", body, seconds=_RELOAD_SECONDS)
            await self._forget_prefixes()
        except Refused as error:
            raise await self._judged(error) from error

    async def close(self) -> None:
        """Close the connections; the server stays."""
        await self._server.close()
        remove_weights(self._hand_over)

    async def _forget_prefixes(self) -> None:
        for _ in range(_FORGET_TRIES):
            if (await self._server.post("/reset_prefix_cache"))["success"]:
                return
            await asyncio.sleep(_FORGET_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} does not forget its cached prefixes, because it writes answers that are "
            "not ours; under new weights they are wrong: give it to one run alone"
        )

    def _body(self, ask: Ask) -> dict[str, Any]:
        sampling = ask.sampling
        question = completion_body(list(ask.tokens), model=self._model, max_tokens=ask.max_tokens)
        return question | {
            "request_id": ask.id,
            "priority": ask.priority,
            "stop_token_ids": sorted(ask.stop_tokens),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }

    def _piece(self, event: Any) -> Piece:  # noqa: ANN401
        if "error" in event:
            error = event["error"]
            raise Refused(f"{self.name} says: {error['message']}", status=error["code"])
        (choice,) = event["choices"]
        tokens = choice["token_ids"]
        if choice["finish_reason"] not in _ENDS:
            raise EngineError(f"{self.name} ended an answer with {choice['finish_reason']!r}")
        return Piece(
            tokens=tokens,
            logprobs=choice["logprobs"]["token_logprobs"],
            end=choice["finish_reason"],
        )

    async def _tell_to_abort(self, ids: Sequence[str]) -> None:
        # Its name for the first answer to a question.
        names = [f"cmpl-{id}-0" for id in ids]
        try:
            await self._server.post("/abort_requests", {"request_ids": names})
        except Refused as error:
            raise await self._judged(error) from error

    async def _judged(self, refusal: Refused) -> EngineError:
        """`EngineLost` where the engine behind the server has died, else the refusal itself."""
        if refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return refusal
        try:
            await self._server.get("/health")
        except (Refused, EngineLost):
            return EngineLost(f"{self.name} is gone: {refusal}")
        return refusal
