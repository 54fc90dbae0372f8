"""SGLang in child processes, driven through its tokenizer manager.

    request -> SGLang's manager (our event loop) -> scheduler and model (child processes) -> tokens

A child that dies ends every stream with `EngineLost`, and nothing else.

SGLang assumes that it owns its process: it sets signal handlers, the start method of
multiprocessing, the loggers and the event loop policy, and when one of its child processes fails it
kills its parent and all children of it. Here the parent is a training run with other children. So
what SGLang changes is restored, and the signal with which it kills its parent only prints a
traceback.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sortedrl.engines.installed import SGLANG
from sortedrl.engines.sglang.sglang_request import (
    HIGH_FIRST,
    SglangStream,
    scores_of,
    scoring_body,
    server_context,
)
from sortedrl.engines.streaming.backend import BackendLimits, Delta, GenerationRequest
from sortedrl.engines.streaming.weight_files import weight_buckets
from sortedrl.errors import EngineError, EngineLost
from sortedrl.models.shared_memory import free_unused_memory
from sortedrl.types import Weights

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from torch import Tensor

_Result = TypeVar("_Result")
_DRAIN_SECONDS = 0.1
_FLUSH_TRIES = 100
_FLUSH_PAUSE_SECONDS = 0.1
_BUCKET_BYTES = 1 << 30
_STANDARD_ERROR = 2
_KILL_SECONDS = 30.0
_ON_A_CPU: Mapping[str, object] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
}


_NO_SEEDS_ON_A_CPU = (
    "SGLang's deterministic inference, without which it ignores the seed of a request, has no "
    "kernels for CPUs"
)


class SglangProcess:
    """An SGLang engine that lives and dies with this object."""

    def __init__(
        self, engine: Engine, *, name: str, limits: BackendLimits, can_sleep: bool = False
    ) -> None:
        """Use a running engine; see `start`."""
        self.name = name
        self._can_sleep = can_sleep
        self._asleep: set[str] = set()
        """What has no memory now: the weights, the cache."""
        self._num_scored = 0
        self.limits = limits
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._request_ids: dict[str, str] = {}
        self._aborted: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._processes = _processes_of(engine)
        for process in self._processes:
            ending = f"its process {process.pid} ended, see its log above"
            self._loop.add_reader(process.sentinel, self._lose, ending)
        # SGLang's own way to run this task exits the process at the first error.
        self._manager.event_loop = self._loop
        self._reader = self._loop.create_task(self._manager.handle_loop())
        self._reader.add_done_callback(self._reader_ended)

    @classmethod
    async def start(
        cls,
        *,
        model: str,
        slots: int,
        context: int,
        dtype: str,
        seed: int,
        memory_share: float | None,
        device: str,
        options: Mapping[str, object],
        is_seeded: bool = False,
        tensor_parallel: int = 1,
        can_sleep: bool = False,
    ) -> SglangProcess:
        """Start SGLang with a model: a folder or a hub name; takes half a minute or more.

        `memory_share` is the share of the device's memory for the engine, `is_seeded` whether
        answers have their own seeds, `tensor_parallel` the number of processes and GPUs over which
        the model is sharded, and `options` are additional SGLang arguments. With `can_sleep`, the
        engine shares its GPU with a trainer.

        This blocks the event loop: SGLang's processes die with the thread that starts them, so it
        must be the thread of the loop.
        """
        version = SGLANG.check_installed()
        ours: dict[str, object] = {
            "model_path": model,
            "skip_tokenizer_init": True,
            "max_running_requests": slots,
            "context_length": server_context(context),
            "dtype": dtype,
            "random_seed": seed,
            "device": device,
            "enable_priority_scheduling": True,
            "tokenizer_worker_num": 1,
            "dp_size": 1,
        }
        if memory_share is not None:
            ours["mem_fraction_static"] = memory_share
        # A running request is not preempted for one that came later.
        usual: dict[str, object] = {"disable_priority_preemption": True, "log_level": "error"}
        # The trainer needs the CPU while no request is running.
        usual["sleep_on_idle"] = True
        if tensor_parallel > 1:
            ours["tp_size"] = tensor_parallel
        if can_sleep:
            ours["enable_memory_saver"] = True
        if is_seeded and device != "cpu":
            # Without it SGLang ignores the seed of a request.
            ours["enable_deterministic_inference"] = True
        settings = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if device == "cpu":
            usual |= _ON_A_CPU
            usual["max_total_tokens"] = slots * server_context(context)
            settings["SGLANG_USE_CPU_ENGINE"] = "1"
        with _restored_globals(settings):
            from sglang.srt.server_args import ServerArgs

            SGLANG.check_options(options, known=ServerArgs.__struct_fields__, fixed=ours)
            try:
                engine = _started(usual | dict(options) | ours)
            except (RuntimeError, ValueError, TypeError, OSError, AssertionError) as error:
                raise EngineError(
                    f"SGLang {version} did not start with {model}: {error}; see its log above"
                ) from error
        manager = engine.tokenizer_manager
        limits = BackendLimits(
            slots=slots,
            context=min(context, manager.max_req_input_len),
            vocabulary=manager.model_config.vocab_size,
            no_seeds=_NO_SEEDS_ON_A_CPU if device == "cpu" else None,
        )
        return cls(engine, name=f"SGLang {version}", limits=limits, can_sleep=can_sleep)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Generate an answer; raises `EngineLost` if the engine is gone."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        state = SglangStream(request, priority_sign=HIGH_FIRST)
        try:
            while not state.is_over:
                self._refuse_if_lost()
                if request.id in self._aborted:
                    yield Delta(tokens=(), logprobs=(), end="abort")
                    return
                call = GenerateReqInput(**state.next_body())
                self._request_ids[request.id] = state.request_id
                async with aclosing(self._manager.generate_request(call, None)) as chunks:
                    async for chunk in chunks:
                        self._refuse_if_lost()
                        yield state.delta(chunk)
        except ValueError as error:
            raise EngineError(f"{self.name} refused a request: {error}") from error
        finally:
            self._request_ids.pop(request.id, None)
            self._aborted.discard(request.id)

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these requests: each stream ends with its tokens so far."""
        self._refuse_if_lost()
        # Kept for a request whose stream has not started yet.
        self._aborted.update(ids)
        for id_ in ids:
            if id_ in self._request_ids:
                self._manager.abort_request(self._request_ids[id_])

    async def load_weights(self, weights: Weights) -> None:
        """Load these weights and reset the prefix cache."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
        )

        # No request is running, so these had ended before their abort.
        self._aborted.clear()
        manager = self._manager
        await self._wake("weights")
        await self._weight_call(manager.begin_weight_update(BeginWeightUpdateReqInput()))
        try:
            for bucket in weight_buckets(weights, bucket_bytes=_BUCKET_BYTES):
                await self._load_bucket(bucket, version=weights.version)
                bucket.clear()  # before the next one is filled
        finally:
            await self._weight_call(manager.end_weight_update(EndWeightUpdateReqInput()))
        await self._wake("kv_cache")
        for _ in range(_FLUSH_TRIES):
            flushed = await self._unless_lost(manager.flush_cache())
            if flushed.success:
                return
            await asyncio.sleep(_FLUSH_PAUSE_SECONDS)
        raise EngineError(
            f"{self.name} cannot flush its cache: it still holds aborted requests after "
            f"{_FLUSH_TRIES * _FLUSH_PAUSE_SECONDS:g} s"
        )

    async def score(self, tokens: Sequence[int], *, start: int) -> list[float]:
        """Log-probabilities at temperature 1 of the tokens from `start` on."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        self._refuse_if_lost()
        self._num_scored += 1
        call = GenerateReqInput(
            **scoring_body(tokens, start=start), rid=f"score-{self._num_scored:010d}"
        )
        found: list[float] = []
        try:
            async with aclosing(self._manager.generate_request(call, None)) as chunks:
                async for chunk in chunks:
                    self._refuse_if_lost()
                    found = scores_of(chunk, count=len(tokens) - start)
        except ValueError as error:
            raise EngineError(f"{self.name} refused a request: {error}") from error
        return found

    async def sleep(self) -> bool:
        """Drop weights and cache until new weights come, if it was started for that."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._can_sleep:
            released = ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"])
            await self._unless_lost(self._manager.release_memory_occupation(released))
            self._asleep = {"weights", "kv_cache"}
        return self._can_sleep

    async def close(self) -> None:
        """End SGLang's own processes, and remove the files they leave."""
        from sglang.srt.managers.load_snapshot import shm_path_for

        self._lose("it was closed")
        _kill(self._processes)
        # Read what is in flight, or the socket warns that messages are lost.
        await asyncio.wait([self._reader], timeout=_DRAIN_SECONDS)
        self._reader.cancel()
        await asyncio.wait([self._reader])
        manager, ports = self._manager, self._engine.port_args
        manager.cuda_vmm_feature_transport.shutdown()
        for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler):
            socket.close(linger=0)
        self._engine.send_to_rpc.close(linger=0)
        for address in (
            ports.tokenizer_ipc_name,
            ports.scheduler_input_ipc_name,
            ports.detokenizer_ipc_name,
            ports.rpc_ipc_name,
            ports.metrics_ipc_name,
        ):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        Path(shm_path_for(ports.instance_id)).unlink(missing_ok=True)
        _restore_sigquit()

    async def _wake(self, part: str) -> None:
        """Give this its memory again, once: SGLang's scheduler ends when it is asked again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if part in self._asleep:
            # That of buckets of weights, which this process keeps otherwise.
            free_unused_memory()
            resumed = ResumeMemoryOccupationReqInput(tags=[part])
            await self._unless_lost(self._manager.resume_memory_occupation(resumed))
            self._asleep.remove(part)

    async def _load_bucket(self, bucket: Mapping[str, Tensor], *, version: int) -> None:
        """Bring a bucket to all shards, each of which takes its own part of every tensor."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        # Sharing moves CPU memory, and that of the trainer must stay in place. On a GPU nothing
        # moves: the child reads the tensor in place.
        tensors = [
            (name, tensor.clone() if tensor.device.type == "cpu" else tensor)
            for name, tensor in bucket.items()
        ]
        shards = range(self._engine.server_args.tp_size)
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(tensors) for _ in shards],
            # SGLang would exit instead of waiting for a request that is being aborted.
            flush_cache=False,
            weight_version=str(version),
        )
        await self._weight_call(self._manager.update_weights_from_tensor(update))

    async def _weight_call(self, call: Awaitable[tuple[bool, str]]) -> None:
        is_done, message = await self._unless_lost(call)
        if not is_done:
            raise EngineError(f"{self.name} did not load the new weights: {message}")

    async def _unless_lost(self, call: Awaitable[_Result]) -> _Result:
        """The result of a call; without this a call to a dead process would never return."""
        task = asyncio.ensure_future(call)
        both: tuple[asyncio.Future[Any], ...] = (task, self._end)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        self._refuse_if_lost()
        return task.result()

    def _lose(self, reason: str) -> None:
        """End every stream, now and from now on."""
        from sglang.srt.managers.io_struct import AbortReq

        if self._end.done():
            return
        self._end.set_result(reason)
        for process in self._processes:
            self._loop.remove_reader(process.sentinel)
        # The streams wait for the scheduler: send them the abort that it would send.
        for request_id in list(self._manager.rid_to_state):
            self._manager._handle_abort_req(AbortReq(rid=request_id))

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self._lose(f"its responses cannot be read: {reader.exception()!r}")

    def _refuse_if_lost(self) -> None:
        if self._end.done():
            raise EngineLost(f"{self.name} is gone: {self._end.result()}")


def _started(arguments: Mapping[str, object]) -> Engine:
    """Start an engine of SGLang; its processes die with the calling thread."""
    from sglang.srt.entrypoints.engine import Engine

    class Contained(Engine):  # type: ignore[misc]
        """Does not kill the other children of this process at exit."""

        def shutdown(self) -> None:
            """Nothing: see `SglangProcess.close`."""

    _ignore_sigquit()
    before = {process.pid for process in multiprocessing.active_children()}
    try:
        engine = Contained(**arguments)
    except BaseException:
        _kill(
            [process for process in multiprocessing.active_children() if process.pid not in before]
        )
        _restore_sigquit()
        raise
    # It would kill this process when a child dies.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def _processes_of(engine: Engine) -> list[BaseProcess]:
    ids = set(engine.get_all_child_pids())
    return [process for process in multiprocessing.active_children() if process.pid in ids]


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_KILL_SECONDS)


def _ignore_sigquit() -> None:
    """Survive SIGQUIT, which a failing child of SGLang sends to its parent.

    Signal handlers can only be set in the main thread, which this need not be; but faulthandler can
    be registered anywhere, and replaces the default action.
    """
    faulthandler.register(signal.SIGQUIT, file=_STANDARD_ERROR, all_threads=False)


def _restore_sigquit() -> None:
    faulthandler.unregister(signal.SIGQUIT)


@contextmanager
def _restored_globals(settings: Mapping[str, str]) -> Iterator[None]:
    """Restore what SGLang changes inside the block; `settings` are environment variables for it."""
    environment = dict(os.environ)
    start_method = multiprocessing.get_start_method(allow_none=True)
    policy = asyncio.get_event_loop_policy()
    root = logging.getLogger()
    # Removed first: SGLang would close them.
    handlers, root.handlers, level = root.handlers, [], root.level
    os.environ.update(settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers, root.level = handlers, level
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(start_method, force=True)
        os.environ.clear()
        os.environ.update(environment)
