"""The engines of a TRL run: the native one on TRL's model or a copy of it, or TRL's vLLM server.

The native engine generates with the very weights that TRL trains, adapters included. Only under
autocast does it have a copy, in the precision that TRL computes in, which follows every update.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.native import NativeEngine
from sortedrl.engines.native.hf_model import attention_shape
from sortedrl.engines.native.kv_cache import available_bytes
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.streaming.backend import (
    BackendLimits,
    Delta,
    GenerationRequest,
    ServerRequirements,
)
from sortedrl.engines.streaming.streamed_engine import StreamedEngine
from sortedrl.errors import ConfigError
from sortedrl.training.lora import merged_tensors
from sortedrl.types import Trajectory, Weights

EngineFactory = Callable[[PreTrainedModel], RolloutEngine]
"""Makes an engine on the model whose weights it generates with."""

_SPARE_TOKENS = 64
_TRAINED_BYTES = 12
"""Gradient and moments of a trained parameter, which TRL allocates after the engine its cache."""
_SHARE_FOR_CACHE = 0.5


class TrainerEngine:
    """The engine of a TRL trainer: opened with the first batch, and kept at the trained weights."""

    def __init__(
        self,
        trainer: Any,  # noqa: ANN401  a GRPOTrainer, which has no types
        *,
        make: EngineFactory | None,
        slots: int,
        sampling: Sampling,
        schedule: Schedule,
    ) -> None:
        """Nothing is opened yet: the trainer has its model in place only once it trains."""
        self._trainer = trainer
        self._make = make
        self._slots = slots
        self._sampling = sampling
        self._schedule = schedule
        self._engine: RolloutEngine | None = None
        self._shares_weights = True
        self._synced_step: int | None = None

    def opened(self, longest_prompt: Callable[[], int]) -> RolloutEngine:
        """The engine; `longest_prompt` gives the tokens of the longest prompt."""
        if self._engine is None:
            open_engine = self._server if self._trainer.use_vllm else self._on_model
            self._engine = open_engine(longest_prompt)
        return self._engine

    def submit(self, trajectories: Sequence[Trajectory], tolerance: float | None) -> None:
        """Queue work."""
        assert self._engine is not None, "the engine is opened with the first batch"
        self._engine.submit(trajectories, tolerance=tolerance, sampling=self._sampling)

    def weights_changed(self) -> None:
        """The engine may no longer have the trained weights."""
        self._synced_step = None

    def sync(self, version: int) -> None:
        """Give the engine the trained weights under this version, unless it has them."""
        trainer, engine = self._trainer, self._engine
        assert engine is not None, "the engine is opened with the first batch"
        if self._synced_step == trainer.state.global_step and engine.version == version:
            return
        if trainer.use_vllm:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        tensors = None
        if not (self._shares_weights or trainer.use_vllm):
            tensors = plain_weights(base_model(trainer.accelerator.unwrap_model(trainer.model)))
        engine.load_weights(Weights(version, tensors))
        self._synced_step = trainer.state.global_step

    def _on_model(self, longest_prompt: Callable[[], int]) -> RolloutEngine:
        """The native engine, or that of the user, on the trained model or a copy of it."""
        trainer, schedule = self._trainer, self._schedule
        accelerator, max_tokens = trainer.accelerator, trainer.max_completion_length
        base = base_model(accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            accelerator.mixed_precision, base.dtype
        )
        # Under autocast the weights are cast in every pass: the engine has a copy that is cast.
        self._shares_weights = autocast == base.dtype
        own = base if self._shares_weights else cast_copy(base, autocast)
        if self._make is None:
            return NativeEngine(
                own,
                slots=self._slots,
                max_tokens=max_tokens,
                sampling=self._sampling,
                cache_bytes=cache_bytes(
                    own,
                    slots=self._slots,
                    tokens=longest_prompt() + max_tokens,
                    trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
                ),
            )
        engine = self._make(own)
        needs_native = schedule.mode in ("coupled", "redraw") and not schedule.never_interrupts
        cannot_verify = any(limits.no_verification for limits in engine.request_limits)
        require(
            not (needs_native and cannot_verify),
            f"mode {schedule.mode!r} needs the native engine, got {engine.name}; set mode "
            "'partial' or 'on_policy', or leave engine out",
        )
        return engine

    def _server(self, longest_prompt: Callable[[], int]) -> RolloutEngine:
        """TRL's vLLM server."""
        trainer = self._trainer
        args, config = trainer.args, trainer.model.config.get_text_config()
        max_tokens = trainer.max_completion_length
        url = args.vllm_server_base_url or (
            f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        )
        required = ServerRequirements(
            vocabulary=config.vocab_size,
            context=min(config.max_position_embeddings, longest_prompt() + max_tokens),
            temperature=args.temperature,
        )
        return StreamedEngine(
            lambda: connected_server(
                url,
                required,
                world=trainer.accelerator.num_processes,
                folder=Path(args.output_dir),
            ),
            max_tokens=max_tokens,
            stop_tokens=trainer.eos_token_ids,
            sampling=self._sampling,
        )


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
