"""TRL's `GRPOTrainer` on SortedRL's schedule: we generate the answers, everything else is TRL's.

    TRL's loader     only counts the steps; prompts come from the same dataset, in our order
    _prepare_inputs  a generation batch is due: roll out until one is complete, and hand it over
    TRL              rewards, advantages, loss, optimiser step, logging
    on_step_end      the batch is trained, the weights have changed
    checkpoint       buffer, journal and position in the data lie beside TRL's own files

Nothing of TRL is patched. A generation batch has exactly the size TRL plans its steps with, and
nothing is generated between two steps, so a checkpoint of TRL's is complete with our files in it.
With several ranks, each schedules every n-th prompt on its own copy of the model, and all of them
reach a batch of the same size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from sortedrl.config.checks import require
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.toml import toml_text
from sortedrl.core.buffer import Buffer
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.core.clock import WallClock
from sortedrl.core.events import (
    Event,
    EventFile,
    Finish,
    Interrupt,
    Start,
    Update,
    read_events,
)
from sortedrl.core.files import refuse_foreign, write_whole
from sortedrl.core.logs import MetricsFile, Value
from sortedrl.core.meter import Meter
from sortedrl.core.metrics import numbers
from sortedrl.core.randomness import mix
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.core.scheduler import Scheduler
from sortedrl.engines.generation import RolloutEngine, run_to_end
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.engines.native.cache import available_bytes
from sortedrl.engines.native.driver import attention_shape
from sortedrl.engines.streaming.backend import Ask, Limits, Piece
from sortedrl.engines.streaming.engine import StreamedEngine
from sortedrl.errors import CheckpointError, ConfigError, unknown_name
from sortedrl.simulate.survival import Stretch, written_lengths
from sortedrl.training.lora import folded
from sortedrl.types import Key, Prompt, TrainBatch, Trajectory, Weights

logger = logging.getLogger(__name__)

EngineFactory = Callable[[PreTrainedModel], RolloutEngine]
"""Makes an engine on the model whose weights it is to generate with."""

_FOLDER = "sortedrl"
_UPDATES_PER_GROUP = 4
_FORMAT = 1
_EVALUATION = 0x6576616C
_SAMPLED_ROWS = 256
_SPARE_TOKENS = 64
_TRAINED_BYTES = 12
"""Gradient and moments of one trained parameter: TRL allocates them after the engine its cache."""
_SHARE_FOR_CACHE = 0.5
_WINDOW = 4096
_DERIVED = ("samples_per_prompt", "update_batch", "harvest_unit", "exact")
_INSTEAD_OF_SERVER = (
    "start a server and set vllm_mode='server', or leave use_vllm out: the native engine generates "
    "on the GPU that trains, with the weights that are trained"
)


# --- what can run, and with which sizes -----------------------------------------------------------


def schedule_for(
    given: Schedule | Mapping[str, object] | None, args: GRPOConfig, *, world: int = 1
) -> Schedule:
    """The schedule of one rank; its sizes follow from TRL's arguments. Refuses what cannot work."""
    _refuse_arguments(args)
    answers, samples = args.generation_batch_size // world, args.num_generations
    require(
        answers % samples == 0,
        f"each of the {world} processes needs whole prompts: per_device_train_batch_size x "
        f"gradient_accumulation_steps must be a multiple of num_generations = {samples}, got "
        f"{answers}; raise one of them, or lower num_generations",
    )
    values = asdict(given) if isinstance(given, Schedule) else dict(given or {})
    if not isinstance(given, Schedule):
        _refuse_fields(values)
    together = world * answers // samples
    group = values.pop("group_prompts", _UPDATES_PER_GROUP * together)
    require(
        isinstance(group, int) and group > 0 and group % together == 0,
        f"schedule.group_prompts must be a multiple of the {together} prompts of one generation "
        f"batch, got {group}; try {_UPDATES_PER_GROUP * together}",
    )
    derived = {
        "group_prompts": group // world,
        "samples_per_prompt": samples,
        "update_batch": answers,
        "harvest_unit": "prompt",
        "exact": True,
    }
    schedule = Schedule(**{**values, **derived})  # type: ignore[arg-type]
    _refuse_combination(schedule, args)
    return schedule


def _refuse_fields(values: Mapping[str, object]) -> None:
    names = [field.name for field in fields(Schedule)]
    for name in values:
        require(name in names, unknown_name("field of schedule", name, names))
        require(
            name not in _DERIVED,
            f"schedule.{name} follows from the GRPOConfig (num_generations and the generation "
            "batch size); leave it out",
        )


def _refuse_arguments(args: GRPOConfig) -> None:
    require(
        args.steps_per_generation == args.gradient_accumulation_steps,
        "SortedGRPOTrainer makes one optimiser step on each generation batch, so "
        "steps_per_generation must equal gradient_accumulation_steps, got "
        f"{args.steps_per_generation} and {args.gradient_accumulation_steps}; leave "
        "steps_per_generation and generation_batch_size out, and set how many prompts are rolled "
        "out together with schedule={'group_prompts': ...}",
    )
    require(
        not (args.use_vllm and args.vllm_mode == "colocate"),
        f"vLLM inside the trainer's process cannot stream its tokens; {_INSTEAD_OF_SERVER}",
    )
    for name, plain in (
        ("use_transformers_continuous_batching", (False,)),
        ("repetition_penalty", (1.0,)),
        ("generation_kwargs", (None, {})),
        ("cache_implementation", (None,)),
        ("vllm_structured_outputs_regex", (None,)),
    ):
        value = vars(args)[name]
        require(
            value in plain,
            f"{name} must be {plain[0]!r}, got {value!r}: SortedRL's engines sample with "
            "temperature, top_k, top_p and min_p alone; leave it out",
        )


def _refuse_combination(schedule: Schedule, args: GRPOConfig) -> None:
    is_stale = schedule.staleness_bound != 0
    require(
        args.num_iterations == 1 or not is_stale,
        f"num_iterations must be 1 where tokens of older weights are trained on, got "
        f"{args.num_iterations} with schedule {schedule.name!r}; set mode 'coupled', 'redraw' or "
        "'on_policy', or num_iterations to 1",
    )
    require(
        not (is_stale and sampling_of(args, stop_tokens=()).is_filtered),
        "top_k, top_p and min_p must be off where tokens of older weights are trained on, because "
        "TRL computes log-probabilities without these filters; leave them out, or set mode "
        f"'coupled', 'redraw' or 'on_policy'; got schedule {schedule.name!r}",
    )
    needs_native = schedule.mode in ("coupled", "redraw") and not schedule.never_interrupts
    require(
        not (args.use_vllm and needs_native),
        f"mode {schedule.mode!r} needs the native engine, which draws each answer from a seed of "
        "its own; leave use_vllm out, or set mode 'partial' or 'on_policy'",
    )


def sampling_of(args: GRPOConfig, *, stop_tokens: Sequence[int]) -> Sampling:
    """TRL's sampling arguments as the engines take them."""
    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k or None,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        stop_tokens=frozenset(stop_tokens),
    )


# --- prompts --------------------------------------------------------------------------------------


class DatasetPrompts:
    """A `PromptSource` over a dataset: every row once per epoch, every `world`-th for each rank.

    A prompt's id is its position in the stream of all ranks. Rows are tokenized when they are
    taken.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenize: Callable[[list[Any]], Sequence[Sequence[int]]],
        *,
        total: int,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
        position: int = 0,
    ) -> None:
        """A stream of `total` prompts for this rank, of which `position` were taken before."""
        self._dataset = dataset
        self._tokenize = tokenize
        self._total = total
        self._shuffle = shuffle
        self._seed = seed
        self._rank, self._world = rank, world
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.position = position

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self.position >= self._total

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts of this rank; fewer than `count` only at the end."""
        end = max(self.position, min(self.position + count, self._total))
        ids = [position * self._world + self._rank for position in range(self.position, end)]
        self.position = end
        if not ids:
            return []
        rows = [self._row_at(number) for number in ids]
        tokens = self._tokenize([self._dataset[row]["prompt"] for row in rows])
        return [
            Prompt(id=number, tokens=tuple(ids_T), fields={"row": row})
            for number, ids_T, row in zip(ids, tokens, rows, strict=True)
        ]

    def row_of(self, prompt: Prompt) -> dict[str, Any]:
        """The row of the dataset that a prompt was made from."""
        row: dict[str, Any] = dict(self._dataset[prompt.fields["row"]])
        return row

    def longest(self) -> int:
        """Tokens of the longest prompt among a sample of the rows."""
        step = max(1, len(self._dataset) // _SAMPLED_ROWS)
        rows = range(0, len(self._dataset), step)
        return max(map(len, self._tokenize([self._dataset[row]["prompt"] for row in rows])))

    @property
    def fingerprint(self) -> str:
        """A hash of the number of rows and of some of the prompts."""
        size = len(self._dataset)
        digest = hashlib.sha256(str(size).encode())
        for row in range(0, size, max(1, size // _SAMPLED_ROWS)):
            digest.update(json.dumps(self._dataset[row]["prompt"], default=str).encode())
        return digest.hexdigest()

    def _row_at(self, number: int) -> int:
        epoch, place = divmod(number, len(self._dataset))
        if not self._shuffle:
            return place
        if self._order[0] != epoch:
            rows = range(len(self._dataset))
            self._order = (epoch, sorted(rows, key=lambda row: mix(self._seed, epoch, row)))
        return self._order[1][place]


# --- engines --------------------------------------------------------------------------------------


class SyncedServer:
    """A vLLM server as a `Backend`; TRL sends it new weights and resets its prefix cache."""

    def __init__(self, server: Any, *, slots: int) -> None:  # noqa: ANN401  needs extra `servers`
        """Take over an opened `VllmServer`, with a share of its slots."""
        self._server = server
        self.name: str = server.name
        self.limits: Limits = replace(server.limits, slots=slots)

    def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        """Generate an answer."""
        stream: AsyncIterator[Piece] = self._server.stream(ask)
        return stream

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these answers."""
        await self._server.abort(ids)

    async def load_weights(self, weights: Weights) -> None:
        """TRL has sent them already."""

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._server.close()


async def _opened_server(
    url: str, *, vocabulary: int, context: int, temperature: float, world: int, folder: Path
) -> SyncedServer:
    from sortedrl.engines.vllm.server import VllmServer

    server = await VllmServer.opened(
        url,
        vocabulary=vocabulary,
        context=context,
        temperature=temperature,
        slots=None,
        hand_over=folder / "hand_over",
    )
    return SyncedServer(server, slots=max(1, server.limits.slots // world))


def _base_model(model: Any) -> PreTrainedModel:  # noqa: ANN401  a PeftModel where peft is installed
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


def _plain_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The weights by the names of a model without adapters, which are folded in."""
    parameters = dict(model.named_parameters())
    if not any(".lora_" in name for name in parameters):
        return parameters
    with torch.no_grad():
        return folded(model)


# --- numbers --------------------------------------------------------------------------------------


class LengthWindow:
    """Lengths trained on, over the lengths the policy writes; of the last few thousand answers."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._attempts: dict[Key, int] = {}
        self._last: dict[Key, Stretch] = {}
        self._seen: deque[Stretch] = deque(maxlen=_WINDOW)
        self._trained: deque[int] = deque(maxlen=_WINDOW)

    def __call__(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Start):
            key = (event.prompt, event.sample)
            if self._attempts.get(key, event.attempt) != event.attempt and key in self._last:
                self._seen.append(self._last.pop(key))
            self._attempts[key] = event.attempt
        elif isinstance(event, Finish | Interrupt):
            key = (event.prompt, event.sample)
            is_first = self._attempts[key] == 0
            self._last[key] = Stretch(0, event.tokens, isinstance(event, Finish), is_first)
        elif isinstance(event, Update):
            for trained in event.trained:
                key = (trained.prompt, trained.sample)
                del self._attempts[key]
                self._seen.append(self._last.pop(key))
                self._trained.append(trained.tokens)

    @property
    def bias(self) -> float:
        """Mean length trained on over mean length written; NaN where nothing is known."""
        seen = [s for s in (*self._seen, *self._last.values()) if s.exit > s.entry]
        if not seen or not self._trained:
            return math.nan
        return sum(self._trained) / len(self._trained) / written_lengths(seen).mean


_SUMMED = ("goodput", "throughput", "discarded_tokens")
_AVERAGED = ("bubble", "mean_staleness", "length_bias")
_LARGEST = ("max_staleness",)


# --- one rank's rollouts --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank this is, and where it writes."""

    folder: Path
    rank: int
    world: int

    @property
    def events(self) -> Path:
        """Everything that happened on this rank; that of rank 0 is what `sortedrl report` reads."""
        name = "events.jsonl" if self.rank == 0 else f"events-rank-{self.rank}.jsonl"
        return self.folder / name

    @property
    def metrics(self) -> Path | None:
        """One line of numbers for each update."""
        return self.folder / "metrics.jsonl" if self.rank == 0 else None

    def state(self, checkpoint: Path, rank: int | None = None) -> Path:
        """The state of a rank in a checkpoint; its buffer lies beside it."""
        return checkpoint / _FOLDER / f"rank-{self.rank if rank is None else rank}.json"

    def is_complete(self, checkpoint: Path) -> bool:
        """Whether a checkpoint has TRL's state, which is written last, and that of every rank."""
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (OSError, ValueError):
            return False
        return all(self.state(checkpoint, rank).is_file() for rank in range(self.world))

    def newest_checkpoint(self) -> Path:
        """The newest complete checkpoint; half-written ones of a killed run do not count."""
        found = [path for path in self.folder.glob("checkpoint-*") if path.name[11:].isdigit()]
        for path in sorted(found, key=lambda path: int(path.name[11:]), reverse=True):
            if self.is_complete(path):
                return path
        raise CheckpointError(
            f"{self.folder} holds no complete checkpoint of SortedGRPOTrainer with {self.world} "
            "processes; train without resume_from_checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a checkpoint says about one rank."""

    path: Path
    state: Mapping[str, Any]
    buffer: Buffer

    @classmethod
    def read(cls, path: Path) -> Saved:
        """The state at this path, with the buffer beside it."""
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} must hold the state of this rank, but cannot be read ({error}); resume a "
                "checkpoint that SortedGRPOTrainer saved with as many processes, or start a new "
                "run with its folder as the model"
            ) from error
        buffer = Buffer.from_state(load_buffer(path.with_suffix(".buffer")))
        return cls(path=path, state=state, buffer=buffer)

    def refuse_others(self, own: Mapping[str, object]) -> None:
        """Refuse settings under which this would be another run."""
        for name, value in own.items():
            if self.state[name] != value:
                raise CheckpointError(
                    f"a run is resumed with the settings it was saved under; {name} was "
                    f"{self.state[name]!r}, is {value!r}; set it back, or start a new run with "
                    f"the model {self.path.parent.parent}"
                )


class Rollouts:
    """The scheduler of one rank with its engine, prompts and logs, from the first step on."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        engine: RolloutEngine,
        prompts: DatasetPrompts,
        place: RankPlace,
        submit: Callable[[Sequence[Trajectory], float | None], None],
        sync: Callable[[int], None],
        seed: int,
        saved: Saved | None = None,
        is_cut: bool = False,
    ) -> None:
        """Begin a run, or continue the saved one; `is_cut`: in the middle of a batch.

        `sync` gives the engine the present weights under a version, where it does not have them.
        """
        self.prompts = prompts
        self._engine, self._submit, self._sync = engine, submit, sync
        self._place, self._seed, self._schedule = place, seed, schedule
        self.meter, self._lengths = Meter(), LengthWindow()
        kept = {"events": None, "metrics": None} if saved is None else saved.state["bytes"]
        if saved is None:
            for path in filter(None, (place.events, place.metrics)):
                refuse_foreign(path, mark=b'"begin"' if path == place.events else b'"update"')
        else:
            EventFile(place.events, keep_bytes=kept["events"]).close()
            for event in read_events(place.events):
                self.meter(event)
                self._lengths(event)
        self._events = EventFile(place.events, keep_bytes=kept["events"], is_watched=True)
        metrics = place.metrics
        self._metrics = None
        if metrics is not None:
            self._metrics = MetricsFile(metrics, keep_bytes=kept["metrics"])
        state = None if saved is None else JournalState.from_json(saved.state["journal"])
        self.clock = WallClock(start=0.0 if state is None else state.seconds)
        self._journal = Journal(self._record, clock=self.clock, state=state)
        self.scheduler = Scheduler(
            prompts,
            slots=engine.slots,
            schedule=schedule,
            seed=seed,
            buffer=None if saved is None else saved.buffer,
            journal=self._journal,
            version=0 if saved is None else saved.state["version"],
        )
        self._is_resumed = saved is not None
        if saved is None:
            self.scheduler.begin(version=0)
        else:
            self._journal.resumed(self.scheduler.version)
            if schedule.splits_rollouts or is_cut:
                self.scheduler.cut_batches()

    def next_batch(self) -> TrainBatch:
        """The next update batch, siblings side by side; rolls out until there is one."""
        while (batch := self.scheduler.batch()) is None:
            if self.scheduler.done:
                raise ConfigError(
                    "every prompt is trained, but TRL asks for another generation batch; start "
                    "a new run, or resume with more num_train_epochs or max_steps"
                )
            self._roll_out()
        return TrainBatch(batch.version, tuple(sorted(batch.trajectories, key=lambda t: t.key)))

    def scored(self, batch: TrainBatch, rewards: Sequence[float | None]) -> None:
        """TRL has scored the answers of this batch."""
        pairs = zip(batch.trajectories, rewards, strict=True)
        self._journal.scored([replace(answer, reward=reward) for answer, reward in pairs])

    def trained(self, *, update: int, rewards: Sequence[float | None]) -> dict[str, float]:
        """TRL's optimiser step on the last batch is done; gives the numbers of its window."""
        self.scheduler.weights_changed()
        figures, run = self.meter.window(), self.meter.run
        known = [reward for reward in rewards if reward is not None]
        row: dict[str, Value] = {
            "update": update,
            "version": self.scheduler.version,
            "total/seconds": self.clock.seconds(),
            "total/samples": run.trajectories,
            "total/trained_tokens": run.ledger.trained,
            "total/decoded_tokens": run.ledger.decoded,
            **{f"rollout/{name}": value for name, value in numbers(figures).items()},
            "reward/mean": sum(known) / len(known) if known else None,
        }
        if self._metrics is not None:
            self._metrics(row)
        if self.scheduler.done:
            self.scheduler.end_round()
            self._journal.ended(self.scheduler.buffer)
        return {**numbers(figures), "length_bias": self._lengths.bias}

    def save(self, checkpoint: Path) -> None:
        """Write buffer, journal and position into a checkpoint's folder."""
        path = self._place.state(checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_buffer(self.scheduler.buffer.state(), path.with_suffix(".buffer"))
        metrics = self._metrics
        state = {
            **self.identity,
            "version": self.scheduler.version,
            "position": self.prompts.position,
            "journal": self._journal.state().to_json(),
            "bytes": {
                "events": self._events.sync(),
                "metrics": None if metrics is None else metrics.sync(),
            },
        }
        write_whole(path, json.dumps(state).encode())

    @property
    def identity(self) -> dict[str, object]:
        """What a resumed run must find again."""
        return identity_of(self._schedule, self.prompts, self._place, seed=self._seed)

    def close(self) -> None:
        """Close the logs."""
        self._events.close()
        if self._metrics is not None:
            self._metrics.close()

    def _record(self, event: Event) -> None:
        self._events(event)
        self.meter(event)
        self._lengths(event)

    def _roll_out(self) -> None:
        scheduler, tolerance = self.scheduler, self.scheduler.controller.mode.tolerance
        if self._is_resumed:
            scheduler.end_round()
            self._is_resumed = False
        self._journal.mark()
        self._sync(scheduler.version)
        if self._journal.version != scheduler.version:
            self._journal.handed_over(scheduler.version)
        scheduler.begin_round()
        while not scheduler.should_harvest:
            scheduler.slots = self._engine.slots
            self._submit(scheduler.to_start(), tolerance)
            if scheduler.num_running:
                step = self._engine.step()
                self._journal.stepped(step)
                for trajectory in step.finished:
                    scheduler.finished(trajectory)
        scheduler.interrupted(self._engine.interrupt() if scheduler.num_running else ())


def identity_of(
    schedule: Schedule, prompts: DatasetPrompts, place: RankPlace, *, seed: int
) -> dict[str, object]:
    """What makes two runs the same one: format, ranks, seed, schedule and data."""
    return {
        "format": _FORMAT,
        "world": place.world,
        "seed": seed,
        "schedule": json.loads(json.dumps(asdict(schedule))),
        "data": prompts.fingerprint,
    }


# --- the trainer ----------------------------------------------------------------------------------


class _StepEnd(TrainerCallback):  # type: ignore[misc]
    """Tells the trainer that TRL's optimiser step is done, before anything is logged or saved."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Called by transformers' trainer."""
        self._ended()


class SortedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with answers from SortedRL's scheduler.

    `schedule` is a `Schedule`, or only the fields to set, such as `{"mode": "coupled"}`; its sizes
    follow from the `GRPOConfig`. The native engine generates with the weights that TRL trains, or
    TRL's vLLM server where `use_vllm` is set; `engine` makes another one on the model. `slots` are
    the answers that each process generates at once, by default as many as it trains per step.
    """

    _tag_names = ["trl", "grpo", "sortedrl"]  # noqa: RUF012  as TRL declares it

    def __init__(
        self,
        model: Any,  # noqa: ANN401  as TRL has it: a name, a PreTrainedModel or a PeftModel
        reward_funcs: Any = None,  # noqa: ANN401
        args: GRPOConfig | None = None,
        train_dataset: Any = None,  # noqa: ANN401
        eval_dataset: Any = None,  # noqa: ANN401
        processing_class: Any = None,  # noqa: ANN401
        reward_processing_classes: Any = None,  # noqa: ANN401
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,  # noqa: ANN401
        peft_config: Any = None,  # noqa: ANN401
        tools: Any = None,  # noqa: ANN401
        rollout_func: Any = None,  # noqa: ANN401
        environment_factory: Any = None,  # noqa: ANN401
        *,
        schedule: Schedule | Mapping[str, object] | None = None,
        engine: EngineFactory | None = None,
        slots: int | None = None,
    ) -> None:
        """Refuse what cannot work, then make TRL's trainer."""
        if tools or environment_factory is not None:
            raise ConfigError(
                "tools and environment_factory are not supported yet; use TRL's GRPOTrainer for "
                "conversations"
            )
        if rollout_func is not None:
            raise ConfigError(
                "rollout_func and SortedRL's scheduler both generate the answers; leave "
                "rollout_func out, or use TRL's GRPOTrainer"
            )
        if not isinstance(train_dataset, Dataset):
            raise ConfigError(
                "train_dataset must be a datasets.Dataset, whose rows can be looked up, got "
                f"{type(train_dataset).__name__}; load it without streaming"
            )
        if args is not None:
            schedule_for(schedule, args, world=args.world_size)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
        )
        self.schedule = schedule_for(schedule, self.args, world=self.args.world_size)
        self._refuse_setup()
        self._make_engine = engine
        self._slots = slots or self.schedule.update_batch
        self._sampling = sampling_of(self.args, stop_tokens=self.eos_token_ids)
        self._engine: RolloutEngine | None = None
        self._shares_weights = True
        self._synced_step: int | None = None
        self._rollouts: Rollouts | None = None
        self._resume_from: Path | None = None
        self._batch = TrainBatch(0, ())
        self._rewards: list[float | None] = []
        self._passes = 0
        self._is_batch_cut = False
        self._eval_batches = 0
        self.add_callback(_StepEnd(self._step_ended))

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,  # noqa: ANN401
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:  # noqa: ANN401
        """Train; `True` resumes the newest complete checkpoint in `output_dir`."""
        place = self._place
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(place.newest_checkpoint())
        self._resume_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self._rollouts, self._buffered_inputs, self._synced_step = None, None, None
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            if self._rollouts is not None:
                self._rollouts.close()

    def evaluate(
        self,
        eval_dataset: Any = None,  # noqa: ANN401
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """TRL's evaluation with answers of our engine; every one draws from the same noise."""
        self._eval_batches = 0
        clock = self._rollouts.clock if self._rollouts is not None else WallClock()
        with clock.paused():
            metrics: dict[str, float] = super().evaluate(
                eval_dataset, ignore_keys, metric_key_prefix
            )
        return metrics

    # --- where TRL asks for answers ---------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:  # noqa: ANN401
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        rollouts = self._rollouts or self._open_rollouts()
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            self._batch = rollouts.next_batch()
            generation_batch = [rollouts.prompts.row_of(t.prompt) for t in self._batch.trajectories]
        return super()._prepare_inputs(generation_batch)

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,  # noqa: ANN401
        multimodal_fields: Any,  # noqa: ANN401
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        if self.model.training:
            answers = self._batch.trajectories
            assert [list(t.prompt.tokens) for t in answers] == list(map(list, prompt_ids))
        else:
            answers = self._evaluated(prompt_ids)
        return [t.tokens for t in answers], [t.logprobs for t in answers]

    def _generate_and_score_completions(self, inputs: Any) -> Any:  # noqa: ANN401
        output = super()._generate_and_score_completions(inputs)
        # With vLLM, TRL corrects for the sampling log-probabilities itself.
        is_corrected = self.use_vllm and self.vllm_importance_sampling_correction
        is_stale = self.schedule.staleness_bound != 0 or self._is_batch_cut
        if self.model.training and is_stale and not is_corrected:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _calculate_rewards(
        self,
        inputs: Any,  # noqa: ANN401
        prompts: Any,  # noqa: ANN401
        completions: Any,  # noqa: ANN401
        completion_ids_list: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        rewards_NF = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training and self._rollouts is not None:
            first = self.accelerator.process_index * len(prompts)
            own_BF = rewards_NF[first : first + len(prompts)].cpu()
            total_B = (own_BF * self.reward_weights).nansum(dim=1)
            total_B[own_BF.isnan().all(dim=1)] = math.nan
            self._rewards = [value if math.isfinite(value) else None for value in total_B.tolist()]
            self._rollouts.scored(self._batch, self._rewards)
        return rewards_NF

    def _step_ended(self) -> None:
        """An optimiser step is done; after the last pass over a batch the batch is trained."""
        self._passes += 1
        if self._passes < self.num_iterations or self._rollouts is None:
            return
        self._passes, self._is_batch_cut = 0, False
        found = self._rollouts.trained(update=self.state.global_step, rewards=self._rewards)
        names = (*_SUMMED, *_AVERAGED, *_LARGEST)
        own = torch.tensor([found[name] for name in names], device=self.accelerator.device)
        all_RN = self.accelerator.gather(own.float()[None])
        for place, name in enumerate(names):
            of_ranks = all_RN[:, place]
            if name in _SUMMED:
                value = of_ranks.sum()
            else:
                value = of_ranks.max() if name in _LARGEST else of_ranks.nanmean()
            self._metrics["train"][f"sortedrl/{name}"].append(value.item())

    # --- beginning and resuming -------------------------------------------------------------------

    @property
    def _place(self) -> RankPlace:
        return RankPlace(
            folder=Path(self.args.output_dir),
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )

    def _open_rollouts(self) -> Rollouts:
        place, schedule, seed = self._place, self.schedule, self.args.seed
        batches, left = divmod(self.state.max_steps, self.num_iterations)
        require(
            left == 0,
            f"max_steps must be a multiple of num_iterations = {self.num_iterations}, got "
            f"{self.state.max_steps}; every generation batch is trained on that often",
        )
        prompts = DatasetPrompts(
            self.train_dataset,
            self._tokenized,
            total=batches * schedule.update_batch // schedule.samples_per_prompt,
            shuffle=self.shuffle_dataset,
            seed=seed,
            rank=place.rank,
            world=place.world,
        )
        saved = None
        if self._resume_from is not None:
            saved = Saved.read(place.state(self._resume_from))
            saved.refuse_others(identity_of(schedule, prompts, place, seed=seed))
            prompts.position = saved.state["position"]
        place.folder.mkdir(parents=True, exist_ok=True)
        engine = self._opened_engine(prompts)
        # TRL counts its micro-steps from 0 again after a resume.
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        self._passes = self.state.global_step % self.num_iterations
        self._is_batch_cut = self._passes > 0
        self._rollouts = Rollouts(
            schedule=schedule,
            engine=engine,
            prompts=prompts,
            place=place,
            submit=self._submit,
            sync=self._sync_engine,
            seed=seed,
            saved=saved,
            is_cut=self._is_batch_cut,
        )
        if place.rank == 0:
            self._write_config(place, engine)
        return self._rollouts

    def _write_config(self, place: RankPlace, engine: RolloutEngine) -> None:
        settings = EngineSettings(slots=engine.slots, max_tokens=self.max_completion_length)
        tables = {
            "seed": self.args.seed,
            "schedule": {k: v for k, v in asdict(self.schedule).items() if v is not None},
            "engine": asdict(settings),
        }
        write_whole(place.folder / "config.toml", toml_text(tables).encode())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ANN401
        if self._rollouts is not None and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial))
            self._rollouts.save(folder / f"checkpoint-{self.state.global_step}")
            # TRL's trainer_state.json, written last, tells that the checkpoint is complete.
            self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    # --- the engine -------------------------------------------------------------------------------

    def _refuse_setup(self) -> None:
        if self._is_vlm:
            raise ConfigError(
                "SortedRL's engines generate from text alone; use TRL's GRPOTrainer for images"
            )
        if not self.use_vllm and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ConfigError(
                "the native engine needs the whole model in every process, which FSDP and "
                "DeepSpeed do not keep; use DDP, or use_vllm with vllm_mode='server'"
            )
        together = self.args.generation_batch_size // self.num_generations
        require(
            len(self.train_dataset) >= together,
            f"train_dataset must have at least the {together} prompts of one generation batch, "
            f"got {len(self.train_dataset)}; lower the batch size",
        )

    def _tokenized(self, prompts: list[Any]) -> Sequence[Sequence[int]]:
        ids, _, _ = self._tokenize_prompts(prompts)
        tokens: Sequence[Sequence[int]] = ids
        return tokens

    def _opened_engine(self, prompts: DatasetPrompts) -> RolloutEngine:
        """The engine, made when it is first needed: only then is the model in its place."""
        if self._engine is not None:
            return self._engine
        if self.use_vllm:
            self._engine = self._server_engine(prompts)
            return self._engine
        base = _base_model(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.accelerator.mixed_precision, base.dtype
        )
        # Under autocast the weights are cast in every pass: the engine has a copy that is cast.
        self._shares_weights = autocast == base.dtype
        own = base if self._shares_weights else _cast_copy(base, autocast)
        if self._make_engine is not None:
            self._engine = self._make_engine(own)
        else:
            self._engine = NativeEngine(
                own,
                slots=self._slots,
                max_tokens=self.max_completion_length,
                sampling=self._sampling,
                cache_bytes=self._cache_bytes(own, longest_prompt=prompts.longest()),
            )
        mode = self.schedule.mode
        is_outside = isinstance(self._engine, StreamedEngine)
        require(
            not is_outside or mode not in ("coupled", "redraw") or self.schedule.never_interrupts,
            f"mode {mode!r} needs the native engine, got {self._engine.name}; set mode 'partial' "
            "or 'on_policy', or leave engine out",
        )
        return self._engine

    def _server_engine(self, prompts: DatasetPrompts) -> StreamedEngine:
        args, config = self.args, self.model.config.get_text_config()
        url = args.vllm_server_base_url or (
            f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        )
        longest = prompts.longest() + self.max_completion_length
        return StreamedEngine(
            lambda: _opened_server(
                url,
                vocabulary=config.vocab_size,
                context=min(config.max_position_embeddings, longest),
                temperature=args.temperature,
                world=self.accelerator.num_processes,
                folder=Path(args.output_dir),
            ),
            max_tokens=self.max_completion_length,
            stop_tokens=self.eos_token_ids,
            sampling=self._sampling,
        )

    def _cache_bytes(self, model: PreTrainedModel, *, longest_prompt: int) -> int:
        """All slots at their longest, if that fits into a share of what an update leaves free."""
        config = model.config.get_text_config()
        layers, heads, dim = attention_shape(config)
        context = min(config.max_position_embeddings, longest_prompt + self.max_completion_length)
        longest = (context + _SPARE_TOKENS) * 2 * layers * heads * dim * model.dtype.itemsize
        free = available_bytes(model.device)
        if model.device.type == "cuda":
            trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            free -= _TRAINED_BYTES * trained
        return min(self._slots * longest, max(longest, int(free * _SHARE_FOR_CACHE)))

    def _sync_engine(self, version: int) -> None:
        """Give the engine the present weights, unless it has them."""
        engine = self._engine
        assert engine is not None, "the engine is opened with the first batch"
        if self._synced_step == self.state.global_step and engine.version == version:
            return
        if self.use_vllm:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        tensors = None
        if not (self._shares_weights or self.use_vllm):
            tensors = _plain_weights(_base_model(self.accelerator.unwrap_model(self.model)))
        engine.load_weights(Weights(version, tensors))
        self._synced_step = self.state.global_step

    def _submit(self, trajectories: Sequence[Trajectory], tolerance: float | None) -> None:
        assert self._engine is not None, "the engine is opened with the first batch"
        self._engine.submit_with(
            trajectories,
            tolerance=tolerance,
            sampling=self._sampling,
            max_tokens=self.max_completion_length,
        )

    def _evaluated(self, prompt_ids: Sequence[Sequence[int]]) -> list[Trajectory]:
        """Complete answers to the prompts of one evaluation batch."""
        rows = DatasetPrompts(
            self.train_dataset, self._tokenized, total=0, shuffle=False, seed=self.args.seed
        )
        engine = self._opened_engine(rows)
        version = 0 if self._rollouts is None else self._rollouts.scheduler.version
        self._sync_engine(version)
        number, self._eval_batches = self._eval_batches, self._eval_batches + 1
        key = (self.args.seed, _EVALUATION, self.accelerator.process_index, number)
        fresh = [
            Trajectory(
                prompt=Prompt(id=index, tokens=tuple(tokens)),
                sample_index=0,
                group=0,
                seed=mix(*key, index),
            )
            for index, tokens in enumerate(prompt_ids)
        ]
        self._submit(fresh, None)
        return run_to_end(engine, [t.key for t in fresh], show_progress=False)


def _cast_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the same shape in another precision; its weights are still to be loaded."""
    with torch.random.fork_rng(), model.device:
        copy: PreTrainedModel = AutoModelForCausalLM.from_config(
            deepcopy(model.config), dtype=dtype
        )
    return copy.requires_grad_(False).eval()
