"""slime's data source and rollout function: the scheduler decides, slime generates.

    SAVE/rollout/global_dataset_state_dict_N.pt   slime's: the place in the data
    SAVE/rollout/sortedrl_N/buffer.bin            every trajectory that is not trained
    SAVE/rollout/sortedrl_N/state.json            their samples, the version, the journal

Invariant: for every trajectory in the scheduler's buffer there is the sample of its prompt, and for
every one that has tokens the sample with these tokens.

Answers are generated and scored by slime's `generate_and_rm`, so custom generate functions, reward
models and sample hooks work as they do in slime. When enough prompts are complete, what still runs
is aborted on the servers and goes back to the scheduler with its tokens.

Our settings are keys of the YAML file of `--custom-config-path`, which slime makes attributes:
sortedrl_mode, sortedrl_group_prompts, sortedrl_lookahead, sortedrl_max_staleness.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.async_utils import run
from slime.utils.http_utils import get, get_rollout_num_engines
from slime.utils.misc import load_function
from slime.utils.types import Sample

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.core.clock import WallClock
from sortedrl.core.events import EventFile
from sortedrl.core.files import write_whole
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.core.scheduler import Scheduler
from sortedrl.errors import CheckpointError, ConfigError, DataError
from sortedrl.integrations import schedule_of_batches
from sortedrl.types import Key, Prompt, TrainBatch, Trajectory

_PREFIX = "sortedrl_"
_REFUSED = {
    "dynamic_sampling_filter_path": "every prompt is trained",
    "rollout_all_samples_process_path": "there is no sample but those that are trained",
    "buffer_filter_path": "the schedule decides what comes next",
    "multimodal_keys": "images are not saved",
}


class SortedDataSource(RolloutDataSource):
    """slime's data source, which also holds what is begun and what is complete."""

    def __init__(self, args: Any) -> None:  # noqa: ANN401  slime's Namespace
        """Read the data; the scheduler is made with the first rollout."""
        super().__init__(args)
        self._scheduler: Scheduler | None = None
        self._fresh: dict[int, list[Sample]] = {}
        self._begun: dict[Key, Sample] = {}
        self._batch: TrainBatch | None = None
        self._events: EventFile | None = None

    # --- the stream of prompts: a `PromptSource` --------------------------------------------------

    @property
    def is_exhausted(self) -> bool:
        """Whether all prompts of the run were taken."""
        return bool(self.sample_group_index >= self._num_prompts)

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts; their ids are slime's group indices."""
        count = min(count, self._num_prompts - self.sample_group_index)
        groups = self.get_samples(count) if count > 0 else []
        self._fresh.update({group[0].group_index: group for group in groups})
        return [Prompt(id=group[0].group_index) for group in groups]

    @property
    def _num_prompts(self) -> int:
        rollouts = self.args.num_rollout
        if rollouts is None:
            rollouts = len(self) // self.args.rollout_batch_size * self.args.num_epoch
        return int(rollouts * self.args.rollout_batch_size)

    # --- what a rollout does ----------------------------------------------------------------------

    def scheduler(self, *, slots: int) -> Scheduler:
        """The scheduler; what it gave to train on last time is trained now."""
        if self._scheduler is None:
            self._scheduler = self._opened(None, name="events.jsonl")
        self._scheduler.slots = slots
        self._mark_trained()
        return self._scheduler

    def started(self, trajectory: Trajectory) -> Sample:
        """The sample to generate: with the tokens of the trajectory, or without any."""
        if trajectory.num_tokens == 0:
            fresh = self._fresh[trajectory.prompt.id][trajectory.sample_index]
            self._begun[trajectory.key] = copy.deepcopy(fresh)
        return self._begun[trajectory.key]

    def stopped(self, trajectory: Trajectory, sample: Sample) -> Trajectory:
        """The trajectory with the tokens that its sample has now."""
        assert self._scheduler is not None, "stopped() comes after scheduler()"
        self._begun[trajectory.key] = sample
        old, new = trajectory.num_tokens, sample.response_length
        tokens = sample.tokens[len(sample.tokens) - new + old :]
        logprobs = (sample.rollout_log_probs or [0.0] * new)[old:]
        return trajectory.extended(tokens, logprobs, version=self._scheduler.version)

    def harvested(self, batch: TrainBatch) -> list[list[Sample]]:
        """The samples of an update, prompt by prompt, short ones first."""
        self._batch = batch
        tokens: dict[int, int] = {}
        for t in batch.trajectories:
            tokens[t.prompt.id] = tokens.get(t.prompt.id, 0) + t.num_tokens
        samples = range(self.args.n_samples_per_prompt)
        return [
            [self._begun[prompt, sample] for sample in samples]
            for prompt in sorted(tokens, key=lambda prompt: (tokens[prompt], prompt))
        ]

    def _mark_trained(self) -> None:
        """Slime trains between two rollouts: what was given out last is trained by now."""
        if self._batch is None or self._scheduler is None:
            return
        self._scheduler.weights_changed()
        for t in self._batch.trajectories:
            del self._begun[t.key]
            self._fresh.pop(t.prompt.id, None)
        self._batch = None

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, rollout_id: int) -> None:
        """Save the place in the data, and everything that is not trained."""
        super().save(rollout_id)
        if self._scheduler is None:
            return
        self._mark_trained()
        folder = self._checkpoint(self.args.save, rollout_id)
        folder.mkdir(parents=True, exist_ok=True)
        save_buffer(self._scheduler.buffer.state(), folder / "buffer.bin")
        state = {
            "version": self._scheduler.version,
            "schedule": asdict(self._scheduler.schedule),
            "journal": self._scheduler.journal.state().to_json(),
            "fresh": [[s.to_dict() for s in group] for group in self._fresh.values()],
            "begun": [[*key, sample.to_dict()] for key, sample in self._begun.items()],
        }
        write_whole(folder / "state.json", json.dumps(state).encode())

    def load(self, rollout_id: int | None = None) -> None:
        """Load the state saved with the checkpoint of this rollout; a new run has none."""
        super().load(rollout_id)
        if self.args.load is None or rollout_id is None:
            return
        folder = self._checkpoint(self.args.load, rollout_id)
        if not folder.is_dir():
            return
        try:
            state = json.loads((folder / "state.json").read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder} must hold the state of a rollout, but cannot be read ({error}); load "
                "an older checkpoint"
            ) from error
        self._fresh = {
            g[0]["group_index"]: [Sample.from_dict(s) for s in g] for g in state["fresh"]
        }
        self._begun = {(p, s): Sample.from_dict(sample) for p, s, sample in state["begun"]}
        self._scheduler = self._opened(state, name=f"events-{rollout_id + 1}.jsonl", folder=folder)

    @staticmethod
    def _checkpoint(folder: str, rollout_id: int) -> Path:
        return Path(folder) / "rollout" / f"sortedrl_{rollout_id}"

    def _opened(
        self, state: dict[str, Any] | None, *, name: str, folder: Path | None = None
    ) -> Scheduler:
        schedule = schedule_for(self.args)
        if state is not None and state["schedule"] != asdict(schedule):
            raise CheckpointError(
                f"a run is resumed with the schedule it was saved under, {state['schedule']}, got "
                f"{asdict(schedule)}; set it back, or start a new run"
            )
        if self.args.save is not None:
            path = Path(self.args.save) / "sortedrl" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._events = EventFile(path)
        journal = None if state is None else JournalState.from_json(state["journal"])
        buffer = None if folder is None else Buffer.from_state(load_buffer(folder / "buffer.bin"))
        return Scheduler(
            self,
            slots=1,
            schedule=schedule,
            seed=self.args.rollout_seed,
            buffer=buffer,
            journal=Journal(
                self._events or (lambda event: None),
                clock=WallClock(start=0.0 if journal is None else journal.seconds),
                state=journal,
            ),
            version=0 if state is None else state["version"],
        )


def schedule_for(args: Any) -> Schedule:  # noqa: ANN401  slime's Namespace
    """The schedule; its sizes follow from slime's arguments."""
    schedule = schedule_of_batches(
        {k.removeprefix(_PREFIX): v for k, v in vars(args).items() if k.startswith(_PREFIX)},
        prompts=args.rollout_batch_size,
        samples=args.n_samples_per_prompt,
        prefix=_PREFIX,
        batch_name="--rollout-batch-size",
    )
    for name, because in _REFUSED.items():
        require(
            getattr(args, name) is None,
            f"--{name.replace('_', '-')} does not go with SortedRL's rollout function: {because}; "
            "leave it out",
        )
    _refuse_mode(schedule, args)
    return schedule


def _refuse_mode(schedule: Schedule, args: Any) -> None:  # noqa: ANN401
    require(
        schedule.mode != "coupled",
        "mode 'coupled' needs an engine that verifies cached tokens, which SGLang does not; set "
        "sortedrl_mode to redraw, on_policy or partial",
    )
    require(
        not schedule.keeps_stale_tokens or args.use_rollout_logprobs or args.use_tis,
        "mode 'partial' trains on tokens of older weights, which needs the log-probabilities they "
        "were sampled with; set --use-rollout-logprobs or --use-tis",
    )
    require(
        schedule.mode != "redraw" or args.sglang_enable_deterministic_inference,
        "mode 'redraw' needs a seed per answer, which SGLang ignores unless it is deterministic; "
        "set --sglang-enable-deterministic-inference, or sortedrl_mode to on_policy",
    )


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
        """Wait for the next answers; one that a server aborted on its own is continued."""
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
