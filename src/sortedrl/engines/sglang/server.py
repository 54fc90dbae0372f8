"""A running SGLang server, reached over HTTP.

    ask -> POST /generate -> events -> pieces

The server belongs to one run: its weights are those of the run. It survives the run, and the run
survives it: a server that dies ends the streams with `EngineLost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

from sortedrl.engines.sglang.answer import Answer
from sortedrl.engines.sglang.trial import Trial, Verdict
from sortedrl.engines.streamed.backend import Ask, Limits, Piece
from sortedrl.engines.streamed.hand_over import remove_weights, write_weights
from sortedrl.engines.streamed.http import Refused, Server
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

_LOAD_SECONDS = 1800.0
_FLUSH_TRIES = 100
_FLUSH_PAUSE_SECONDS = 0.1


class SglangServer:
    """An SGLang server that somebody else started."""

    def __init__(self, server: Server, verdict: Verdict, *, hand_over: Path) -> None:
        """Use a server that has passed its trial; see `opened`."""
        self._server = server
        self._verdict = verdict
        self._hand_over = hand_over
        self._request_ids: dict[str, str] = {}
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
    ) -> SglangServer:
        """A server that was checked to be fit for what it will be asked.

        `slots` counts where the server does not say how many it has; `hand_over` is the folder for
        new weights, which the server must be able to read.
        """
        server = Server(url)
        trial = Trial(
            server, vocabulary=vocabulary, context=context, temperature=temperature, slots=slots
        )
        try:
            verdict = await trial.verdict()
        except BaseException:
            await server.close()
            raise
        return cls(server, verdict, hand_over=hand_over)

    @property
    def name(self) -> str:
        """What it is and where, for messages."""
        return f"SGLang {self._verdict.version} at {self._server.url}"

    @property
    def limits(self) -> Limits:
        """What it can be asked for."""
        return self._verdict.limits

    async def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        """Write an answer; raises `EngineLost` where the server is gone."""
        answer = Answer(ask, priority_sign=self._verdict.priority_sign)
        try:
            while not answer.is_over:
                if ask.id in self._broken_off:
                    yield Piece(tokens=(), logprobs=(), end="abort")
                    return
                request = answer.next_request()
                self._request_ids[ask.id] = answer.request_id
                async for event in self._server.events("/generate", request):
                    yield answer.piece(event)
                if answer.is_broken:
                    raise EngineLost(f"{self.name} broke an answer off without a word")
        finally:
            self._request_ids.pop(ask.id, None)
            self._broken_off.discard(ask.id)

    async def abort(self, ids: Sequence[str]) -> None:
        """Break these answers off: each stream ends with what it had.

        The server forgets to break off an answer that it does not know yet, so that one must be
        told again.
        """
        # Kept, for an answer whose stream is not followed yet.
        self._broken_off.update(ids)
        running = [self._request_ids[id_] for id_ in ids if id_ in self._request_ids]
        if not running:
            return
        if len(running) == len(self._request_ids):
            await self._server.post("/abort_request", {"abort_all": True})
        else:
            calls = (self._server.post("/abort_request", {"rid": id_}) for id_ in running)
            await asyncio.gather(*calls)

    async def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on, and forget every cached prefix."""
        # Nothing is being written, so these are answers that had ended before.
        self._broken_off.clear()
        folder = await asyncio.to_thread(write_weights, weights, self._hand_over.absolute())
        update = {
            "model_path": str(folder),
            # Where an answer is not quite gone yet, SGLang would end itself instead of waiting.
            "flush_cache": False,
            "weight_version": str(weights.version),
        }
        try:
            await self._server.post("/update_weights_from_disk", update, seconds=_LOAD_SECONDS)
        except Refused as error:
            raise EngineError(
                f"{self.name} did not take the new weights: {error}; it must be able to read "
                f"{folder}"
            ) from error
        for _ in range(_FLUSH_TRIES):
            with suppress(Refused):
                await self._server.post("/flush_cache")
                return
            await asyncio.sleep(_FLUSH_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} still holds cache of other answers after "
            f"{_FLUSH_TRIES * _FLUSH_PAUSE_SECONDS:g} s, which is wrong under new weights; "
            "does somebody else use it?"
        )

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        await self._server.close()
        remove_weights(self._hand_over)
