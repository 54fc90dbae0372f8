"""What a running vLLM server must be like before anything is asked of it.

Every refusal says what was found and the command that starts the server right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedrl.engines.streamed.backend import Limits
from sortedrl.engines.streamed.http import Refused, Server
from sortedrl.engines.versions import VLLM
from sortedrl.engines.vllm.receiver import RECEIVER
from sortedrl.errors import EngineError, EngineLost

COMPLETIONS = "/v1/completions"
# It looks at its whole machine before it answers.
_SERVER_INFO_SECONDS = 120.0
_NO_TOKEN = 2**31 - 1
_LOGPROB_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the run needs; `None` where anything will do."""

    vocabulary: int
    context: int
    temperature: float
    slots: int | None

    @property
    def command(self) -> str:
        """How to start a server that fits."""
        slots = "SLOTS" if self.slots is None else str(self.slots)
        return (
            "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --scheduling-policy priority "
            "--logprobs-mode processed_logprobs --generation-config vllm --skip-tokenizer-init "
            f"--worker-extension-cls {RECEIVER} "
            f"--max-model-len {self.context} --max-num-seqs {slots}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A server that fits."""

    version: str
    model: str
    limits: Limits
    has_receiver: bool
    """Whether our part of the workers is there, which renews everything on a CPU too."""


async def inspected(server: Server, wanted: Wanted) -> Found:
    """What was found at the server; an `EngineError` where it does not fit."""
    try:
        version = await _version(server, wanted)
        model, context = await _model(server, wanted)
        config = await _config(server, wanted)
        slots = _slots(server, wanted, config)
        await _check_vocabulary(server, wanted, model=model)
        await _check_answer(server, wanted, model=model)
    except EngineLost as error:
        raise EngineError(f"{error}; start the server with: {wanted.command}") from error
    limits = Limits(slots=slots, context=context, vocabulary=wanted.vocabulary)
    extension = config["parallel_config"].get("worker_extension_cls")
    return Found(version=version, model=model, limits=limits, has_receiver=extension == RECEIVER)


async def _version(server: Server, wanted: Wanted) -> str:
    try:
        answer = await server.get("/version")
    except Refused as error:
        raise _unfit(server, wanted, f"is no vLLM server: {error}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
        raise _unfit(server, wanted, f"is no vLLM server: /version gives {answer!r:.100}")
    version: str = answer["version"]
    VLLM.check(version, place=server.url, remedy="pip install 'sortedrl[vllm]' there")
    return version


async def _model(server: Server, wanted: Wanted) -> tuple[str, int]:
    """The name and the context of the model that is served."""
    answer = await server.get("/v1/models")
    model = answer["data"][0]
    context: int = model["max_model_len"]
    if context < wanted.context:
        raise _unfit(
            server,
            wanted,
            f"serves {model['id']} with a context of {context} tokens, but prompts and answers "
            f"need {wanted.context}",
        )
    return model["id"], context


async def _config(server: Server, wanted: Wanted) -> dict[str, Any]:
    """What the server was started with; refuses one that is not for training."""
    try:
        answer = await server.get("/server_info?config_format=json", seconds=_SERVER_INFO_SECONDS)
    except Refused as error:
        raise _unfit(
            server,
            wanted,
            "has no development endpoints, so it cannot be given new weights (it was started "
            "without VLLM_SERVER_DEV_MODE=1)",
        ) from error
    config: dict[str, Any] = answer["vllm_config"]
    return config


def _slots(server: Server, wanted: Wanted, config: Mapping[str, Any]) -> int:
    """How many answers it writes at a time."""
    scheduler = config["scheduler_config"]
    if scheduler["policy"] != "priority":
        raise _unfit(
            server,
            wanted,
            f"has the scheduling policy {scheduler['policy']}, so it cannot keep our order",
        )
    engines: int = config["parallel_config"]["data_parallel_size"]
    slots: int = scheduler["max_num_seqs"] * engines
    if wanted.slots not in (None, slots):
        raise _unfit(
            server,
            wanted,
            f"writes {slots} answers at a time, not {wanted.slots}; leave slots out, or restart it",
        )
    return slots


async def _check_vocabulary(server: Server, wanted: Wanted, *, model: str) -> None:
    # No endpoint tells it, but the refusal of a token that no model has does.
    ask = {"model": model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(_NO_TOKEN): 0.0}}
    try:
        await server.post(COMPLETIONS, ask)
    except Refused as error:
        size = re.search(r"Vocabulary size: (\d+)", str(error))
        if size is None:
            raise _unfit(server, wanted, f"does not tell its vocabulary: {error}") from error
        if int(size[1]) == wanted.vocabulary:
            return
        found = f"serves {model} with {size[1]} tokens"
    else:
        found = f"serves {model}, which accepts every token"
    raise _unfit(
        server,
        wanted,
        f"{found}, but the model that is trained has {wanted.vocabulary}; it must serve the same",
    )


async def _check_answer(server: Server, wanted: Wanted, *, model: str) -> None:
    """Refuse log-probabilities that are missing, or not those of the temperature."""
    warm = await _lead_of_the_best(server, wanted, model=model, temperature=1.0)
    temperature = wanted.temperature
    if temperature in (0.0, 1.0):
        return
    lead = await _lead_of_the_best(server, wanted, model=model, temperature=temperature)
    if not math.isclose(lead * temperature, warm, rel_tol=_LOGPROB_TOLERANCE, abs_tol=1e-3):
        raise _unfit(
            server,
            wanted,
            "gives log-probabilities before temperature (it was started without --logprobs-mode "
            f"processed_logprobs), but answers are drawn at temperature {temperature:g}",
        )


async def _lead_of_the_best(
    server: Server, wanted: Wanted, *, model: str, temperature: float
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
        raise _unfit(server, wanted, f"refuses a question like ours: {error}") from error
    choice = answer["choices"][0]
    if not choice.get("token_ids"):
        raise _unfit(server, wanted, "does not give the token ids of its answers")
    tops: list[Mapping[str, float]] = (choice.get("logprobs") or {}).get("top_logprobs") or []
    if not tops:
        raise _unfit(server, wanted, "does not give the log-probabilities of its tokens")
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


def _unfit(server: Server, wanted: Wanted, reason: str) -> EngineError:
    return EngineError(f"{server.url} {reason}; start the server with: {wanted.command}")
