"""Builds the engine of a training run: native, vLLM, SGLang, or a pool of servers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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

Tell = Callable[[str], None]
_GIB = 1 << 30
PRECISIONS = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_REPLY_TOKENS = 512
"""Context reserved for one reply; longer ones may fill the context, which ends a conversation."""
_TRIAL_PROMPTS = 4
_MOST_OF_GPU = 0.9
_SILENCE_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """The settings that the engine of a run depends on; a rollout worker is sent these."""

    model: str
    out: Path
    seed: int
    engine: EngineSettings
    rollout: Rollout
    has_adapters: bool
    """Whether adapters are trained, and not the model itself."""
    needs_seeds: bool
    """Whether interrupted answers are drawn again from their own seeds."""
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
class EngineBuilder:
    """Makes the engine of a run, or of one of its workers."""

    settings: GenerationSettings
    plan: MemoryPlan
    """Of the whole run, as `--dry-run` shows it."""
    device: torch.device
    model: PreTrainedModel | None
    """The model that is trained, if it is in this process; only the native engine needs it."""
    stop_tokens: Sequence[int]
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    """Some of the run, with which an engine of another process is tried out."""
    version: int
    """Of the weights that the engine starts with."""

    def engine(self, *, weights: Callable[[], Weights], tell: Tell) -> RolloutEngine:
        """The engine that the settings name; one of another process is tried out first."""
        if self.settings.rollout.engine == "native":
            return self._native()
        if self.settings.rollout.engine == "servers":
            engine = self._servers(weights, tell=tell)
        else:
            tell(f"starting {self.settings.rollout.engine}, which takes half a minute or more")
            with self._model_folder() as model:
                engine = self._streamed(partial(self._process, model))
        with ExitStack() as opened:
            opened.callback(engine.close)
            if self.settings.needs_seeds:
                _require_seeds(engine)
            # A worker has no model to compare with: its controller compares with the trainer's.
            if self.model is not None:
                refuse_other_model(
                    engine,
                    self.model,
                    prompts=self.prompts[:_TRIAL_PROMPTS],
                    sampling=self._sampling,
                )
            opened.pop_all()
        return engine

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer, at most; in a conversation, with room for replies."""
        replies = self.settings.max_replies * _REPLY_TOKENS
        return min(self._demand.shape.context, self._demand.sequence_tokens + replies)

    def native_cache_bytes(self) -> int | None:
        """The cache of the native engine; `None` on a CPU, where it is not limited."""
        if self.settings.rollout.cache_gib is not None:
            return int(self.settings.rollout.cache_gib * _GIB)
        if self.device.type != "cuda":
            return None
        # The model is on the device already, also that of a worker.
        return self._planned_cache_bytes(to_load=0)

    def outside_cache_bytes(self, *, block_tokens: object = None) -> int:
        """The cache of a vLLM or SGLang engine: that of the plan, with room for one conversation.

        The plan does not know how long replies are, and both refuse a context that does not fit.
        vLLM keeps one block for itself.
        """
        block = block_tokens if isinstance(block_tokens, int) else BLOCK_TOKENS
        least = (-(-self.context // block) + 1) * block
        own = self._planned_cache_bytes(to_load=self._demand.engine_bytes)
        return max(own, least * self._demand.cache_token_bytes)

    @property
    def _demand(self) -> Demand:
        return self.plan.demand

    @property
    def _sampling(self) -> Sampling:
        return Sampling(temperature=self.settings.rollout.temperature)

    def _planned_cache_bytes(self, *, to_load: int) -> int:
        """The cache of one engine on each of its devices, as the plan of the run has it.

        Less only where other programs use memory that the plan counts on. `to_load` are bytes of
        the engine's own weights that are not on the device yet.
        """
        total, free = device_memory(self.device)
        fits = self.plan.cache_bytes(total) // self._demand.engines_per_device
        least = self._demand.least_cache_bytes // self._demand.engines_per_device
        return max(least, min(fits, free - to_load))

    def _native(self) -> NativeEngine:
        assert self.model is not None, "the native engine generates with the model itself"
        return NativeEngine(
            self.model,
            slots=self.settings.engine.slots,
            max_tokens=self.settings.engine.max_tokens,
            sampling=self._sampling,
            tokenizer=self.tokenizer,
            cache_bytes=self.native_cache_bytes(),
            version=self.version,
        )

    def _servers(self, weights: Callable[[], Weights], *, tell: Tell) -> RolloutEngine:
        urls = self.settings.rollout.urls
        folder = _weight_folder(self.settings)
        with ExitStack() as opened:
            engines = []
            for url in urls:
                engines.append(self._streamed(partial(self._server, url, folder)))
                opened.callback(engines[-1].close)
            engine = engines[0] if len(engines) == 1 else EnginePool(engines, warn=tell, names=urls)
            opened.pop_all()
            opened.callback(engine.close)
            # A server has the weights it was started with, or those of the run before.
            engine.load_weights(weights())
            opened.pop_all()
        return engine

    def _streamed(self, opening: Callable[[], Coroutine[Any, Any, Backend]]) -> StreamedEngine:
        return StreamedEngine(
            opening,
            max_tokens=self.settings.engine.max_tokens,
            stop_tokens=self.stop_tokens,
            sampling=self._sampling,
            version=self.version,
            is_seeded=self.settings.needs_seeds,
            # Below the timeout of a pool: an engine that hangs reports it itself, with its tokens.
            silence_seconds=_SILENCE_SECONDS,
        )

    async def _process(self, model: str) -> Backend:
        """VLLM or SGLang in a process of its own."""
        settings, demand = self.settings, self._demand
        options = options_from(settings.rollout.options)
        if settings.rollout.engine == "vllm" and self.device.type == "cpu":
            # vLLM's own blocks of 128 tokens would not fit as often as the plan counts, and a
            # shorter prompt would never be found in its prefix cache.
            options = {"block_size": BLOCK_TOKENS} | options
        cache_bytes = self.outside_cache_bytes(block_tokens=options.get("block_size"))
        if settings.rollout.engine == "vllm":
            from sortedrl.engines.vllm.vllm_process import VllmProcess

            return await VllmProcess.start(
                model=model,
                slots=settings.engine.slots,
                context=self.context,
                dtype=demand.precision,
                seed=settings.seed,
                memory_share=self._memory_share(cache_bytes + demand.engine_bytes),
                tensor_parallel=demand.cluster.tensor_parallel,
                is_seeded=settings.needs_seeds,
                can_sleep=demand.takes_turns,
                options={"kv_cache_memory_bytes": cache_bytes} | options,
            )
        from sortedrl.engines.sglang.sglang_process import SglangProcess

        return await SglangProcess.start(
            model=model,
            slots=settings.engine.slots,
            context=self.context,
            dtype=demand.precision,
            seed=settings.seed,
            memory_share=None,
            device=self.device.type,
            is_seeded=settings.needs_seeds,
            tensor_parallel=demand.cluster.tensor_parallel,
            can_sleep=demand.takes_turns,
            options={"max_total_tokens": cache_bytes // demand.cache_token_bytes} | options,
        )

    async def _server(self, url: str, folder: WeightFolder) -> Backend:
        """A running server; it has the slots that it was started with."""
        from sortedrl.engines.servers import connect_server

        required = ServerRequirements(
            vocabulary=self._demand.shape.vocabulary,
            context=self.context,
            temperature=self.settings.rollout.temperature,
            needs_seeds=self.settings.needs_seeds,
        )
        return await connect_server(url, required, weights_folder=folder)

    @contextmanager
    def _model_folder(self) -> Iterator[str]:
        """The model as another engine reads it; one that is no folder yet is written as one."""
        name = self.settings.model
        is_as_named = self.version == 0 and not self.settings.has_adapters
        if is_as_named and not is_tiny(name) and not name.endswith(".gguf"):
            yield name
            return
        model = self.model
        if model is None:
            model = load_model(name, dtype=PRECISIONS[self._demand.precision], device="cpu")
        self.settings.out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="engine-model-", dir=self.settings.out) as folder:
            export_model(model, self.tokenizer, Path(folder))
            del model
            yield folder

    def _memory_share(self, needed_bytes: int) -> float | None:
        """The share of the GPU that vLLM may use: for its weights and its cache."""
        if self.device.type != "cuda":
            return None
        total, _ = device_memory(self.device)
        return min(_MOST_OF_GPU, (needed_bytes + _GIB) / total)


def check_engine(rollout: Rollout) -> None:
    """Refuse an engine whose package is missing or untested; it takes no time."""
    if rollout.engine == "vllm":
        VLLM.check_installed()
    elif rollout.engine == "sglang":
        SGLANG.check_installed()


def _require_seeds(engine: RolloutEngine) -> None:
    """Refuse an engine that does not draw an answer again from its own seed."""
    for limits in engine.request_limits:
        if limits.no_seeds is not None:
            raise EngineError(
                f"schedule.mode 'redraw' needs an engine that draws each answer from its own seed, "
                f"but {limits.engine} does not: {limits.no_seeds}; set mode to 'on_policy' or "
                "'partial', or rollout.engine to 'native' or 'vllm'"
            )


def _weight_folder(settings: GenerationSettings) -> WeightFolder:
    """Where all servers of a run get their weights, each version written once."""
    folder = settings.rollout.weight_sync_folder or settings.out / "weight_sync"
    # Another run may have been given the same folder, and must not read or remove these weights.
    return WeightFolder(folder / f"{settings.out.name}-{uuid.uuid4().hex[:8]}")


def device_memory(device: torch.device) -> tuple[int, int]:
    """The memory of a device: all of it, and what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    total = machine_bytes()
    return total, total
