"""Every setting of a training run, by section, checked before anything heavy is loaded.

The keys of `config.toml` are the fields of `TrainSettings` and of its sections: data, rollout,
rewards, passes, adapters, evaluation, saving and tracking stand here; schedule, algorithm and
cluster have modules of their own.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from sortedrl.config.algorithm import Algorithm, Correction, Optimisation
from sortedrl.config.checks import (
    check_device,
    check_values,
    is_installed,
    is_utf8,
    require,
    require_temperature,
)
from sortedrl.config.cluster import Cluster, Layout
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.types import LARGEST_REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """When a checkpoint is saved, which ones are kept, and how many answers as text."""

    every: int = 50
    """Updates between two checkpoints."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept; older ones are deleted."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation score too, however old it is."""
    answers: int = 8
    """Answers of each update to keep as text, from the shortest to the longest, so that the
    report can show what the model wrote; 0 for none."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.every >= 1, f"saving.every must be at least 1, got {self.every}")
        require(
            self.keep_last >= 1,
            f"saving.keep_last must be at least 1, got {self.keep_last}; without a checkpoint "
            "nothing could be resumed",
        )
        require(
            self.answers >= 0,
            f"saving.answers must be at least 0, got {self.answers}; 0 keeps none",
        )


EngineName = Literal["native", "vllm", "sglang", "servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How answers are drawn to train on."""

    engine: EngineName = "native"
    """Who writes the answers.
    native: our own engine, on the very weights that are trained.
    vllm, sglang: that engine, in a process of its own beside the trainer.
    servers: running vLLM or SGLang servers, all together as one engine; see urls."""
    urls: tuple[str, ...] = ()
    """Engine servers only: their addresses, such as http://localhost:8000."""
    options: tuple[str, ...] = ()
    """Engines vllm and sglang: further arguments of theirs, written name=value."""
    queue: int = 0
    """Answers beyond the slots that may wait inside the engine, which then fills a free slot
    without asking; they are started earlier than they would be."""
    hand_over: Path | None = None
    """Engine servers only: the folder through which they get new weights, which they must be able
    to read; by default hand_over in the folder of the run."""
    temperature: float = 1.0
    """Logits are divided by it; the update sees the same probabilities."""
    cache_gib: float | None = None
    """Memory of the engine's cache; by default most of the free GPU memory that the update
    leaves, or a quarter of the RAM."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        names = get_args(EngineName)
        require(self.engine in names, unknown_name("engine", self.engine, names))
        require_temperature("rollout.temperature", self.temperature, is_greedy_allowed=False)
        require(
            self.cache_gib is None or self.cache_gib > 0,
            f"rollout.cache_gib must be positive, got {self.cache_gib}",
        )
        require(self.queue >= 0, f"rollout.queue must be at least 0, got {self.queue}")
        self._check_servers()

    def _check_servers(self) -> None:
        has_servers = self.engine == "servers"
        require(
            bool(self.urls) == has_servers,
            f"rollout.urls are the addresses of engine 'servers', got engine {self.engine!r} with "
            f"{list(self.urls)}; set engine to 'servers' and give at least one address",
        )
        require(
            len(set(self.urls)) == len(self.urls),
            f"rollout.urls must name each server once, got {list(self.urls)}",
        )
        for url in self.urls:
            require(
                url.startswith(("http://", "https://")),
                f"rollout.urls must be addresses such as http://localhost:8000, got {url!r}",
            )
        require(
            self.hand_over is None or has_servers,
            f"rollout.hand_over is for engine 'servers', got it with engine {self.engine!r}; "
            "leave it out",
        )
        require(
            not self.options or self.engine in ("vllm", "sglang"),
            f"rollout.options are for engine 'vllm' or 'sglang', got {list(self.options)} with "
            f"engine {self.engine!r}; leave them out",
        )

    @property
    def is_outside(self) -> bool:
        """Whether the engine has a copy of the weights that are trained, and other kernels."""
        return self.engine != "native"


ChatUse = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What of a row is the prompt, and how the model sees it."""

    prompt_field: str = "prompt"
    """The column with the question: text, or a list of chat messages."""
    answer_field: str | None = None
    """The column with the gold answer, which the reward finds as `answer`. By default the column
    `answer`, if there is one. Every other column goes to the reward under its own name."""
    system: str | None = None
    """A system message to put before every prompt."""
    chat: ChatUse = "auto"
    """auto: the tokenizer's chat template, if it has one, once; text becomes a user message.
    on: the same, and a tokenizer without a template is refused. off: plain text as it stands."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(
            self.system is None or is_utf8(self.system),
            f"system must be UTF-8 text, got {self.system!a:.80}",
        )


OnFailure = Literal["score", "skip", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """The pool of processes that run a reward function."""

    workers: int | None = None
    """Worker processes; by default half of the cores, at least 2 and at most 8."""
    time_limit_seconds: float = 10.0
    """How long one call may take; a call that takes longer is ended, with its worker."""
    memory_gib: float | None = 4.0
    """Memory that a worker and the processes it starts may take beyond what loading the function
    took, shared memory included (on Linux)."""
    on_failure: OnFailure = "score"
    """What becomes of an answer whose call ran into a limit, or killed its worker twice.
    score: it gets failure_reward. skip: it gets no reward and is not trained on.
    stop: the run stops. Failures are counted, written down and warned of in any case."""
    failure_reward: float | None = None
    """The reward of such an answer; by default the lowest one that the function says it gives
    (as those of the built-in tasks do), and never more than 0."""
    batch: int = 32
    """Answers that a batched function is given at once, at most; they share one time limit, and if
    they fail together, each is tried again alone."""
    concurrency: int = 16
    """Calls of an async function that one worker has under way, at most."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        counts = {"workers": self.workers, "batch": self.batch, "concurrency": self.concurrency}
        for name, value in counts.items():
            require(value is None or value >= 1, f"rewards.{name} must be at least 1, got {value}")
        require(
            self.time_limit_seconds > 0 and math.isfinite(self.time_limit_seconds),
            f"rewards.time_limit_seconds must be a positive number, got {self.time_limit_seconds}",
        )
        require(
            self.memory_gib is None or self.memory_gib > 0,
            f"rewards.memory_gib must be positive, got {self.memory_gib}; "
            "leave it out for no limit",
        )
        require(
            self.failure_reward is None or abs(self.failure_reward) <= LARGEST_REWARD,
            f"rewards.failure_reward must lie between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, "
            f"got {self.failure_reward}",
        )

    @property
    def num_workers(self) -> int:
        """Worker processes to start."""
        return self.workers or min(8, max(2, (os.cpu_count() or 2) // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How answers are drawn for an evaluation."""

    samples: int = 1
    """Answers per prompt: k of mean@k, and the most of pass@k."""
    temperature: float | None = None
    """By default 0 (greedy) for one answer per prompt, and 0.6 for several."""
    top_p: float = 1.0
    """Choose among the most likely tokens that together have this probability."""
    max_tokens: int = 1024
    """Tokens after which an answer is cut off."""
    slots: int = 32
    """Answers written at the same time."""
    seed: int = 0
    """The same seed gives the same answers, whatever else is evaluated."""
    limit: int | None = None
    """Only the first rows of every task."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name, count in (
            ("samples", self.samples),
            ("max_tokens", self.max_tokens),
            ("slots", self.slots),
        ):
            require(count >= 1, f"{name} must be at least 1, got {count}")
        require(
            self.temperature is None or 0 <= self.temperature < math.inf,
            f"temperature must be 0 (greedy) or more, got {self.temperature}",
        )
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}")
        require(
            self.samples == 1 or self.temperature != 0,
            f"{self.samples} answers per prompt at temperature 0 would all be the same; "
            "leave the temperature out, or ask for one answer",
        )
        require_temperature("temperature", self.sampling_temperature, is_greedy_allowed=True)
        require(
            self.limit is None or self.limit >= 1, f"limit must be at least 1, got {self.limit}"
        )
        check_values(self)

    @property
    def sampling_temperature(self) -> float:
        """The temperature answers are drawn with."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else 0.6


Precision = Literal["auto", "float32", "bfloat16", "float16"]
_ALPHA = 32
_ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How an update goes through its answers: packed, without padding."""

    tokens: int = 16384
    """Tokens, prompts included, of one pass forward and backward; fewer need less memory."""
    gradient_checkpointing: bool = False
    """Compute the layers twice and keep less: much less memory for a third more time."""
    compiled: bool | None = None
    """Fuse the small operations of the layers with torch.compile: less time and memory for half
    a minute at the start; by default on a GPU."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(self.tokens >= 1, f"passes.tokens must be at least 1, got {self.tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters in place of full training (peft)."""

    rank: int | None = None
    """Rank of the adapters; by default none, and all weights are trained."""
    alpha: int = _ALPHA
    """Their scale, over the rank."""
    targets: tuple[str, ...] = _ALL_LINEAR
    """The layers that get one, by the end of their names; all-linear for all but the output."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require(
            self.rank is None or self.rank >= 1,
            f"lora.rank must be at least 1, got {self.rank}; leave it out for no adapters",
        )
        require(self.alpha >= 1, f"lora.alpha must be at least 1, got {self.alpha}")
        require(
            bool(self.targets) and "" not in self.targets,
            f"lora.targets must name at least one layer, got {list(self.targets)}; leave it out "
            "for all linear layers",
        )
        require(
            self.rank is not None or (self.alpha, self.targets) == (_ALPHA, _ALL_LINEAR),
            "lora.alpha and lora.targets need lora.rank, without which there are no adapters; set "
            "lora.rank, or leave them out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicEvaluation:
    """What the model is asked now and then, and when it is good enough."""

    tasks: tuple[str, ...] = ()
    """Held-out tasks, such as knights_knaves:people=3-7,count=200; by default their split test."""
    shared_rows: Literal["refuse", "leave_out", "allow"] = "refuse"
    """What to do about held-out rows that ask what is trained on: refuse the run, leave them out
    of the training, or allow them."""
    every: int = 50
    """Updates between two evaluations; there is one before the first update and one at the end."""
    samples: int = 1
    """Answers per prompt."""
    temperature: float | None = None
    """By default 0 (greedy) for one answer per prompt, and 0.6 for several."""
    limit: int | None = None
    """Only the first rows of every task."""
    target: float | None = None
    """Stop as soon as the mean score over the tasks has come this far."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name, value in (("every", self.every), ("samples", self.samples)):
            require(value >= 1, f"evaluation.{name} must be at least 1, got {value}")
        require(
            self.limit is None or self.limit >= 1,
            f"evaluation.limit must be at least 1, got {self.limit}; leave it out for all rows",
        )
        require(
            self.temperature is None or 0 <= self.temperature < math.inf,
            f"evaluation.temperature must be 0 or more, got {self.temperature}",
        )
        require(
            self.samples == 1 or self.temperature != 0,
            f"evaluation.samples {self.samples} at temperature 0 would all be the same; leave the "
            "temperature out, or ask for one answer",
        )
        if self.temperature is not None:
            require_temperature("evaluation.temperature", self.temperature, is_greedy_allowed=True)
        require(
            self.target is None or math.isfinite(self.target),
            f"evaluation.target must be a finite number, got {self.target}",
        )
        require(
            self.target is None or bool(self.tasks),
            f"evaluation.target {self.target} needs evaluation.tasks to be measured on",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """Which trackers show the run."""

    tensorboard: bool = False
    """Write TensorBoard files into the run's folder."""
    wandb: str | None = None
    """Send the numbers to this project of Weights & Biases."""
    trackio: str | None = None
    """Send the numbers to this project of trackio."""

    def check_installed(self) -> None:
        """Refuse a tracker that was asked for and is not installed."""
        asked = {
            "tensorboard": self.tensorboard,
            "wandb": self.wandb is not None,
            "trackio": self.trackio is not None,
        }
        for module, is_asked in asked.items():
            if is_asked and not is_installed(module):
                raise ConfigError(
                    f"tracking.{module} needs the package {module}, which is not installed; "
                    f"pip install {module}, or leave tracking.{module} out"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """A training run."""

    model: str = "tiny"
    """A hub name, a folder, a GGUF file, or tiny: a small model made from nothing."""
    task: str = "knights_knaves:people=3-5,count=4096,style=compact"
    """What it is trained on: a task (sortedrl data --help), a file of rows, or a hub name; by
    default its split train."""
    out: Path = Path("runs/train")
    """The folder of the run: config, events, metrics, checkpoints, the trained model."""
    seed: int = 0
    """Decides the order of prompts and every answer; the same seed gives the same run."""
    epochs: int = 1
    """Times the data is gone through."""
    max_updates: int | None = None
    """Stop after so many updates."""
    max_prompt_tokens: int | None = None
    """Leave out longer prompts; by default those that leave no room in the model's context."""
    folder: Path | None = None
    """Folder with the files of the data sets; by default $SORTEDRL_DATA, and then the hub."""
    reward: str | None = None
    """A reward in place of the task's own: my_module:my_function or my_file.py:..."""
    reward_options: tuple[str, ...] = ()
    """Keyword arguments of the reward, written name=value."""
    device: str | None = None
    """cuda, cpu, ...; by default the GPU if there is one."""
    threads: int | None = None
    """CPU threads; by default one for each core that no reward worker needs. Tiny models are
    fastest with 1."""
    precision: Precision = "auto"
    """Of the weights that write and learn; auto is bfloat16 on a GPU, float32 on a CPU.
    16-bit weights are rounded from fp32 masters, which the optimiser works on; in float16 the
    loss is scaled, so that small gradients are not lost."""
    schedule: Schedule = field(default_factory=Schedule)
    engine: EngineSettings = field(default_factory=EngineSettings)
    rollout: Rollout = field(default_factory=Rollout)
    algorithm: Algorithm = field(default_factory=Algorithm)
    correction: Correction = field(default_factory=Correction)
    optimiser: Optimisation = field(default_factory=Optimisation)
    passes: PassSettings = field(default_factory=PassSettings)
    lora: Lora = field(default_factory=Lora)
    layout: Layout = field(default_factory=Layout)
    cluster: Cluster = field(default_factory=Cluster)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: PeriodicEvaluation = field(default_factory=PeriodicEvaluation)
    saving: Saving = field(default_factory=Saving)
    tracking: Tracking = field(default_factory=Tracking)

    def __post_init__(self) -> None:
        """Refuse what cannot work together."""
        check_values(self)
        check_device(self.device)
        require(self.epochs >= 1, f"epochs must be at least 1, got {self.epochs}")
        require(
            self.max_updates is None or self.max_updates >= 1,
            f"max_updates must be at least 1, got {self.max_updates}",
        )
        for name, value in (
            ("max_prompt_tokens", self.max_prompt_tokens),
            ("threads", self.threads),
        ):
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
        self._check_siblings()
        self._check_engine()
        self._check_layout()
        self._check_cluster()
        overlong = self.algorithm.overlong_tokens
        require(
            overlong is None or overlong <= self.engine.max_tokens,
            f"algorithm.overlong_tokens must be at most engine.max_tokens "
            f"({self.engine.max_tokens}), got {overlong}",
        )

    def _check_siblings(self) -> None:
        name = self.algorithm.name
        require(
            not self.algorithm.needs_siblings or self.schedule.samples_per_prompt >= 2,
            f"algorithm {name!r} compares the answers to a prompt, so schedule.samples_per_prompt "
            f"must be at least 2, got {self.schedule.samples_per_prompt}",
        )
        require(
            not self.algorithm.needs_siblings or self.schedule.harvest_unit == "prompt",
            f"algorithm {name!r} compares the answers to a prompt, so schedule.harvest_unit must "
            f"be 'prompt', got {self.schedule.harvest_unit!r}",
        )

    def _check_engine(self) -> None:
        schedule, engine = self.schedule, self.rollout.engine
        is_verified = not (schedule.never_interrupts or schedule.keeps_stale_tokens)
        require(
            engine == "native" or schedule.mode != "coupled" or not is_verified,
            f"schedule.mode 'coupled' needs rollout.engine 'native', got {engine!r}: it has no way "
            "to draw with our noise and to check cached tokens against it under new weights; take "
            "engine 'native', or mode 'partial' (keeps the tokens, corrected by importance "
            "sampling) or 'on_policy' (draws anew)",
        )
        require(
            engine == "native" or schedule.mode != "redraw" or schedule.never_interrupts,
            f"schedule.mode 'redraw' needs rollout.engine 'native', got {engine!r}, which is not "
            "given a seed per answer; take engine 'native', or mode 'on_policy' or 'partial'",
        )

    def _check_layout(self) -> None:
        engine, layout, slots = self.rollout.engine, self.layout, self.engine.slots
        require(
            layout.tensor_parallel == 1 or engine in ("vllm", "sglang"),
            f"layout.tensor_parallel {layout.tensor_parallel} needs rollout.engine 'vllm' or "
            f"'sglang', got {engine!r}; set tensor_parallel to 1 (native engines hold a whole "
            "model each, servers are spread out where they are started)",
        )
        require(
            slots >= layout.engines,
            f"engine.slots are those of all {layout.engines} engines together (layout.devices / "
            f"layout.tensor_parallel), so there must be at least as many, got {slots}",
        )

    def _check_cluster(self) -> None:
        cluster, slots = self.cluster, self.engine.slots
        if not cluster.is_used:
            return
        require(
            slots % cluster.num_workers == 0,
            f"engine.slots are shared evenly by cluster.rollout_workers "
            f"({cluster.num_workers}), got {slots}; make them a multiple",
        )
        require(
            self.rollout.engine != "servers",
            "rollout.engine 'servers' are engines that run elsewhere already, so a cluster has "
            "none to place; leave cluster.rollout_workers out",
        )
        require(
            self.lora.rank is None or cluster.trainer_ranks == 0,
            f"lora.rank needs the trainer in one process, got cluster.trainer_ranks "
            f"{cluster.trainer_ranks}; set it to 0, or train without adapters",
        )
        require(
            self.layout.devices == 1,
            f"layout.devices plans a run, and cluster runs one, got layout.devices "
            f"{self.layout.devices} beside a cluster; leave layout out",
        )
        require(
            not cluster.overlap or self.schedule.keeps_stale_tokens,
            f"cluster.overlap trains on answers of the version before, which schedule.mode "
            f"{self.schedule.mode!r} rules out; take mode 'partial'",
        )

    @property
    def is_overlapped(self) -> bool:
        """Whether workers write while the trainer updates."""
        return self.cluster.is_used and self.cluster.overlap

    @property
    def needs_correction(self) -> bool:
        """Whether tokens are trained on that other probabilities have drawn.

        They are those of older weights, or those of an engine with kernels of its own.
        """
        is_stale = self.schedule.staleness_bound != 0 or self.is_overlapped
        return is_stale or self.rollout.is_outside

    def updates_expected(self, *, num_rows: int) -> int:
        """About how many updates the run has; the learning-rate schedule is stretched to it."""
        answers = num_rows * self.epochs * self.schedule.samples_per_prompt
        whole = max(1, answers // self.schedule.update_batch)
        return whole if self.max_updates is None else min(whole, self.max_updates)
