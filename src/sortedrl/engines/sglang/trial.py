"""An SGLang server on trial, before anything depends on it.

It passes if it can be asked for what a run asks for. If not, it is refused with what was found and
the command that starts it right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedrl.engines.sglang.answer import HIGH_FIRST, LOW_FIRST, NO_ORDER, server_context
from sortedrl.engines.streamed.backend import Limits
from sortedrl.engines.streamed.http import Refused, Server
from sortedrl.engines.versions import SGLANG
from sortedrl.errors import EngineError, EngineLost

_COMPARED = 8
_CLOSE_ENOUGH = 0.02
_SPREAD = 0.05
_BAD_REQUEST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a server that passed is."""

    version: str
    limits: Limits
    priority_sign: int


class Trial:
    """The questions that one server is asked."""

    def __init__(
        self,
        server: Server,
        *,
        vocabulary: int,
        context: int,
        temperature: float,
        slots: int | None,
    ) -> None:
        """Nothing is asked yet."""
        self._server = server
        self._vocabulary = vocabulary
        self._context = context
        self._temperature = temperature
        self._slots = slots

    async def verdict(self) -> Verdict:
        """What it is; raises `EngineError` if it does not pass."""
        info = await self._info()
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
        return Verdict(
            version=version,
            limits=Limits(
                slots=self._slots_of(info), context=self._context, vocabulary=self._vocabulary
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
        )

    def _refusal(self, must: str, found: str) -> EngineError:
        return EngineError(
            f"the SGLang server {self._server.url} {must}, but {found}; "
            f"start it with: {self._command}"
        )

    async def _info(self) -> Mapping[str, Any]:
        try:
            info = await self._server.get("/server_info")
        except Refused as error:
            raise self._refusal("must answer /server_info", f"it is no such server: {error}") from (
                error
            )
        except EngineLost as error:
            raise self._refusal("must be running", str(error)) from error
        if not isinstance(info, Mapping) or "max_req_input_len" not in info:
            raise self._refusal("must answer /server_info", "it answered in words of its own")
        return info

    def _check_arguments(self, info: Mapping[str, Any]) -> None:
        if info["max_req_input_len"] < self._context:
            raise self._refusal(
                f"must have room for {self._context} tokens of prompt and answer",
                f"it has room for {info['max_req_input_len']} (its context less "
                f"{server_context(0)}, or its whole cache)",
            )
        if not info.get("incremental_streaming_output"):
            raise self._refusal(
                "must send each token once", "it repeats the whole answer with every token"
            )

    def _slots_of(self, info: Mapping[str, Any]) -> int:
        slots = info.get("max_running_requests") or self._slots
        if slots is None:
            raise self._refusal("must have a number of slots", "it was given none")
        return int(slots)

    async def _check_vocabulary(self) -> None:
        # SGLang knows its vocabulary but does not say it; it refuses what lies outside.
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
                f"must give log-probabilities at temperature {self._temperature:g}",
                "it gives those from before the temperature; unset SGLANG_RETURN_ORIGINAL_LOGPROB",
            )

    async def _spread(self, temperature: float) -> float:
        """How far apart the log-probabilities of the likeliest tokens are."""
        answer = await self._first_token(temperature)
        about = answer.get("meta_info", {})
        if len(answer.get("output_ids", ())) != 1:
            raise self._refusal("must give token ids", f"it gave {sorted(answer)}")
        if len(about.get("output_token_logprobs", ())) != 1:
            raise self._refusal("must give log-probabilities", f"it gave {sorted(about)}")
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
            # SGLang fails at an answer without one, where low priorities go first.
            "priority": 0,
        }
        if looked_up is not None:
            body["token_ids_logprob"] = [looked_up]
        answer = await self._server.post("/generate", body)
        if not isinstance(answer, Mapping):
            raise self._refusal("must answer /generate", f"it said {str(answer)[:100]!r}")
        return answer
