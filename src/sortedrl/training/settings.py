"""Every knob of a training run, checked before anything heavy is loaded.

One file, one tree: the keys of `config.toml` are the fields here, section by section.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sortedrl.config import (
    EngineSettings,
    Schedule,
    check_device,
    check_values,
    require,
    require_temperature,
)
from sortedrl.data.settings import DataSettings
from sortedrl.rewards.settings import RewardSettings
from sortedrl.trackers import Tracking
from sortedrl.training.algorithm import Algorithm
from sortedrl.training.cluster import Cluster
from sortedrl.training.correction import Correction
from sortedrl.training.layout import Layout
from sortedrl.training.optimisation import Optimisation
from sortedrl.training.rollout import Rollout
from sortedrl.training.saving import Saving

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
    """CPU threads; by default all cores. Tiny models are fastest with 1."""
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
