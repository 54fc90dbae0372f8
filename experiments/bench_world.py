"""A model with engine and trainer, on which several schedules are run one after another.

Every run starts with the same weights and prompts, with the loop, engine and updates of a training
run. Answer lengths are either forced, sampled once per attempt of every answer, or decided by the
model.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sortedrl.config.algorithm import GradientPrecision, Optimisation, OptimiserState
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Lora, PassSettings, TrainSettings
from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.clock import WallClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event, EventFile, SyncWeights, Update
from sortedrl.core.loop import Loop
from sortedrl.core.meter import Meter, Metrics
from sortedrl.core.randomness import mix, uniform
from sortedrl.core.recorder import Journal
from sortedrl.data.catalogue import open_task
from sortedrl.data.stream import PromptStream, TokenizedRow, tokenized
from sortedrl.engines.native import NativeEngine
from sortedrl.models.loading import load_model
from sortedrl.models.loading import stop_tokens as model_stop_tokens
from sortedrl.runs.tasks import tokenizer_of
from sortedrl.simulate.lengths import Lengths, LengthSettings
from sortedrl.training.attention import checkpoint_layers
from sortedrl.training.forward import PackedModel
from sortedrl.training.lora import add_adapters, trained_parameters
from sortedrl.training.optimiser import Optimiser
from sortedrl.training.trainer import PolicyTrainer
from sortedrl.types import Prompt, Segment, TrainBatch, Trajectory, Weights

_SPARE_TOKENS = 64
_WARM_UP_ANSWERS = 16
_WARM_UP_PROMPT = 96
_WARM_UP_CONTEXT = 512
_GIB = 1 << 30
_COIN_KEY = 0x636F696E


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload shared by all schedules on a model."""

    slots: int
    group: int
    batch: int
    max_tokens: int
    median: float | None = None
    """Median of the forced lengths; `None`: the model ends its answers itself."""
    sigma: float = 1.0
    seed: int = 0
    learning_rate: float = 1e-6
    precision: str = "bfloat16"
    pass_tokens: int = 16384
    task: str = "knights_knaves:people=3-5"
    prompt_tokens: int = 192
    """Length of random prompts, for a model without a tokenizer."""
    optimiser_state: OptimiserState = "fp32"
    gradients: GradientPrecision = "fp32"
    gradient_checkpointing: bool = False
    lora_rank: int | None = None
    is_compiled: bool | None = None
    """Whether updates use compiled layers; by default on a GPU."""
    cache_gib: float | None = None
    """Upper limit; by default enough for the longest answer in every slot."""
    restores: bool = True
    """Whether every run starts with the initial weights, which are kept in memory, and a new
    optimiser."""

    def lengths(self) -> Lengths | None:
        """The forced lengths, if any."""
        if self.median is None:
            return None
        settings = LengthSettings(median=self.median, sigma=self.sigma)
        return Lengths(settings, seed=self.seed, max_tokens=self.max_tokens, samples_per_prompt=1)


class CoinScorer:
    """Random rewards of 0 or 1: learning does not matter here."""

    def submit(self, trajectory: Trajectory) -> None:
        """Nothing to do."""

    def cancel(self, trajectory: Trajectory) -> None:
        """Nothing to do."""

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The answers with their rewards."""
        return [replace(t, reward=coin(t)) for t in trajectories]


def coin(trajectory: Trajectory) -> float:
    """0 or 1, fixed per trajectory."""
    return float(uniform(trajectory.seed, _COIN_KEY) < 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of one run."""

    metrics: Metrics
    lengths: Mapping[tuple[int, int], int]
    """Length of every trained answer, by key."""
    update_seconds: float
    hand_over_seconds: float
    gap: float
    """Mean log-probability difference of engine and trainer on fresh tokens, in nats."""


class BenchWorld:
    """A model, ready for any schedule."""

    def __init__(self, model: PreTrainedModel, source: str | None, workload: Workload) -> None:
        """Do all slow setup once: engine, compiled layers, graphs."""
        self.workload = workload
        self._lengths = workload.lengths()
        self._model = model
        if workload.lora_rank is not None:
            add_adapters(model, Lora(rank=workload.lora_rank), seed=workload.seed)
        if workload.gradient_checkpointing:
            checkpoint_layers(model)
            model.train()
        self._rows = _Rows(source, workload, vocabulary=model.config.vocab_size)
        # Rotary embeddings work at any position; the limit of the config does not matter here.
        model.config.max_position_embeddings = 4 * workload.max_tokens
        stops = () if workload.median is not None else model_stop_tokens(model)
        self.engine = NativeEngine(
            model,
            slots=workload.slots,
            max_tokens=self._limit,
            stop_tokens=stops,
            cache_bytes=self._cache_bytes(),
        )
        on_gpu = model.device.type == "cuda"
        is_compiled = on_gpu if workload.is_compiled is None else workload.is_compiled
        self._policy = PackedModel(model, temperature=1.0, is_compiled=is_compiled)
        self._begun = {
            name: p.detach().clone() for name, p in model.named_parameters() if workload.restores
        }
        self._optimiser: Optimiser | None = None
        if on_gpu:
            written = warm_up(self.engine, max_tokens=workload.max_tokens)
            # The last to finish is the longest; without compiled layers a few are enough.
            chosen = written if is_compiled else written[-_WARM_UP_ANSWERS:]
            self._trainer(Schedule(update_batch=len(chosen))).update(
                TrainBatch(0, tuple(replace(t, reward=coin(t)) for t in chosen))
            )

    @classmethod
    def opened(cls, model: Mapping[str, Any], workload: Workload, *, device: str) -> BenchWorld:
        """Open a model of the TOML: a `source` to load, or a `shape` with random weights."""
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[workload.precision]
        if "source" in model:
            loaded = load_model(model["source"], dtype=dtype, device=device)
            return cls(loaded, model["source"], workload)
        shape = dict(model["shape"])
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        torch.manual_seed(workload.seed)
        with torch.device(device):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return cls(made.eval(), None, workload)

    def run(
        self,
        schedule: Schedule,
        *,
        groups: int,
        events: Path,
        after_update: Callable[[Metrics], None] = lambda metrics: None,
    ) -> Measured:
        """Run one schedule from the first group to the last, and write its event log.

        `after_update` receives the metrics so far.
        """
        self._restore()
        trainer = self._trainer(schedule)
        self.engine.load_weights(Weights(0))
        meter, log, took = Meter(), EventFile(events), {"update": 0.0, "hand_over": 0.0}
        gaps: list[float] = []

        def record(event: Event) -> None:
            meter(event)
            log(event)
            if isinstance(event, Update | SyncWeights):
                took[event.kind] += event.took_seconds

        loop = Loop(
            prompts=self._rows.stream(groups * schedule.group_prompts),
            buffer=Buffer(unit_size=schedule.unit_size),
            controller=Controller(schedule),
            engine=self.engine,
            scorer=CoinScorer(),
            trainer=trainer,
            journal=Journal(record, clock=WallClock()),
            seed=self.workload.seed,
        )
        for _ in loop.run():
            gaps.append(trainer.last.get("gap/mean", 0.0))
            after_update(meter.metrics())
        log.close()
        metrics = meter.metrics()
        return Measured(
            metrics=metrics,
            lengths={key: tokens for key, _, tokens in metrics.trained_lengths},
            update_seconds=took["update"],
            hand_over_seconds=took["hand_over"],
            gap=sum(gaps) / max(1, len(gaps)),
        )

    def reference(self, keys: Sequence[tuple[int, int]], *, samples: int = 1) -> list[int]:
        """The forced lengths of these answers without interruptions."""
        assert self._lengths is not None, "only forced lengths are known in advance"
        prompts = sorted({prompt for prompt, _ in keys})
        fresh = open_group(
            [Prompt(id=prompt) for prompt in prompts],
            group=0,
            samples_per_prompt=samples,
            seed=self.workload.seed,
        )
        return [self._lengths.length(trajectory, version=0) for trajectory in fresh]

    def _limit(self, trajectory: Trajectory) -> int:
        if self._lengths is None:
            return self.workload.max_tokens
        return self._lengths.length(trajectory, version=0)

    def _trainer(self, schedule: Schedule) -> PolicyTrainer:
        workload = self.workload
        optimisation = Optimisation(
            learning_rate=workload.learning_rate,
            state=workload.optimiser_state,
            gradients=workload.gradients,
        )
        settings = TrainSettings(
            schedule=schedule,
            engine=EngineSettings(slots=workload.slots, max_tokens=workload.max_tokens),
            optimiser=optimisation,
            passes=PassSettings(micro_batch_tokens=workload.pass_tokens),
        )
        if self._optimiser is not None and workload.restores:
            self._optimiser.close()
            self._optimiser = None
            gc.collect()  # the optimiser state of the previous run
        if self._optimiser is None:
            self._optimiser = Optimiser(
                trained_parameters(self._model),
                optimisation,
                total_steps=None,
                computes_in=self._model.dtype,
            )
        return PolicyTrainer(self._policy, self._optimiser, settings=settings.update)

    @torch.no_grad()
    def _restore(self) -> None:
        own = dict(self._model.named_parameters())
        for name, begun in self._begun.items():
            own[name].copy_(begun)

    def _cache_bytes(self) -> int:
        config: Any = self._model.config
        dim = config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * dim
        context = self._rows.longest + self.workload.max_tokens + _SPARE_TOKENS
        room: int = (self.workload.slots + 1) * context * per_token
        full = room * self._model.dtype.itemsize
        limit = self.workload.cache_gib
        return full if limit is None else min(full, int(limit * _GIB))


class _Rows:
    """Prompts: puzzles with a tokenizer, otherwise random tokens."""

    def __init__(self, source: str | None, workload: Workload, *, vocabulary: int) -> None:
        self._workload = workload
        self._vocabulary = vocabulary
        self._tokenizer = None if source is None else tokenizer_of(source)
        self._rows: list[TokenizedRow] = []
        self.longest = max(len(row.tokens) for row in self._first(workload.group))

    def stream(self, count: int) -> PromptStream:
        """`count` prompts, always in the same order."""
        return PromptStream(self._first(count), epochs=1, seed=self._workload.seed, position=0)

    def _first(self, count: int) -> list[TokenizedRow]:
        if len(self._rows) < count:
            self._rows = self._made(count)
        return self._rows[:count]

    def _made(self, count: int) -> list[TokenizedRow]:
        workload = self._workload
        if self._tokenizer is not None:
            task = open_task(f"{workload.task},count={count},seed={workload.seed}")
            return list(tokenized(task.rows, self._tokenizer).rows)
        return [
            TokenizedRow(array("i", _random_tokens(workload, number, self._vocabulary)), {})
            for number in range(count)
        ]


def _random_tokens(workload: Workload, number: int, vocabulary: int) -> list[int]:
    places = range(workload.prompt_tokens)
    return [mix(workload.seed, number, place) % vocabulary for place in places]


def warm_up(engine: NativeEngine, *, max_tokens: int) -> list[Trajectory]:
    """Run every batch size at growing context lengths; returns answers of all lengths.

    The engine compiles its layers at the first pass, and captures a graph at the second pass of
    every size.
    """
    written: list[Trajectory] = []
    context = _WARM_UP_CONTEXT
    while context <= max_tokens:
        written = _run_down(engine, longest=context - _WARM_UP_PROMPT - 2 * engine.slots)
        context *= 2
    return written


def _run_down(engine: NativeEngine, *, longest: int) -> list[Trajectory]:
    """Run twice as many answers as slots, each one token longer than the last; one is long."""
    count = 2 * engine.slots
    trajectories = [_trajectory(number, cached=0) for number in range(count - 1)]
    long = _trajectory(count, cached=max(1, longest))
    limits = [*(1 + number % engine.slots for number in range(count - 1)), longest + 2 * count]
    ordered = [long, *trajectories]
    for trajectory, limit in zip(ordered, [limits[-1], *limits[:-1]], strict=True):
        sampling = replace(engine.sampling, max_tokens=limit)
        engine.submit([trajectory], tolerance=None, sampling=sampling)
    finished: list[Trajectory] = []
    while len(finished) < count:
        finished += engine.step().finished
    return finished


def _trajectory(number: int, *, cached: int) -> Trajectory:
    tokens = _counted(cached, first=number)
    segments = (Segment(tokens, [0.0] * cached, 0),) if cached else ()
    prompt = Prompt(id=number, tokens=_counted(_WARM_UP_PROMPT, first=7 * number))
    return Trajectory(prompt=prompt, sample_index=0, group=0, seed=number, segments=segments)


def _counted(count: int, *, first: int) -> Sequence[int]:
    return [(first + 31 * place) % 1000 for place in range(count)]
