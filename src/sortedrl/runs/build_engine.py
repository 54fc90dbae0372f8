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

from sortedrl.config.parsing import options_from
from sortedrl.config.schedule import EngineSettings
from sortedrl.config.train import Rollout, TrainSettings
from sortedrl.data.stream import Tokenizer
from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.installed import SGLANG, VLLM
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.streaming.backend import Backend, ServerRequirements
from sortedrl.engines.streaming.streamed_engine import StreamedEngine
from sortedrl.engines.streaming.weight_files import WeightFolder, refuse_other_model
from sortedrl.errors import EngineError
from sortedrl.models.loading import load_model
from sortedrl.models.tiny import is_tiny
from sortedrl.runs.plan.cards import BLOCK_TOKENS, Demand
from sortedrl.runs.plan.dry_run import machine_bytes
from sortedrl.runs.plan.memory import MemoryPlan
from sortedrl.training.lora import export_model
from sortedrl.types import Weights

if TYPE_CHECKING:
    from sortedrl.engines.native import NativeEngine


Tell = Callable[[str], None]
_GIB = 1 << 30
PRECISIONS = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_REPLY_TOKENS = 512
"""Room for one reply; a conversation with longer ones ends when it fills the context."""
_TRIAL_PROMPTS = 4
_MOST_OF_GPU = 0.9
_SILENCE_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """What the engine of a run depends on; small enough to travel to a rollout worker."""

    model: str
    out: Path
    seed: int
    engine: EngineSettings
    rollout: Rollout
    has_adapters: bool
    """Whether what is trained is not the model itself."""
    needs_seeds: bool
    """Whether interrupted answers are drawn again from seeds of their own."""
    max_replies: int
    """Replies of an environment in one conversation; 0 without any."""

    @classmethod
    def of(cls, settings: TrainSettings) -> GenerationSettings:
        """Those of a run."""
        return cls(
            model=settings.model,
            out=settings.out,
            seed=settings.seed,
            engine=settings.engine,
            rollout=settings.rollout,
            has_adapters=settings.lora.rank is not None,
            needs_seeds=settings.needs_seeds,
            max_replies=settings.environment.max_turns if settings.environment.is_used else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorld:
    """What an engine is made for: the model that is trained, and the prompts to come."""

    plan: MemoryPlan
    """Of the whole run, as `--dry-run` shows it."""
    device: torch.device
    model: PreTrainedModel | None
    """The model itself, if it is in this process; only the native engine needs it."""
    stop_tokens: Sequence[int]
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    version: int
    """Of the weights that the engine has in the beginning."""

    @property
    def demand(self) -> Demand:
        """What the plan is made for."""
        return self.plan.demand

    def context(self, settings: GenerationSettings) -> int:
        """Tokens of a prompt and its answer, at most; in a conversation, with room for replies."""
        replies = settings.max_replies * _REPLY_TOKENS
        return min(self.demand.shape.context, self.demand.sequence_tokens + replies)

    @property
    def is_shared(self) -> bool:
        """Whether the engine shares its GPUs with trainer ranks, and sleeps during an update."""
        return self.demand.takes_turns


def check_engine(rollout: Rollout) -> None:
    """Refuse an engine whose package is missing or was not tried; it takes no time."""
    if rollout.engine == "vllm":
        VLLM.check_installed()
    elif rollout.engine == "sglang":
        SGLANG.check_installed()


def rollout_engine(
    settings: GenerationSettings, world: RolloutWorld, *, weights: Callable[[], Weights], tell: Tell
) -> RolloutEngine:
    """The engine that writes the answers of a run; one from outside is tried out first."""
    if settings.rollout.engine == "native":
        return _native(settings, world)
    engine = _outside(settings, world, weights=weights, tell=tell)
    try:
        if settings.needs_seeds:
            _require_seeds(engine)
        # A worker has no model to compare with: its controller asks the trainer.
        if world.model is not None:
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


def _require_seeds(engine: RolloutEngine) -> None:
    """Refuse an engine that does not draw an answer again from its own seed."""
    for limits in engine.request_limits:
        if limits.no_seeds is not None:
            raise EngineError(
                f"schedule.mode 'redraw' needs an engine that draws each answer from its own seed, "
                f"but {limits.engine} does not: {limits.no_seeds}; set mode to 'on_policy' or "
                "'partial', or rollout.engine to 'native' or 'vllm'"
            )


def _native(settings: GenerationSettings, world: RolloutWorld) -> NativeEngine:
    assert world.model is not None, "the native engine generates with the model itself"
    return NativeEngine(
        world.model,
        slots=settings.engine.slots,
        max_tokens=settings.engine.max_tokens,
        sampling=Sampling(temperature=settings.rollout.temperature),
        tokenizer=world.tokenizer,
        cache_bytes=_native_cache_bytes(settings, world),
        version=world.version,
    )


def _outside(
    settings: GenerationSettings,
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
    with ExitStack() as opened:
        opened.callback(engine.close)
        # A server has the weights it was started with, or those of the run before.
        engine.load_weights(weights())
        opened.pop_all()
    return engine


def _servers(settings: GenerationSettings, world: RolloutWorld, *, tell: Tell) -> RolloutEngine:
    urls = settings.rollout.urls
    folder = _weight_folder(settings)
    with ExitStack() as opened:
        engines = []
        for url in urls:
            engines.append(
                _streamed(settings, world, partial(_server, settings, world, url, folder))
            )
            opened.callback(engines[-1].close)
        opened.pop_all()
    return engines[0] if len(engines) == 1 else EnginePool(engines, warn=tell, names=urls)


def _streamed(
    settings: GenerationSettings,
    world: RolloutWorld,
    opening: Callable[[], Coroutine[Any, Any, Backend]],
) -> StreamedEngine:
    return StreamedEngine(
        opening,
        max_tokens=settings.engine.max_tokens,
        stop_tokens=world.stop_tokens,
        sampling=Sampling(temperature=settings.rollout.temperature),
        version=world.version,
        is_seeded=settings.needs_seeds,
        # Below the patience of a pool: an engine that falls silent says so itself, with its tokens.
        silence_seconds=_SILENCE_SECONDS,
    )


async def _process(settings: GenerationSettings, world: RolloutWorld, model: str) -> Backend:
    """VLLM or SGLang in a process beside the trainer."""
    options = options_from(settings.rollout.options)
    demand = world.demand
    if settings.rollout.engine == "vllm" and world.device.type == "cpu":
        # Its own blocks of 128 tokens would not fit as often as the plan counts, and a shorter
        # prompt would never be found in its prefix cache.
        options = {"block_size": BLOCK_TOKENS} | options
    cache_bytes = outside_cache_bytes(settings, world, block_tokens=options.get("block_size"))
    dtype, shards = demand.precision, demand.cluster.tensor_parallel
    if settings.rollout.engine == "vllm":
        from sortedrl.engines.vllm.vllm_process import VllmProcess

        return await VllmProcess.start(
            model=model,
            slots=settings.engine.slots,
            context=world.context(settings),
            dtype=dtype,
            seed=settings.seed,
            memory_share=_memory_share(world, cache_bytes + demand.engine_bytes),
            tensor_parallel=shards,
            is_seeded=settings.needs_seeds,
            can_sleep=world.is_shared,
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
        device=world.device.type,
        is_seeded=settings.needs_seeds,
        tensor_parallel=shards,
        can_sleep=world.is_shared,
        options={"max_total_tokens": cache_bytes // demand.cache_token_bytes} | options,
    )


def _weight_folder(settings: GenerationSettings) -> WeightFolder:
    """Where all servers of a run get their weights, each version written once."""
    folder = settings.rollout.weight_sync_folder or settings.out / "weight_sync"
    # Another run may have been given the same folder, and must not read or remove these weights.
    return WeightFolder(folder / f"{settings.out.name}-{uuid.uuid4().hex[:8]}")


async def _server(
    settings: GenerationSettings, world: RolloutWorld, url: str, folder: WeightFolder
) -> Backend:
    """A running server; it has the slots that it was started with."""
    from sortedrl.engines.servers import connect_server

    required = ServerRequirements(
        vocabulary=world.demand.shape.vocabulary,
        context=world.context(settings),
        temperature=settings.rollout.temperature,
        needs_seeds=settings.needs_seeds,
    )
    return await connect_server(url, required, weights_folder=folder)


@contextmanager
def _model_of(settings: GenerationSettings, world: RolloutWorld) -> Iterator[str]:
    """The model as another engine reads it; one that is no folder yet is written as one."""
    is_as_named = world.version == 0 and not settings.has_adapters
    if is_as_named and not is_tiny(settings.model) and not settings.model.endswith(".gguf"):
        yield settings.model
        return
    model = world.model
    if model is None:
        model = load_model(settings.model, dtype=PRECISIONS[world.demand.precision], device="cpu")
    settings.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="engine-model-", dir=settings.out) as folder:
        export_model(model, world.tokenizer, Path(folder))
        del model
        yield folder


def engine_cache_bytes(world: RolloutWorld, *, to_load: int) -> int:
    """The cache of one engine on each of its devices: what the plan of the run names.

    Less only where other programs hold memory that the plan counts on. `to_load` are bytes of the
    engine's own weights that are not on the device yet.
    """
    plan = world.plan
    total, free = device_memory(world.device)
    fits = plan.cache_bytes(total) // plan.demand.engines_per_device
    least = plan.demand.least_cache_bytes // plan.demand.engines_per_device
    return max(least, min(fits, free - to_load))


def outside_cache_bytes(
    settings: GenerationSettings, world: RolloutWorld, *, block_tokens: object = None
) -> int:
    """The cache of a vLLM or SGLang engine: that of the plan, and room for one conversation.

    The plan does not know how long replies are, and both refuse what does not fit at its longest.
    vLLM keeps one block for itself.
    """
    block = block_tokens if isinstance(block_tokens, int) else BLOCK_TOKENS
    least = (-(-world.context(settings) // block) + 1) * block
    own = engine_cache_bytes(world, to_load=world.demand.engine_bytes)
    return max(own, least * world.demand.cache_token_bytes)


def _native_cache_bytes(settings: GenerationSettings, world: RolloutWorld) -> int | None:
    """What the native engine's cache may take; `None` on a CPU, where it takes what it needs."""
    if settings.rollout.cache_gib is not None:
        return int(settings.rollout.cache_gib * _GIB)
    if world.device.type != "cuda":
        return None
    # Its model is there already, also that of a worker.
    return engine_cache_bytes(world, to_load=0)


def device_memory(device: torch.device) -> tuple[int, int]:
    """The memory of a device: all of it, and what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    total = machine_bytes()
    return total, total


def _memory_share(world: RolloutWorld, needed_bytes: int) -> float | None:
    """What vLLM asks to be free when it starts: its copy and its cache, not most of the GPU."""
    if world.device.type != "cuda":
        return None
    total, _ = device_memory(world.device)
    return min(_MOST_OF_GPU, (needed_bytes + _GIB) / total)
