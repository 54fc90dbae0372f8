"""One update's samples: the scheduler says what to start and when to stop, slime generates.

Answers are generated and scored by slime's `generate_and_rm`, so custom generate functions, reward
models and sample hooks work as they do in slime. When enough prompts are complete, what still runs
is aborted on the servers and goes back to the scheduler with its tokens.
"""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import Any

from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.async_utils import run
from slime.utils.http_utils import get, get_rollout_num_engines
from slime.utils.misc import load_function
from slime.utils.types import Sample

from sortedrl.core.scheduler import Scheduler
from sortedrl.errors import ConfigError, DataError
from sortedrl.integrations.slime.data_source import SortedDataSource
from sortedrl.types import TrainBatch, Trajectory

_SEED_MASK = (1 << 31) - 1
_PAUSE_SECONDS = 0.1


def generate_rollout(
    args: Any,  # noqa: ANN401  slime's Namespace
    rollout_id: int,
    data_source: Any,  # noqa: ANN401
    evaluation: bool = False,
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The samples of the next update; evaluation is slime's own."""
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    if not isinstance(data_source, SortedDataSource):
        raise ConfigError(
            "SortedRL's rollout function needs its data source, got "
            f"{type(data_source).__name__}; set --data-source-path "
            "sortedrl.integrations.slime.SortedDataSource"
        )
    return run(_Rollout(args, data_source).samples())


class _Rollout:
    """One call of the rollout function."""

    def __init__(self, args: Any, source: SortedDataSource) -> None:  # noqa: ANN401
        self._args, self._source = args, source
        self._state = sglang_rollout.GenerateState(args)
        slots = args.sglang_server_concurrency * get_rollout_num_engines(args)
        self._scheduler: Scheduler = source.scheduler(slots=slots)
        self._running: dict[asyncio.Task[Any], Trajectory] = {}

    async def samples(self) -> RolloutFnTrainOutput:
        """Generate until an update's prompts are complete."""
        while not self._scheduler.should_harvest:
            for trajectory in self._scheduler.to_start():
                self._start(trajectory)
            await self._next_done()
        num_interrupted = await self._abort()
        batch = self._scheduler.batch()
        if batch is None:
            raise DataError(self._args.prompt_data, "is used up; lower --num-rollout")
        groups = self._source.harvested(batch)
        if self._args.group_rm:
            await asyncio.gather(*(self._score(group) for group in groups))
        if self._args.rollout_sample_filter_path is not None:
            load_function(self._args.rollout_sample_filter_path)(self._args, groups)
        return RolloutFnTrainOutput(samples=groups, metrics=_metrics(batch, num_interrupted))

    def _start(self, trajectory: Trajectory) -> None:
        parameters = dict(self._state.sampling_params)
        if self._scheduler.schedule.mode == "redraw":
            parameters["sampling_seed"] = trajectory.seed & _SEED_MASK
        sample = self._source.started(trajectory)
        task = asyncio.create_task(
            sglang_rollout.generate_and_rm(self._args, sample, parameters, evaluation=False)
        )
        self._running[task] = trajectory

    async def _next_done(self) -> None:
        """Wait for the next answers; one that a server aborted by itself goes on."""
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            stopped = self._stopped(task)
            del self._running[task]
            if stopped.finish_reason is not None:
                self._scheduler.finished(stopped)
            else:
                await asyncio.sleep(_PAUSE_SECONDS)
                self._start(stopped)

    def _stopped(self, task: asyncio.Task[Any]) -> Trajectory:
        sample = task.result()
        if not isinstance(sample, Sample):
            raise ConfigError(
                "a custom generate function must give one sample for each answer, got "
                f"{type(sample).__name__}; SortedRL's rollout function takes no others"
            )
        stopped = self._source.stopped(self._running[task], sample)
        if sample.status in (Sample.Status.ABORTED, Sample.Status.PENDING):
            return stopped
        return stopped.finished("length" if sample.status == Sample.Status.TRUNCATED else "stop")

    async def _abort(self) -> int:
        """Stop the servers; what is complete by then counts, the rest is interrupted."""
        interrupted: list[Trajectory] = []
        if self._running:
            self._state.aborted = True
            router = f"http://{self._args.sglang_router_ip}:{self._args.sglang_router_port}"
            workers = (await get(f"{router}/workers"))["workers"]
            await abort_servers_until_idle([worker["url"] for worker in workers])
            await asyncio.wait(self._running)
            for task in self._running:
                stopped = self._stopped(task)
                if stopped.finish_reason is None:
                    interrupted.append(stopped)
                else:
                    self._scheduler.finished(stopped)
            self._state.reset()
        self._scheduler.interrupted(interrupted)
        return len(interrupted)

    async def _score(self, group: list[Sample]) -> None:
        """The rewards of a prompt whose reward model looks at all its answers."""
        rewards = await batched_async_rm(self._args, group)
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = reward


def _metrics(batch: TrainBatch, num_interrupted: int) -> dict[str, float]:
    ages = [batch.version - (t.oldest_version or 0) for t in batch.trajectories if t.num_tokens]
    return {
        "rollout/sortedrl/interrupted": num_interrupted,
        "rollout/sortedrl/max_staleness": max(ages, default=0),
        "rollout/sortedrl/mean_tokens": fmean(t.num_tokens for t in batch.trajectories),
    }
