"""Builds the engine of a training run: native, vLLM, SGLang, or a pool of servers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from sortedrl.config.spec import options_from
from sortedrl.config.train import Rollout, TrainSettings
from sortedrl.data.chat import Tokenizer
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.installed import SGLANG, VLLM
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.engines.native.hf_model import attention_shape
from sortedrl.engines.native.kv_cache import available_bytes
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.streaming.backend import Backend, ServerRequirements
from sortedrl.engines.streaming.streamed_engine import StreamedEngine
from sortedrl.engines.streaming.weight_files import refuse_other_model
from sortedrl.models.loading import stop_tokens
from sortedrl.models.tiny import is_tiny
from sortedrl.training.lora import trained_parameters
from sortedrl.training.trainer import export_model
from sortedrl.types import Weights

if TYPE_CHECKING:
    from sortedrl.engines.native import NativeEngine


Tell = Callable[[str], None]
_GIB = 1 << 30
_GRADIENT_BYTES = 4
_SHARE_FOR_CACHE = 0.5
_SPARE_TOKENS = 64
_TRIAL_PROMPTS = 4
_MOST_OF_GPU = 0.9
_SILENCE_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorld:
    """What an engine is made for: the model that is trained, and the prompts to come."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    longest_prompt: int
    version: int
    """Of the weights that the engine has in the beginning."""

    def context(self, settings: TrainSettings) -> int:
        """Tokens of a prompt and its answer, at most."""
        own: int = self.model.config.get_text_config().max_position_embeddings
        return min(own, self.longest_prompt + settings.engine.max_tokens)

    @property
    def cache_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        layers, heads, dim = attention_shape(self.model.config.get_text_config())
        return 2 * layers * heads * dim * self.model.dtype.itemsize


def check_engine(rollout: Rollout) -> None:
    """Refuse an engine whose package is missing or was not tried; it takes no time."""
    if rollout.engine == "vllm":
        VLLM.check_installed()
    elif rollout.engine == "sglang":
        SGLANG.check_installed()


def rollout_engine(
    settings: TrainSettings, world: RolloutWorld, *, weights: Callable[[], Weights], tell: Tell
) -> RolloutEngine:
    """The engine that writes the answers of a run; one from outside is tried out first."""
    if settings.rollout.engine == "native":
        return _native(settings, world)
    engine = _outside(settings, world, weights=weights, tell=tell)
    try:
        refuse_other_model(
            engine,
            world.model,
            prompts=world.prompts[:_TRIAL_PROMPTS],
            sampling=Sampling(temperature=settings.rollout.temperature),
        )
    except BaseException:
        engine.close()
        raise
    return engine


def _native(settings: TrainSettings, world: RolloutWorld) -> NativeEngine:
    return NativeEngine(
        world.model,
        slots=settings.engine.slots,
        max_tokens=settings.engine.max_tokens,
        sampling=Sampling(temperature=settings.rollout.temperature),
        tokenizer=world.tokenizer,
        cache_bytes=_cache_bytes(settings, world),
        version=world.version,
    )


def _outside(
    settings: TrainSettings,
    world: RolloutWorld,
    *,
    weights: Callable[[], Weights],
    tell: Tell,
) -> RolloutEngine:
    if settings.rollout.engine != "servers":
        tell(f"starting {settings.rollout.engine}, which takes half a minute or more")
        with _model_of(settings, world) as model:
            return _streamed(settings, world, partial(_process, settings, world, model))
    engine = _servers(settings, world, tell=tell)
    # A server has the weights it was started with, or those of the run before.
    engine.load_weights(weights())
    return engine


def _servers(settings: TrainSettings, world: RolloutWorld, *, tell: Tell) -> RolloutEngine:
    urls = settings.rollout.urls
    with ExitStack() as opened:
        engines = []
        for number in range(len(urls)):
            engines.append(_streamed(settings, world, partial(_server, settings, world, number)))
            opened.callback(engines[-1].close)
        opened.pop_all()
    return engines[0] if len(engines) == 1 else EnginePool(engines, warn=tell, names=urls)


def _streamed(
    settings: TrainSettings,
    world: RolloutWorld,
    opening: Callable[[], Coroutine[Any, Any, Backend]],
) -> StreamedEngine:
    return StreamedEngine(
        opening,
        max_tokens=settings.engine.max_tokens,
        stop_tokens=stop_tokens(world.model),
        sampling=Sampling(temperature=settings.rollout.temperature),
        version=world.version,
        # Below the patience of a pool: an engine that falls silent says so itself, with its tokens.
        silence_seconds=_SILENCE_SECONDS,
    )


async def _process(settings: TrainSettings, world: RolloutWorld, model: str) -> Backend:
    """VLLM or SGLang in a process beside the trainer."""
    options = options_from(settings.rollout.options)
    cache_bytes = _copy_cache_bytes(settings, world)
    dtype = str(world.model.dtype).removeprefix("torch.")
    if settings.rollout.engine == "vllm":
        from sortedrl.engines.vllm.vllm_process import VllmProcess

        return await VllmProcess.start(
            model=model,
            slots=settings.engine.slots,
            context=world.context(settings),
            dtype=dtype,
            seed=settings.seed,
            memory_share=_memory_share(world, cache_bytes),
            options={"kv_cache_memory_bytes": cache_bytes} | options,
        )
    from sortedrl.engines.sglang.sglang_process import SglangProcess

    return await SglangProcess.start(
        model=model,
        slots=settings.engine.slots,
        context=world.context(settings),
        dtype=dtype,
        seed=settings.seed,
        memory_share=None,
        device=world.model.device.type,
        options={"max_total_tokens": cache_bytes // world.cache_token_bytes} | options,
    )


async def _server(settings: TrainSettings, world: RolloutWorld, number: int) -> Backend:
    """A running server; it has the slots that it was started with."""
    from sortedrl.engines.servers import connect_server

    folder = settings.rollout.weight_sync_folder or settings.out / "weight_sync"
    # Another run may have been given the same folder, and must not read or remove these weights.
    own = folder / f"{settings.out.name}-{uuid.uuid4().hex[:8]}-server-{number}"
    required = ServerRequirements(
        vocabulary=world.model.config.get_text_config().vocab_size,
        context=world.context(settings),
        temperature=settings.rollout.temperature,
    )
    return await connect_server(settings.rollout.urls[number], required, weights_folder=own)


@contextmanager
def _model_of(settings: TrainSettings, world: RolloutWorld) -> Iterator[str]:
    """The model as another engine reads it; one that is no folder yet is written as one."""
    is_as_named = world.version == 0 and settings.lora.rank is None
    if is_as_named and not is_tiny(settings.model) and not settings.model.endswith(".gguf"):
        yield settings.model
        return
    settings.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="engine-model-", dir=settings.out) as folder:
        export_model(world.model, world.tokenizer, Path(folder))
        yield folder


def _cache_bytes(settings: TrainSettings, world: RolloutWorld) -> int | None:
    """What the native engine's cache may take beside an update on the same device."""
    if settings.rollout.cache_gib is not None:
        return int(settings.rollout.cache_gib * _GIB)
    if world.model.device.type != "cuda":
        return None
    return _fitting_bytes(settings, world, free=_free_bytes(settings, world))


def _copy_cache_bytes(settings: TrainSettings, world: RolloutWorld) -> int:
    """What the cache of an engine may take that has a copy of the weights too."""
    if settings.rollout.cache_gib is not None:
        return int(settings.rollout.cache_gib * _GIB)
    if world.model.device.type != "cuda":
        return _fitting_bytes(settings, world, free=available_bytes(world.model.device))
    copy = sum(parameter.nbytes for parameter in world.model.parameters())
    return _fitting_bytes(settings, world, free=_free_bytes(settings, world) - copy)


def _memory_share(world: RolloutWorld, cache_bytes: int) -> float | None:
    """What vLLM asks to be free when it starts: its copy and its cache, not most of the GPU."""
    if world.model.device.type != "cuda":
        return None
    _, total = torch.cuda.mem_get_info(world.model.device)
    copy = sum(parameter.nbytes for parameter in world.model.parameters())
    return min(_MOST_OF_GPU, (copy + cache_bytes + _GIB) / total)


def _free_bytes(settings: TrainSettings, world: RolloutWorld) -> int:
    """What a GPU has left; masters and moments are there already, gradients are to come."""
    free, _ = torch.cuda.mem_get_info(world.model.device)
    trained = sum(parameter.numel() for parameter in trained_parameters(world.model).values())
    models = 2 if settings.algorithm.has_critic else 1
    return free - models * _GRADIENT_BYTES * trained


def _fitting_bytes(settings: TrainSettings, world: RolloutWorld, *, free: int) -> int:
    """All slots at their longest, if that fits into a share of what is free."""
    longest = (world.context(settings) + _SPARE_TOKENS) * world.cache_token_bytes
    return min(settings.engine.slots * longest, max(longest, int(free * _SHARE_FOR_CACHE)))
