"""A running SGLang server, reached over HTTP and checked before it is used.

    request -> POST /generate -> events -> tokens

The server belongs to one run: its weights are those of the run. It keeps running afterwards. A
server that dies ends the streams with `EngineLost`. One that does not meet the requirements of a
run is refused, with the reason and the command that starts it correctly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.engines.installed import SGLANG
from sortedrl.engines.servers import Refused, Server
from sortedrl.engines.sglang.sglang_request import (
    HIGH_FIRST,
    LOW_FIRST,
    NO_ORDER,
    SglangStream,
    scores_of,
    scoring_body,
    server_context,
)
from sortedrl.engines.streaming.backend import (
    BackendLimits,
    Delta,
    GenerationRequest,
    ServerRequirements,
)
from sortedrl.engines.streaming.weight_files import WeightFolder
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

_COMPARED = 8
_CLOSE_ENOUGH = 0.02
_SPREAD = 0.05
_BAD_REQUEST = 400
_SEEDED = "enable_deterministic_inference"
_NO_SEEDS = "it was started without --enable-deterministic-inference, and so ignores seeds"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServerInfo:
    """A server that meets the requirements."""

    version: str
    limits: BackendLimits
    priority_sign: int


class _Inspection:
    def __init__(self, server: Server, required: ServerRequirements) -> None:
        """Nothing is sent yet."""
        self._server = server
        self._vocabulary = required.vocabulary
        self._context = required.context
        self._temperature = required.temperature
        self._slots = required.slots
        self._needs_seeds = required.needs_seeds

    async def result(self) -> SglangServerInfo:
        """Its properties; raises `EngineError` if it does not meet the requirements."""
        info = await self._server_info()
        version = str(info["version"])
        SGLANG.check(
            version,
            place=self._server.url,
            remedy=f"pip install 'sglang{SGLANG.tested}' there, and start it with: {self._command}",
        )
        self._check_arguments(info)
        await self._check_vocabulary()
        await self._check_logprobs()
        has_low_first = info.get("schedule_low_priority_values_first")
        sign = LOW_FIRST if has_low_first else HIGH_FIRST
        return SglangServerInfo(
            version=version,
            limits=BackendLimits(
                slots=self._slots_of(info),
                context=self._context,
                vocabulary=self._vocabulary,
                no_seeds=None if info.get(_SEEDED) else _NO_SEEDS,
            ),
            priority_sign=sign if info.get("enable_priority_scheduling") else NO_ORDER,
        )

    @property
    def _command(self) -> str:
        return (
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server "
            "--model-path MODEL --skip-tokenizer-init --incremental-streaming-output "
            f"--context-length {server_context(self._context)} "
            f"--max-running-requests {self._slots or 'SLOTS'} --enable-priority-scheduling "
            "--disable-priority-preemption"
            f"{' --enable-deterministic-inference' if self._needs_seeds else ''}"
        )

    def _refusal(self, must: str, found: str) -> EngineError:
        return EngineError(
            f"the SGLang server {self._server.url} {must}, but {found}; "
            f"start it with: {self._command}"
        )

    async def _server_info(self) -> Mapping[str, Any]:
        try:
            info = await self._server.get("/server_info")
        except Refused as error:
            raise self._refusal("must answer /server_info", f"it does not: {error}") from (error)
        except EngineLost as error:
            raise self._refusal("must be running", str(error)) from error
        if not isinstance(info, Mapping) or "max_req_input_len" not in info:
            raise self._refusal("must answer /server_info", "its response has another format")
        return info

    def _check_arguments(self, info: Mapping[str, Any]) -> None:
        if info["max_req_input_len"] < self._context:
            raise self._refusal(
                f"must have room for {self._context} tokens of prompt and answer",
                f"it has room for {info['max_req_input_len']} (its context less "
                f"{server_context(0)}, or its whole KV cache)",
            )
        if self._needs_seeds and not info.get(_SEEDED):
            raise self._refusal("must draw each answer from its own seed", _NO_SEEDS)
        if not info.get("incremental_streaming_output"):
            raise self._refusal(
                "must send each token once", "it repeats the whole answer with every token"
            )

    def _slots_of(self, info: Mapping[str, Any]) -> int:
        slots = info.get("max_running_requests") or self._slots
        if slots is None:
            raise self._refusal("must have a number of slots", "it reports none")
        return int(slots)

    async def _check_vocabulary(self) -> None:
        # SGLang does not report its vocabulary, but refuses token ids outside of it.
        must = f"must have the model that is trained, with a vocabulary of {self._vocabulary}"
        try:
            await self._first_token(self._temperature, looked_up=self._vocabulary - 1)
        except Refused as error:
            raise self._refusal(must, f"its vocabulary is smaller: {error}") from error
        try:
            await self._first_token(self._temperature, looked_up=self._vocabulary)
        except Refused as error:
            if error.status != _BAD_REQUEST:
                raise
        else:
            raise self._refusal(must, "its vocabulary is larger")

    async def _check_logprobs(self) -> None:
        """Refuse log-probabilities that are not those at the temperature.

        Twice the temperature halves the distance between two log-probabilities. Those from before
        the temperature stay the same.
        """
        if self._temperature in (0, 1):
            await self._spread(self._temperature)
            return
        at_once, at_twice = [await self._spread(self._temperature * by) for by in (1, 2)]
        if at_once > _SPREAD and abs(at_once - 2 * at_twice) > _CLOSE_ENOUGH * at_once:
            raise self._refusal(
                f"must return log-probabilities at temperature {self._temperature:g}",
                "it returns those before temperature; unset SGLANG_RETURN_ORIGINAL_LOGPROB",
            )

    async def _spread(self, temperature: float) -> float:
        """The range of the log-probabilities of the most likely tokens."""
        answer = await self._first_token(temperature)
        about = answer.get("meta_info", {})
        if len(answer.get("output_ids", ())) != 1:
            raise self._refusal("must return token ids", f"it returned {sorted(answer)}")
        if len(about.get("output_token_logprobs", ())) != 1:
            raise self._refusal("must return log-probabilities", f"it returned {sorted(about)}")
        (likeliest,) = about["output_top_logprobs"]
        logprobs = [logprob for logprob, *_ in likeliest]
        return float(max(logprobs) - min(logprobs))

    async def _first_token(
        self, temperature: float, *, looked_up: int | None = None
    ) -> Mapping[str, Any]:
        body: dict[str, object] = {
            "input_ids": [0, 1],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": min(_COMPARED, self._vocabulary),
            # Required where low priorities go first.
            "priority": 0,
        }
        if looked_up is not None:
            body["token_ids_logprob"] = [looked_up]
        answer = await self._server.post("/generate", body)
        if not isinstance(answer, Mapping):
            raise self._refusal("must answer /generate", f"it returned {str(answer)[:100]!r}")
        return answer


_LOAD_SECONDS = 1800.0
_FLUSH_TRIES = 100
_FLUSH_PAUSE_SECONDS = 0.1


class SglangServer:
    """A running SGLang server, which keeps running when this object is closed."""

    def __init__(
        self, server: Server, info: SglangServerInfo, *, weights_folder: WeightFolder
    ) -> None:
        """Use a server that was inspected; see `connect`."""
        self._server = server
        self._info = info
        self._weights_folder = weights_folder
        self._request_ids: dict[str, str] = {}
        self._aborted: set[str] = set()

    @classmethod
    async def connect(
        cls, url: str, required: ServerRequirements, *, weights_folder: Path | WeightFolder
    ) -> SglangServer:
        """Inspect a running server, and refuse one that does not meet the requirements.

        New weights go through `weights_folder`, which the server must be able to read; servers that
        share it read the same files. The required
        `slots` count where the server does not report its own.
        """
        server = Server(url)
        try:
            info = await _Inspection(server, required).result()
        except BaseException:
            await server.close()
            raise
        return cls(server, info, weights_folder=WeightFolder.of(weights_folder))

    @property
    def name(self) -> str:
        """Version and address, for messages."""
        return f"SGLang {self._info.version} at {self._server.url}"

    @property
    def limits(self) -> BackendLimits:
        """What it can do."""
        return self._info.limits

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Generate an answer; raises `EngineLost` if the server is gone."""
        state = SglangStream(request, priority_sign=self._info.priority_sign)
        try:
            while not state.is_over:
                if request.id in self._aborted:
                    yield Delta(tokens=(), logprobs=(), end="abort")
                    return
                body = state.next_body()
                self._request_ids[request.id] = state.request_id
                async for event in self._server.events("/generate", body):
                    yield state.delta(event)
                if state.is_broken:
                    raise EngineLost(f"{self.name} ended a stream without a finish reason")
        finally:
            self._request_ids.pop(request.id, None)
            self._aborted.discard(request.id)

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these requests: each stream ends with its tokens so far.

        The server ignores the abort of a request that has not reached it yet, so it is repeated.
        """
        # Kept for a request whose stream has not started yet.
        self._aborted.update(ids)
        running = [self._request_ids[id_] for id_ in ids if id_ in self._request_ids]
        if not running:
            return
        if len(running) == len(self._request_ids):
            await self._server.post("/abort_request", {"abort_all": True})
        else:
            calls = (self._server.post("/abort_request", {"rid": id_}) for id_ in running)
            await asyncio.gather(*calls)

    async def load_weights(self, weights: Weights) -> None:
        """Load these weights and reset the prefix cache."""
        # No request is running, so these had ended before their abort.
        self._aborted.clear()
        folder = await asyncio.to_thread(self._weights_folder.export, weights)
        update = {
            "model_path": str(folder),
            # SGLang would exit instead of waiting for a request that is being aborted.
            "flush_cache": False,
            "weight_version": str(weights.version),
        }
        try:
            await self._server.post("/update_weights_from_disk", update, seconds=_LOAD_SECONDS)
        except Refused as error:
            raise EngineError(
                f"{self.name} did not load the new weights: {error}; it must be able to read "
                f"{folder}"
            ) from error
        for _ in range(_FLUSH_TRIES):
            with suppress(Refused):
                await self._server.post("/flush_cache")
                return
            await asyncio.sleep(_FLUSH_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} cannot flush its cache after {_FLUSH_TRIES * _FLUSH_PAUSE_SECONDS:g} s, "
            "because it runs other requests; use the server for one run only"
        )

    async def score(self, tokens: Sequence[int], *, start: int) -> list[float]:
        """Log-probabilities at temperature 1 of the tokens from `start` on."""
        body = scoring_body(tokens, start=start)
        if self._info.priority_sign:
            body["priority"] = 0
        answer = await self._server.post("/generate", body, seconds=_LOAD_SECONDS)
        return scores_of(answer, count=len(tokens) - start)

    async def sleep(self) -> bool:
        """Do nothing: a server does not share its GPU."""
        return False

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._server.close()
        self._weights_folder.remove()
