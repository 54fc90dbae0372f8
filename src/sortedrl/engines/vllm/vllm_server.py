"""A running vLLM server, driven over HTTP and checked before it is used.

Prompts and answers are exchanged as token ids. Only tokens that the server has sent count, so
nothing is lost or counted twice when a request is aborted. A server that does not meet the
requirements of a run is refused, with the reason and the command that starts it correctly.
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
from sortedrl.engines.servers import Refused, Server
from sortedrl.engines.streaming.backend import (
    BackendLimits,
    Delta,
    GenerationRequest,
    ServerRequirements,
)
from sortedrl.engines.streaming.weight_files import WeightFolder
from sortedrl.engines.vllm.worker_extension import RECEIVER
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

COMPLETIONS = "/v1/completions"
# It collects the environment of the machine first.
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
    """A server that meets the requirements."""

    version: str
    model: str
    limits: BackendLimits
    has_receiver: bool
    """Whether it has our worker extension, which also updates packed weights on a CPU."""


async def inspect_server(server: Server, required: ServerRequirements) -> VllmServerInfo:
    """Inspect a server; raises `EngineError` if it does not meet the requirements."""
    try:
        return await _Inspection(server, required).result()
    except EngineLost as error:
        raise EngineError(f"{error}; start the server with: {start_command(required)}") from error


class _Inspection:
    """The checks of one server."""

    def __init__(self, server: Server, required: ServerRequirements) -> None:
        self._server, self._required = server, required

    async def result(self) -> VllmServerInfo:
        version = await self._version()
        model, context = await self._model()
        config = await self._config()
        slots = self._slots(config)
        await self._check_vocabulary(model)
        await self._check_answer(model)
        vocabulary = self._required.vocabulary
        return VllmServerInfo(
            version=version,
            model=model,
            limits=BackendLimits(slots=slots, context=context, vocabulary=vocabulary),
            has_receiver=config["parallel_config"].get("worker_extension_cls") == RECEIVER,
        )

    def _unmet(self, reason: str) -> EngineError:
        command = start_command(self._required)
        return EngineError(f"{self._server.url} {reason}; start the server with: {command}")

    async def _version(self) -> str:
        try:
            answer = await self._server.get("/version")
        except Refused as error:
            raise self._unmet(f"is not a vLLM server: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise self._unmet(f"is not a vLLM server: /version returns {answer!r:.100}")
        version: str = answer["version"]
        VLLM.check(version, place=self._server.url, remedy="pip install 'sortedrl[vllm]' there")
        return version

    async def _model(self) -> tuple[str, int]:
        """The name and the context length of the served model."""
        model = (await self._server.get("/v1/models"))["data"][0]
        context: int = model["max_model_len"]
        if context < self._required.context:
            raise self._unmet(
                f"serves {model['id']} with a context of {context} tokens, but prompts and answers "
                f"need {self._required.context}"
            )
        return model["id"], context

    async def _config(self) -> dict[str, Any]:
        """The configuration of the server; refuses one without the endpoints for training."""
        try:
            answer = await self._server.get(
                "/server_info?config_format=json", seconds=_SERVER_INFO_SECONDS
            )
        except Refused as error:
            raise self._unmet(
                "has no development endpoints, so it cannot load new weights (it was started "
                "without VLLM_SERVER_DEV_MODE=1)"
            ) from error
        config: dict[str, Any] = answer["vllm_config"]
        return config

    def _slots(self, config: Mapping[str, Any]) -> int:
        """Requests that it runs at the same time."""
        scheduler, wanted = config["scheduler_config"], self._required.slots
        if scheduler["policy"] != "priority":
            raise self._unmet(
                f"has the scheduling policy {scheduler['policy']}, but a run needs priority"
            )
        slots: int = scheduler["max_num_seqs"] * config["parallel_config"]["data_parallel_size"]
        if wanted not in (None, slots):
            raise self._unmet(f"has {slots} slots, not {wanted}; leave slots out, or restart it")
        return slots

    async def _check_vocabulary(self, model: str) -> None:
        # No endpoint reports it, but the error for an impossible token does.
        bias = {str(_NO_TOKEN): 0.0}
        request = {"model": model, "prompt": [0], "max_tokens": 1, "logit_bias": bias}
        vocabulary = self._required.vocabulary
        try:
            await self._server.post(COMPLETIONS, request)
        except Refused as error:
            size = re.search(r"Vocabulary size: (\d+)", str(error))
            if size is None:
                raise self._unmet(f"does not report its vocabulary: {error}") from error
            if int(size[1]) == vocabulary:
                return
            found = f"serves {model} with {size[1]} tokens"
        else:
            found = f"serves {model}, which accepts every token"
        raise self._unmet(
            f"{found}, but the model that is trained has {vocabulary}; it must serve the same"
        )

    async def _check_answer(self, model: str) -> None:
        """Refuse log-probabilities that are missing, or not scaled by the temperature."""
        warm = await self._top_two_gap(model, temperature=1.0)
        temperature = self._required.temperature
        if temperature in (0.0, 1.0):
            return
        lead = await self._top_two_gap(model, temperature=temperature)
        if not math.isclose(lead * temperature, warm, rel_tol=_LOGPROB_TOLERANCE, abs_tol=1e-3):
            raise self._unmet(
                "returns log-probabilities before temperature (it was started without "
                "--logprobs-mode processed_logprobs), but answers are sampled at temperature "
                f"{temperature:g}"
            )

    async def _top_two_gap(self, model: str, *, temperature: float) -> float:
        """The difference of the two largest log-probabilities, in nats."""
        body = completion_body([0], model=model, max_tokens=1)
        body |= {"temperature": temperature, "logprobs": 2, "stream": False}
        try:
            answer = await self._server.post(COMPLETIONS, body)
        except Refused as error:
            raise self._unmet(f"refuses the requests of a run: {error}") from error
        choice = answer["choices"][0]
        if not choice.get("token_ids"):
            raise self._unmet("does not return token ids")
        tops: list[Mapping[str, float]] = (choice.get("logprobs") or {}).get("top_logprobs") or []
        if not tops:
            raise self._unmet("does not return log-probabilities")
        best, second, *_ = sorted(tops[0].values(), reverse=True)
        return best - second


def completion_body(tokens: list[int], *, model: str, max_tokens: int) -> dict[str, Any]:
    """The body of a completion request, token ids in and out, without sampling parameters."""
    return {
        "model": model,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "logprobs": 0,
        "return_token_ids": True,
        # Without a tokenizer it cannot name them otherwise.
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stream": True,
        # The generation config of the model may set others.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


_RELOAD_SECONDS = 1800.0
_RESET_TRIES = 100
_RESET_PAUSE_SECONDS = 0.1
_ENDS = ("stop", "length", "abort", None)


class VllmServer:
    """A vLLM server, which keeps running when this object is closed."""

    def __init__(
        self, server: Server, info: VllmServerInfo, *, weights_folder: WeightFolder
    ) -> None:
        """Use a server that was inspected; see `connect`."""
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
        cls, url: str, required: ServerRequirements, *, weights_folder: Path | WeightFolder
    ) -> VllmServer:
        """Inspect a running server, and refuse one that does not meet the requirements.

        New weights go through `weights_folder`, which the server must be able to read; servers that
        share it read the same files.
        """
        server = Server(url)
        try:
            info = await inspect_server(server, required)
        except BaseException:
            await server.close()
            raise
        return cls(server, info, weights_folder=WeightFolder.of(weights_folder))

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Generate an answer; raises `EngineLost` if the server is gone."""
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
                    # The abort came before the request reached it.
                    await self._send_abort([request.id])
            if end is None and request.id not in self._aborted:
                raise EngineLost(f"{self.name} ended a stream before the answer was complete")
        except Refused as error:
            raise await self._lost_or_refused(error) from error
        finally:
            self._written.discard(request.id)
            self._aborted.discard(request.id)
        if end is None:
            # A request without a token yet ends without an event.
            yield Delta(tokens=(), logprobs=(), end="abort")

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these requests; each stream ends with its tokens so far."""
        self._aborted |= set(ids)
        known = [id for id in ids if id in self._written]
        if known:
            await self._send_abort(known)

    async def load_weights(self, weights: Weights) -> None:
        """Load these weights and reset the prefix cache."""
        # No request is running, so these had ended before their abort.
        self._aborted.clear()
        folder = await asyncio.to_thread(self._weights_folder.export, weights)
        body: dict[str, object] = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(folder)},
        }
        if self._has_receiver:
            body = {"method": "reload_folder", "kwargs": {"folder": str(folder)}}
        try:
            await self._server.post("/collective_rpc", body, seconds=_RELOAD_SECONDS)
            await self._reset_prefix_cache()
        except Refused as error:
            raise await self._lost_or_refused(error) from error

    async def score(self, tokens: Sequence[int], *, start: int) -> list[float]:
        """Log-probabilities at temperature 1 of the tokens from `start` on."""
        body = completion_body(list(tokens), model=self._model, max_tokens=1)
        body |= {"stream": False, "temperature": 1.0, "prompt_logprobs": 0}
        try:
            answer = await self._server.post(COMPLETIONS, body, seconds=_RELOAD_SECONDS)
        except Refused as error:
            raise await self._lost_or_refused(error) from error
        rows = answer["choices"][0]["prompt_logprobs"]
        return [rows[place][str(tokens[place])]["logprob"] for place in range(start, len(tokens))]

    async def sleep(self) -> bool:
        """Do nothing: a server does not share its GPU."""
        return False

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._server.close()
        self._weights_folder.remove()

    async def _reset_prefix_cache(self) -> None:
        for _ in range(_RESET_TRIES):
            if (await self._server.post("/reset_prefix_cache"))["success"]:
                return
            await asyncio.sleep(_RESET_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} cannot reset its prefix cache, because it runs other requests; cached "
            "prefixes are wrong under new weights: use the server for one run only"
        )

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        question = completion_body(
            list(request.tokens), model=self._model, max_tokens=request.max_tokens
        )
        if request.seed is not None:
            question["seed"] = request.seed
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
            raise Refused(
                f"{self.name} returned an error: {error['message']}", status=error["code"]
            )
        (choice,) = event["choices"]
        tokens = choice["token_ids"]
        if choice["finish_reason"] not in _ENDS:
            raise EngineError(
                f"{self.name} ended a stream with finish reason {choice['finish_reason']!r}"
            )
        return Delta(
            tokens=tokens,
            logprobs=choice["logprobs"]["token_logprobs"],
            end=choice["finish_reason"],
        )

    async def _send_abort(self, ids: Sequence[str]) -> None:
        # The name it gives to the first choice of a request.
        names = [f"cmpl-{id}-0" for id in ids]
        try:
            await self._server.post("/abort_requests", {"request_ids": names})
        except Refused as error:
            raise await self._lost_or_refused(error) from error

    async def _lost_or_refused(self, refusal: Refused) -> EngineError:
        """`EngineLost` if the engine behind the server has died, else the refusal itself."""
        if refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return refusal
        try:
            await self._server.get("/health")
        except (Refused, EngineLost):
            return EngineLost(f"{self.name} is gone: {refusal}")
        return refusal
