"""A running vLLM server, driven over HTTP and checked before it is used.

Prompts and answers travel as token ids. Only what the server has sent counts, so nothing is lost or
counted twice when an answer is aborted. A server that cannot do what a run asks for is refused,
with what was found and the command that starts it correctly.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sortedrl.engines.installed import VLLM
from sortedrl.engines.streaming.backend import (
    BackendLimits,
    Delta,
    GenerationRequest,
    ServerRequirements,
)
from sortedrl.engines.streaming.http_client import Refused, Server
from sortedrl.engines.streaming.weight_files import export_weights, remove_exported
from sortedrl.engines.vllm.worker_extension import RECEIVER
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

COMPLETIONS = "/v1/completions"
# It looks at its whole machine before it answers.
_SERVER_INFO_SECONDS = 120.0
_NO_TOKEN = 2**31 - 1
_LOGPROB_TOLERANCE = 0.05


def start_command(required: ServerRequirements) -> str:
    """The command that starts a server which meets the requirements."""
    slots = "SLOTS" if required.slots is None else str(required.slots)
    return (
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --scheduling-policy priority "
        "--logprobs-mode processed_logprobs --generation-config vllm --skip-tokenizer-init "
        f"--worker-extension-cls {RECEIVER} "
        f"--max-model-len {required.context} --max-num-seqs {slots}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerInfo:
    """A server that fits."""

    version: str
    model: str
    limits: BackendLimits
    has_receiver: bool
    """Whether our part of the workers is there, which renews everything on a CPU too."""


async def inspect_server(server: Server, required: ServerRequirements) -> VllmServerInfo:
    """What was found at the server; an `EngineError` where it does not fit."""
    try:
        version = await _version(server, required)
        model, context = await _model(server, required)
        config = await _config(server, required)
        slots = _slots(server, required, config)
        await _check_vocabulary(server, required, model=model)
        await _check_answer(server, required, model=model)
    except EngineLost as error:
        raise EngineError(f"{error}; start the server with: {start_command(required)}") from error
    limits = BackendLimits(slots=slots, context=context, vocabulary=required.vocabulary)
    extension = config["parallel_config"].get("worker_extension_cls")
    return VllmServerInfo(
        version=version, model=model, limits=limits, has_receiver=extension == RECEIVER
    )


async def _version(server: Server, required: ServerRequirements) -> str:
    try:
        answer = await server.get("/version")
    except Refused as error:
        raise _unfit(server, required, f"is no vLLM server: {error}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
        raise _unfit(server, required, f"is no vLLM server: /version gives {answer!r:.100}")
    version: str = answer["version"]
    VLLM.check(version, place=server.url, remedy="pip install 'sortedrl[vllm]' there")
    return version


async def _model(server: Server, required: ServerRequirements) -> tuple[str, int]:
    """The name and the context of the model that is served."""
    answer = await server.get("/v1/models")
    model = answer["data"][0]
    context: int = model["max_model_len"]
    if context < required.context:
        raise _unfit(
            server,
            required,
            f"serves {model['id']} with a context of {context} tokens, but prompts and answers "
            f"need {required.context}",
        )
    return model["id"], context


async def _config(server: Server, required: ServerRequirements) -> dict[str, Any]:
    """What the server was started with; refuses one that is not for training."""
    try:
        answer = await server.get("/server_info?config_format=json", seconds=_SERVER_INFO_SECONDS)
    except Refused as error:
        raise _unfit(
            server,
            required,
            "has no development endpoints, so it cannot be given new weights (it was started "
            "without VLLM_SERVER_DEV_MODE=1)",
        ) from error
    config: dict[str, Any] = answer["vllm_config"]
    return config


def _slots(server: Server, required: ServerRequirements, config: Mapping[str, Any]) -> int:
    """How many answers it writes at a time."""
    scheduler = config["scheduler_config"]
    if scheduler["policy"] != "priority":
        raise _unfit(
            server,
            required,
            f"has the scheduling policy {scheduler['policy']}, so it cannot keep our order",
        )
    engines: int = config["parallel_config"]["data_parallel_size"]
    slots: int = scheduler["max_num_seqs"] * engines
    if required.slots not in (None, slots):
        raise _unfit(
            server,
            required,
            f"has {slots} slots, not {required.slots}; leave slots out, or restart it",
        )
    return slots


async def _check_vocabulary(server: Server, required: ServerRequirements, *, model: str) -> None:
    # No endpoint tells it, but the refusal of a token that no model has does.
    request = {"model": model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(_NO_TOKEN): 0.0}}
    try:
        await server.post(COMPLETIONS, request)
    except Refused as error:
        size = re.search(r"Vocabulary size: (\d+)", str(error))
        if size is None:
            raise _unfit(server, required, f"does not tell its vocabulary: {error}") from error
        if int(size[1]) == required.vocabulary:
            return
        found = f"serves {model} with {size[1]} tokens"
    else:
        found = f"serves {model}, which accepts every token"
    raise _unfit(
        server,
        required,
        f"{found}, but the model that is trained has {required.vocabulary}; it must serve the same",
    )


async def _check_answer(server: Server, required: ServerRequirements, *, model: str) -> None:
    """Refuse log-probabilities that are missing, or not those of the temperature."""
    warm = await _top_two_gap(server, required, model=model, temperature=1.0)
    temperature = required.temperature
    if temperature in (0.0, 1.0):
        return
    lead = await _top_two_gap(server, required, model=model, temperature=temperature)
    if not math.isclose(lead * temperature, warm, rel_tol=_LOGPROB_TOLERANCE, abs_tol=1e-3):
        raise _unfit(
            server,
            required,
            "gives log-probabilities before temperature (it was started without --logprobs-mode "
            f"processed_logprobs), but answers are drawn at temperature {temperature:g}",
        )


async def _top_two_gap(
    server: Server, required: ServerRequirements, *, model: str, temperature: float
) -> float:
    """How much likelier the most likely token is than the next one, in nats."""
    body = completion_body([0], model=model, max_tokens=1) | {
        "temperature": temperature,
        "logprobs": 2,
        "stream": False,
    }
    try:
        answer = await server.post(COMPLETIONS, body)
    except Refused as error:
        raise _unfit(server, required, f"refuses a question like ours: {error}") from error
    choice = answer["choices"][0]
    if not choice.get("token_ids"):
        raise _unfit(server, required, "does not give the token ids of its answers")
    tops: list[Mapping[str, float]] = (choice.get("logprobs") or {}).get("top_logprobs") or []
    if not tops:
        raise _unfit(server, required, "does not give the log-probabilities of its tokens")
    best, second, *_ = sorted(tops[0].values(), reverse=True)
    return best - second


def completion_body(tokens: list[int], *, model: str, max_tokens: int) -> dict[str, Any]:
    """A question of token ids that is answered by token ids; sampling is still to be said."""
    return {
        "model": model,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "logprobs": 0,
        "return_token_ids": True,
        # Without a tokenizer it has no other names for them.
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stream": True,
        # The server may have other ideas, from the model's folder.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def _unfit(server: Server, required: ServerRequirements, reason: str) -> EngineError:
    return EngineError(f"{server.url} {reason}; start the server with: {start_command(required)}")


_RELOAD_SECONDS = 1800.0
_RESET_TRIES = 100
_RESET_PAUSE_SECONDS = 0.1
_ENDS = ("stop", "length", "abort", None)


class VllmServer:
    """A vLLM server, which lives on when this object is closed."""

    def __init__(self, server: Server, info: VllmServerInfo, *, weights_folder: Path) -> None:
        """Take over a server that was looked at; see `connect`."""
        self.name = f"vLLM {info.version} at {server.url}"
        self.limits = info.limits
        self._server = server
        self._model = info.model
        self._has_receiver = info.has_receiver
        self._weights_folder = weights_folder
        self._written: set[str] = set()
        self._aborted: set[str] = set()

    @classmethod
    async def connect(
        cls, url: str, required: ServerRequirements, *, weights_folder: Path
    ) -> VllmServer:
        """Inspect a running server, and refuse one that does not meet the requirements.

        New weights go through `weights_folder`, which the server must be able to read.
        """
        server = Server(url)
        try:
            info = await inspect_server(server, required)
        except BaseException:
            await server.close()
            raise
        return cls(server, info, weights_folder=weights_folder)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Write an answer; raises `EngineLost` where the server is gone."""
        if request.id in self._aborted:
            self._aborted.discard(request.id)
            yield Delta(tokens=(), logprobs=(), end="abort")
            return
        self._written.add(request.id)
        end = None
        try:
            async for event in self._server.events(COMPLETIONS, self._body(request)):
                delta = self._delta(event)
                end = delta.end
                yield delta
                if end is None and request.id in self._aborted:
                    # It was told before it knew of the answer.
                    await self._send_abort([request.id])
            if end is None and request.id not in self._aborted:
                raise EngineLost(f"{self.name} ended an answer in the middle")
        except Refused as error:
            raise await self._judged(error) from error
        finally:
            self._written.discard(request.id)
            self._aborted.discard(request.id)
        if end is None:
            # An answer that has no token yet ends without an event.
            yield Delta(tokens=(), logprobs=(), end="abort")

    async def abort(self, ids: Sequence[str]) -> None:
        """Break these answers off; each stream ends with what it had."""
        self._aborted |= set(ids)
        known = [id for id in ids if id in self._written]
        if known:
            await self._send_abort(known)

    async def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on, and forget every cached prefix."""
        # Nothing is being written, so these are answers that had ended before.
        self._aborted.clear()
        folder = await asyncio.to_thread(export_weights, weights, self._weights_folder.absolute())
        body: dict[str, object] = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(folder)},
        }
        if self._has_receiver:
            body = {"method": "read_weights", "kwargs": {"folder": str(folder)}}
        try:
            await self._server.post("/collective_rpc", body, seconds=_RELOAD_SECONDS)
            await self._reset_prefix_cache()
        except Refused as error:
            raise await self._judged(error) from error

    async def close(self) -> None:
        """Close the connections; the server stays."""
        await self._server.close()
        remove_exported(self._weights_folder)

    async def _reset_prefix_cache(self) -> None:
        for _ in range(_RESET_TRIES):
            if (await self._server.post("/reset_prefix_cache"))["success"]:
                return
            await asyncio.sleep(_RESET_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} does not forget its cached prefixes, because it writes answers that are "
            "not ours; under new weights they are wrong: give it to one run alone"
        )

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        question = completion_body(
            list(request.tokens), model=self._model, max_tokens=request.max_tokens
        )
        return question | {
            "request_id": request.id,
            "priority": request.priority,
            "stop_token_ids": sorted(request.stop_tokens),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }

    def _delta(self, event: Any) -> Delta:  # noqa: ANN401
        if "error" in event:
            error = event["error"]
            raise Refused(f"{self.name} says: {error['message']}", status=error["code"])
        (choice,) = event["choices"]
        tokens = choice["token_ids"]
        if choice["finish_reason"] not in _ENDS:
            raise EngineError(f"{self.name} ended an answer with {choice['finish_reason']!r}")
        return Delta(
            tokens=tokens,
            logprobs=choice["logprobs"]["token_logprobs"],
            end=choice["finish_reason"],
        )

    async def _send_abort(self, ids: Sequence[str]) -> None:
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
