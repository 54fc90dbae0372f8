"""The engines of a TRL run: the native one on TRL's model or a copy of it, or TRL's vLLM server.

The native engine generates with the very weights that TRL trains, adapters included. Only under
autocast does it have a copy, in the precision that TRL computes in, which follows every update.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sortedrl.engines.native.hf_model import attention_shape
from sortedrl.engines.native.kv_cache import available_bytes
from sortedrl.engines.streaming.backend import (
    BackendLimits,
    Delta,
    GenerationRequest,
    ServerRequirements,
)
from sortedrl.errors import ConfigError
from sortedrl.training.lora import merged_tensors
from sortedrl.types import Weights

_SPARE_TOKENS = 64
_TRAINED_BYTES = 12
"""Gradient and moments of a trained parameter, which TRL allocates after the engine its cache."""
_SHARE_FOR_CACHE = 0.5


class SyncedServer:
    """A vLLM server as a `Backend`; TRL sends it new weights and resets its prefix cache."""

    def __init__(self, server: Any, *, slots: int) -> None:  # noqa: ANN401  needs extra `servers`
        """Wrap an opened `VllmServer`, with a share of its slots."""
        self._server = server
        self.name: str = server.name
        self.limits: BackendLimits = replace(server.limits, slots=slots)

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Generate an answer."""
        stream: AsyncIterator[Delta] = self._server.stream(request)
        return stream

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these answers."""
        await self._server.abort(ids)

    async def load_weights(self, weights: Weights) -> None:
        """TRL has sent them already."""

    async def score(self, tokens: Sequence[int], *, start: int) -> list[float]:
        """Log-probabilities at temperature 1 of the tokens from `start` on."""
        scores: list[float] = await self._server.score(tokens, start=start)
        return scores

    async def sleep(self) -> bool:
        """Do nothing: a server does not share its GPU."""
        return False

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._server.close()


async def connected_server(
    url: str, required: ServerRequirements, *, world: int, folder: Path
) -> SyncedServer:
    """The server at this address, checked; its slots are shared out over the ranks."""
    from sortedrl.engines.vllm.vllm_server import VllmServer

    # Nothing is written to the folder: TRL sends the weights.
    server = await VllmServer.connect(url, required, weights_folder=folder / "weights")
    return SyncedServer(server, slots=max(1, server.limits.slots // world))


def base_model(model: Any) -> PreTrainedModel:  # noqa: ANN401  a PeftModel where peft is installed
    """The transformers model, with its adapters in it where it has any."""
    if isinstance(model, PreTrainedModel):
        return model
    base: PreTrainedModel = model.get_base_model()
    for config in model.peft_config.values():
        if config.is_prompt_learning:
            raise ConfigError(
                f"{type(config).__name__} adds to the prompt, which the native engine does not "
                "do; use LoRA, or use_vllm"
            )
    return base


def plain_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The weights by the names of a model without adapters, which are folded in."""
    parameters = dict(model.named_parameters())
    if not any(".lora_" in name for name in parameters):
        return parameters
    if any("lora_magnitude_vector" in name for name in parameters):
        raise ConfigError(
            "DoRA cannot be folded into the engine's copy of the model; set bf16=False and "
            "fp16=False, so that the engine shares TRL's weights, or use LoRA"
        )
    with torch.no_grad():
        return merged_tensors(model)


def cast_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the same shape in another precision; its weights are still to be loaded."""
    with torch.random.fork_rng(), model.device:
        copy: PreTrainedModel = AutoModelForCausalLM.from_config(
            deepcopy(model.config), dtype=dtype
        )
    copy.requires_grad_(False)
    return copy


def cache_bytes(model: PreTrainedModel, *, slots: int, tokens: int, trained: int) -> int:
    """All slots with prompt and answer of `tokens`, if that fits beside an update.

    `trained` counts the parameters of the model that TRL trains.
    """
    config = model.config.get_text_config()
    layers, heads, dim = attention_shape(config)
    context = min(config.max_position_embeddings, tokens) + _SPARE_TOKENS
    longest: int = context * 2 * layers * heads * dim * model.dtype.itemsize
    free = available_bytes(model.device)
    if model.device.type == "cuda":
        free -= _TRAINED_BYTES * trained
    return min(slots * longest, max(longest, int(free * _SHARE_FOR_CACHE)))
