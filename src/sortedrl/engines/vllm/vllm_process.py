"""vLLM in child processes, driven through its `AsyncLLM`.

    request -> AsyncLLM (here) -> scheduler and model (child process) -> tokens

vLLM knows a request from the first step of its stream on. One that is aborted earlier never reaches
it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sortedrl.engines.installed import VLLM
from sortedrl.engines.streaming.backend import BackendLimits, Delta, GenerationRequest
from sortedrl.engines.streaming.weight_files import weight_buckets, write_bucket
from sortedrl.engines.vllm.worker_extension import RECEIVER
from sortedrl.errors import EngineError, EngineLost
from sortedrl.models.shared_memory import addresses, free_unused_memory
from sortedrl.types import Weights

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_Result = TypeVar("_Result")
_HEARTBEAT_SECONDS = 1.0
_SHUTDOWN_SECONDS = 20.0
_RESET_TRIES = 100
_RESET_PAUSE_SECONDS = 0.05
_MEMORY_FOLDER = Path("/dev/shm")
_BUCKET_BYTES = 1 << 30
_ENVIRONMENT = {
    # Forking hangs while threads compute, and the trainer's threads do.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Every weight update would log two warnings about layers without weights of their own.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults for environment variables of vLLM."""


class VllmProcess:
    """A vLLM engine that lives and dies with this object."""

    def __init__(self, engine: AsyncLLM, *, name: str, slots: int, can_sleep: bool = False) -> None:
        """Use a running engine; see `start`."""
        self.name = name
        self._can_sleep = can_sleep
        self._asleep: set[str] = set()
        """What has no memory now: the weights, the cache."""
        self.limits = BackendLimits(
            slots=slots,
            context=engine.model_config.max_model_len,
            vocabulary=engine.model_config.get_vocab_size(),
        )
        self._open_engine: AsyncLLM | None = engine
        self._written: set[str] = set()
        self._aborted_early: set[str] = set()
        self._folder: Path | None = None
        self._num_scored = 0

    @classmethod
    async def start(
        cls,
        *,
        model: str,
        slots: int,
        context: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        memory_share: float | None = None,
        tensor_parallel: int = 1,
        is_seeded: bool = False,
        can_sleep: bool = False,
        options: Mapping[str, object] | None = None,
    ) -> VllmProcess:
        """Start vLLM with a model: a folder or a hub name; takes half a minute or more.

        `context` is by default that of the model, `memory_share` the share of the GPU's memory for
        the engine, `tensor_parallel` the number of processes and GPUs over which the model is
        sharded, `is_seeded` whether answers have their own seeds, and `options` are additional vLLM
        arguments. With `can_sleep`, the engine shares its GPU with a trainer.
        """
        version = VLLM.check_installed()
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        ours: dict[str, object] = {
            "model": model,
            "max_num_seqs": slots,
            "max_model_len": context,
            "dtype": dtype,
            "seed": seed,
            "skip_tokenizer_init": True,
            "scheduling_policy": "priority",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": RECEIVER,
        }
        if memory_share is not None:
            ours["gpu_memory_utilization"] = memory_share
        if tensor_parallel > 1:
            # By default vLLM looks for a Ray cluster, and places the shards there.
            ours |= {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": "mp"}
        if is_seeded and _is_on_cpu():
            # Its sampler for CPUs ends the process when a prompt with a seed is read in pieces.
            ours["enable_chunked_prefill"] = False
        if can_sleep:
            ours["enable_sleep_mode"] = True
        name = f"vLLM {version}"
        engine = _started(ours, options or {}, name=name)
        backend = cls(engine, name=name, slots=slots, can_sleep=can_sleep)
        try:
            # vLLM asks its child for this once; do it now rather than within the first request.
            await backend._answered(backend._engine.get_supported_tasks())
        except BaseException:
            await backend.close()
            raise
        return backend

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Generate an answer; raises `EngineLost` if the engine is gone."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if request.id in self._aborted_early:
            self._aborted_early.discard(request.id)
            yield Delta(tokens=(), logprobs=(), end="abort")
            return
        self._written.add(request.id)
        outputs = self._engine.generate(
            tokens_input(list(request.tokens)),
            _sampling_params(request),
            request.id,
            priority=request.priority,
        )
        try:
            async for output in outputs:
                yield _delta(output)
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._lost() from error
        finally:
            self._written.discard(request.id)

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these requests; each stream ends with its tokens so far."""
        self._aborted_early |= set(ids) - self._written
        known = [id for id in ids if id in self._written]
        await self._answered(self._engine.abort(known))

    async def load_weights(self, weights: Weights) -> None:
        """Load these weights and reset the prefix cache."""
        # No request is running, so these had ended before their abort.
        self._aborted_early.clear()
        await self._wake("weights")
        await self._call_workers("begin_weights", {})
        try:
            for bucket in weight_buckets(weights, bucket_bytes=_BUCKET_BYTES):
                await self._load_bucket(bucket)
                bucket.clear()  # before the next one is filled
        finally:
            # Also after a failure, so that the next attempt starts over.
            await self._call_workers("finish_weights", {})
        await self._wake("kv_cache")
        for _ in range(_RESET_TRIES):
            if await self._answered(self._engine.reset_prefix_cache()):
                return
            await asyncio.sleep(_RESET_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} cannot reset its prefix cache: it still holds blocks of aborted requests "
            f"after {_RESET_TRIES * _RESET_PAUSE_SECONDS:g} s"
        )

    async def score(self, tokens: Sequence[int], *, start: int) -> list[float]:
        """Log-probabilities at temperature 1 of the tokens from `start` on."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._num_scored += 1
        outputs = self._engine.generate(
            tokens_input(list(tokens)), _scoring_params(), f"score-{self._num_scored:010d}"
        )
        found: list[float] = []
        try:
            async for output in outputs:
                rows = enumerate(output.prompt_logprobs or ())
                found = [row[tokens[place]].logprob for place, row in rows if place >= start]
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._lost() from error
        return found

    async def sleep(self) -> bool:
        """Drop weights and cache until new weights come, if it was started for that."""
        if self._can_sleep:
            # Level 2: the weights are not kept in host memory, new ones come after the update.
            await self._answered(self._engine.sleep(2))
            self._asleep = {"weights", "kv_cache"}
        return self._can_sleep

    async def close(self) -> None:
        """End the child processes and remove temporary files."""
        if self._open_engine is not None:
            self._open_engine.shutdown(timeout=_SHUTDOWN_SECONDS)
            # Drop the last reference now: its finalizer fails at interpreter shutdown.
            self._open_engine = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _engine(self) -> AsyncLLM:
        if self._open_engine is None:
            raise EngineLost(f"{self.name} was closed")
        return self._open_engine

    async def _wake(self, part: str) -> None:
        """Give this its memory again, once: a load that failed may have done so already."""
        if part in self._asleep:
            # That of buckets of weights, which this process keeps otherwise.
            free_unused_memory()
            await self._answered(self._engine.wake_up([part]))
            self._asleep.remove(part)

    async def _call_workers(self, method: str, arguments: Mapping[str, object]) -> None:
        await self._answered(self._engine.collective_rpc(method, kwargs=dict(arguments)))

    async def _answered(self, call: Awaitable[_Result]) -> _Result:
        """The result of a call; without this a call to a dead child would never return."""
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.wait({task}, timeout=_HEARTBEAT_SECONDS)
            if self._engine.errored and not task.done():
                task.cancel()
                raise self._lost()
        error = task.exception()
        if error is None:
            return task.result()
        if self._engine.errored:
            raise self._lost() from error
        raise EngineError(f"{self.name} refused: {error}") from error

    def _lost(self) -> EngineLost:
        return EngineLost(f"{self.name} is gone: its process ended; see its log above")

    async def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        """Bring a bucket to all shards: by its address on the GPU, or as a file they all read."""
        if all(tensor.is_cuda for tensor in bucket.values()):
            await self._call_workers("receive_weights", {"given": addresses(bucket)})
            return
        if self._folder is None:
            place = _roomy_folder(sum(tensor.nbytes for tensor in bucket.values()))
            self._folder = Path(tempfile.mkdtemp(prefix="sortedrl-", dir=place))
        path = write_bucket(bucket, self._folder)
        try:
            await self._call_workers("read_weights", {"path": str(path)})
        finally:
            path.unlink()


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _started(ours: Mapping[str, object], options: Mapping[str, object], *, name: str) -> AsyncLLM:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    VLLM.check_options(options, known=[field.name for field in fields(AsyncEngineArgs)], fixed=ours)
    quiet = {"disable_log_stats": True, "use_tqdm_on_load": False}
    arguments = quiet | dict(options) | dict(ours)
    try:
        # No local variable: vLLM keeps the stack frame of its start, and so the engine, alive.
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise EngineError(
            f"{name} did not start with {ours['model']}: {error}; see its log above (set "
            "VLLM_LOGGING_LEVEL=INFO for more)"
        ) from error


def _sampling_params(request: GenerationRequest) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        stop_token_ids=sorted(request.stop_tokens),
        ignore_eos=True,
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _scoring_params() -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=1.0,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _delta(output: Any) -> Delta:  # noqa: ANN401
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    # The last output of an aborted request may repeat all log-probabilities after those of its
    # own tokens.
    logprobs = completion.logprobs.logprobs[: len(tokens)]
    assert len(logprobs) == len(tokens), "every token has one log-probability"
    return Delta(
        tokens=tokens,
        logprobs=logprobs,
        end=completion.finish_reason,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _roomy_folder(needed_bytes: int) -> Path | None:
    """The folder in shared memory if twice as much fits, else `None` for the default one."""
    if not _MEMORY_FOLDER.is_dir():
        return None
    is_roomy = shutil.disk_usage(_MEMORY_FOLDER).free > 2 * needed_bytes
    return _MEMORY_FOLDER if is_roomy and os.access(_MEMORY_FOLDER, os.W_OK) else None
