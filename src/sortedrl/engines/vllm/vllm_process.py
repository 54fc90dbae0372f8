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
from sortedrl.engines.streaming.weight_files import export_weights, named_tensors
from sortedrl.engines.vllm.worker_extension import RECEIVER, addresses
from sortedrl.errors import EngineError, EngineLost
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

    def __init__(self, engine: AsyncLLM, *, name: str, slots: int) -> None:
        """Use a running engine; see `start`."""
        self.name = name
        self.limits = BackendLimits(
            slots=slots,
            context=engine.model_config.max_model_len,
            vocabulary=engine.model_config.get_vocab_size(),
        )
        self._open_engine: AsyncLLM | None = engine
        self._written: set[str] = set()
        self._aborted_early: set[str] = set()
        self._folder: Path | None = None

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
        options: Mapping[str, object] | None = None,
    ) -> VllmProcess:
        """Start vLLM with a model: a folder or a hub name; takes half a minute or more.

        `context` is that of the model unless given, `memory_share` how much of the GPU's memory it
        may take, `options` are further arguments of vLLM by their names there.
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
        name = f"vLLM {version}"
        backend = cls(_started(ours, options or {}, name=name), name=name, slots=slots)
        # vLLM asks its child for this once; do it now rather than within the first request.
        await backend._answered(backend._engine.get_supported_tasks())
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
        tensors = named_tensors(weights)
        if all(tensor.is_cuda for tensor in tensors.values()):
            await self._call_workers("receive_weights", {"given": addresses(tensors)})
        else:
            folder = export_weights(weights, self._weights_folder(tensors))
            await self._call_workers("read_weights", {"folder": str(folder)})
        for _ in range(_RESET_TRIES):
            if await self._answered(self._engine.reset_prefix_cache()):
                return
            await asyncio.sleep(_RESET_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} cannot reset its prefix cache: it still holds blocks of aborted requests "
            f"after {_RESET_TRIES * _RESET_PAUSE_SECONDS:g} s"
        )

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

    def _weights_folder(self, tensors: Mapping[str, Tensor]) -> Path:
        if self._folder is None:
            needed = sum(tensor.nbytes for tensor in tensors.values())
            self._folder = Path(tempfile.mkdtemp(prefix="sortedrl-", dir=_roomy_folder(needed)))
        return self._folder


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
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
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
    """The folder in shared memory if two versions fit, else `None` for the default one."""
    if not _MEMORY_FOLDER.is_dir():
        return None
    is_roomy = shutil.disk_usage(_MEMORY_FOLDER).free > 2 * needed_bytes
    return _MEMORY_FOLDER if is_roomy and os.access(_MEMORY_FOLDER, os.W_OK) else None
