"""Settings of a training run, and of supervised fine-tuning.

The keys of `config.toml` are the fields of `TrainSettings` and of its sections: rollout, passes,
adapters, saving and tracking are defined here; schedule, algorithm, cluster and data (with rewards,
environment and evaluation) in their own modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from sortedrl.config.algorithm import Algorithm, Correction, Optimisation
from sortedrl.config.checks import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Temperature,
    at_least,
    check_device,
    check_values,
    is_installed,
    require,
)
from sortedrl.config.cluster import Cluster
from sortedrl.config.data import (
    DataSettings,
    EnvironmentSettings,
    PeriodicEvaluation,
    RewardSettings,
)
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """When checkpoints are saved, which are kept, and how many answers are logged."""

    every: PositiveInt = 50
    """Updates between two checkpoints."""
    keep_last: Annotated[int, at_least(1, "a resumed run needs a checkpoint")] = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best evaluation score, however old."""
    answers: NonNegativeInt = 8
    """Answers of each update logged as text for the report, spread from the shortest to the
    longest; 0 for none."""

    def __post_init__(self) -> None:
        check_values(self, "saving.")


EngineName = Literal["native", "vllm", "sglang", "servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How answers are generated for training."""

    engine: EngineName = "native"
    """The engine that generates answers.
    native: the built-in engine, which shares the weights with the trainer.
    vllm, sglang: that engine, in its own process on this machine.
    servers: running vLLM or SGLang servers, used as one engine; see urls."""
    urls: tuple[str, ...] = ()
    """Engine servers only: their addresses, such as http://localhost:8000."""
    options: tuple[str, ...] = ()
    """Engines vllm and sglang: additional engine arguments, written name=value."""
    queue: NonNegativeInt = 0
    """Requests beyond the slots that may queue inside the engine, so that it refills a free slot
    without delay; they are submitted earlier than necessary."""
    weight_sync_folder: Path | None = None
    """Engine servers only: the folder for weight sync, which the servers must be able to read; by
    default weight_sync in the run folder."""
    temperature: Temperature = 1.0
    """Sampling temperature; updates compute log-probabilities at the same one."""
    cache_gib: PositiveFloat | None = None
    """Memory of the engine's KV cache; by default most of the GPU memory that the update leaves
    free, or a quarter of the RAM."""

    def __post_init__(self) -> None:
        check_values(self, "rollout.")
        self._check_servers()

    def _check_servers(self) -> None:
        has_servers = self.engine == "servers"
        require(
            bool(self.urls) or not has_servers,
            "rollout.engine 'servers' needs the address of at least one server, got none; set "
            "rollout.urls, such as to ['http://localhost:8000']",
        )
        require(
            has_servers or not self.urls,
            f"rollout.urls is for engine 'servers', got engine {self.engine!r} with "
            f"{list(self.urls)}; set rollout.engine to 'servers' or leave rollout.urls out",
        )
        require(
            len(set(self.urls)) == len(self.urls),
            f"rollout.urls must list each server once, got {list(self.urls)}",
        )
        for url in self.urls:
            require(
                url.startswith(("http://", "https://")),
                f"rollout.urls must be addresses such as http://localhost:8000, got {url!r}",
            )
        require(
            self.weight_sync_folder is None or has_servers,
            "rollout.weight_sync_folder is for engine 'servers', got it with engine "
            f"{self.engine!r}; leave it out",
        )
        require(
            not self.options or self.engine in ("vllm", "sglang"),
            f"rollout.options are for engine 'vllm' or 'sglang', got {list(self.options)} with "
            f"engine {self.engine!r}; leave them out",
        )

    @property
    def is_outside(self) -> bool:
        """Whether the engine has its own copy of the weights and its own kernels."""
        return self.engine != "native"


PrecisionChoice = Literal["auto", "float32", "bfloat16", "float16"]
_ALPHA = 32
_ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Forward and backward passes of an update: packed, without padding."""

    micro_batch_tokens: PositiveInt = 16384
    """Tokens of a micro-batch, prompts included; smaller ones need less memory."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: recompute layers in the backward pass; much less memory for about a
    third more time."""
    compiled: bool | None = None
    """Compile the layers with torch.compile: less time and memory, for half a minute at startup; by
    default on a GPU."""

    def __post_init__(self) -> None:
        check_values(self, "passes.")

    def compiles_on(self, device: str) -> bool:
        """Whether layers are compiled on a device of this type, such as cuda."""
        return device == "cuda" if self.compiled is None else self.compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters instead of full fine-tuning (peft)."""

    rank: Annotated[int, at_least(1, "leave it out for no adapters")] | None = None
    """Rank of the adapters; by default there are none, and all weights are trained."""
    alpha: PositiveInt = _ALPHA
    """The adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = _ALL_LINEAR
    """Layers with adapters, by the end of their names; all-linear for all but the output layer."""

    def __post_init__(self) -> None:
        check_values(self, "lora.")
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
class Tracking:
    """Experiment trackers."""

    tensorboard: bool = False
    """Write TensorBoard files to the run folder."""
    wandb: str | None = None
    """Log metrics to this Weights & Biases project."""
    trackio: str | None = None
    """Log metrics to this trackio project."""

    def check_installed(self) -> None:
        """Refuse a requested tracker that is not installed."""
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
class UpdateSettings:
    """The settings that a policy update depends on."""

    algorithm: Algorithm
    correction: Correction
    """With `kind` resolved."""
    optimiser: Optimisation
    micro_batch_tokens: int
    max_tokens: int
    """Tokens after which an answer is cut off."""
    update_batch: int
    updates_per_group: int
    seed: int

    @property
    def critic_optimiser(self) -> Optimisation:
        """The optimiser of the critic: that of the policy with the critic's own learning rate."""
        rate, steps = self.algorithm.critic_learning_rate, self.algorithm.critic_warmup_steps
        return replace(
            self.optimiser,
            learning_rate=self.optimiser.learning_rate if rate is None else rate,
            warmup_steps=self.optimiser.warmup_steps if steps is None else steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """A training run."""

    model: str = "tiny"
    """A hub name, a folder, a GGUF file, or tiny: a small model with random weights."""
    task: str = "knights_knaves:people=3-5,count=4096,style=compact"
    """Training data: a task (sortedrl data --help), a file of rows, or a hub name; by default the
    split train."""
    out: Path = Path("runs/train")
    """The run folder: config, events, metrics, checkpoints, the trained model."""
    seed: int = 0
    """Seed of the prompt order and of every sampled answer; the same seed gives the same run."""
    epochs: PositiveInt = 1
    """Epochs: passes over the data."""
    max_updates: PositiveInt | None = None
    """Stop after this many updates."""
    max_prompt_tokens: PositiveInt | None = None
    """Skip longer prompts; by default those that leave no room for an answer in the context."""
    folder: Path | None = None
    """Folder with data set files; by default $SORTEDRL_DATA, and then the hub."""
    reward: str | None = None
    """A reward function instead of the task's own: my_module:my_function or my_file.py:..."""
    reward_options: tuple[str, ...] = ()
    """Keyword arguments of the reward, written name=value."""
    device: str | None = None
    """cuda, cpu, ...; by default the GPU if there is one."""
    threads: PositiveInt | None = None
    """CPU threads; by default the cores that reward workers do not need. Tiny models are
    fastest with 1."""
    precision: PrecisionChoice = "auto"
    """Precision of the weights; auto is bfloat16 on a GPU and float32 on a CPU. The optimiser
    updates fp32 master weights; float16 uses loss scaling."""
    schedule: Schedule = field(default_factory=Schedule)
    engine: EngineSettings = field(default_factory=EngineSettings)
    rollout: Rollout = field(default_factory=Rollout)
    algorithm: Algorithm = field(default_factory=Algorithm)
    correction: Correction = field(default_factory=Correction)
    optimiser: Optimisation = field(default_factory=Optimisation)
    passes: PassSettings = field(default_factory=PassSettings)
    lora: Lora = field(default_factory=Lora)
    cluster: Cluster = field(default_factory=Cluster)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: PeriodicEvaluation = field(default_factory=PeriodicEvaluation)
    saving: Saving = field(default_factory=Saving)
    tracking: Tracking = field(default_factory=Tracking)

    def __post_init__(self) -> None:
        """Validate combinations of settings."""
        check_values(self)
        check_device(self.device)
        self._check_siblings()
        self._check_divergence()
        self._check_engine()
        self._check_cluster()
        self._check_environment()
        overlong = self.algorithm.overlong_tokens
        require(
            overlong is None or overlong <= self.engine.max_tokens,
            f"algorithm.overlong_tokens must be at most engine.max_tokens "
            f"({self.engine.max_tokens}), got {overlong}",
        )

    def _check_divergence(self) -> None:
        algorithm = self.algorithm
        in_loss = algorithm.kl_coef > 0 and algorithm.effective_kl_place == "loss"
        require(
            not self.correction.weight_kl or in_loss,
            "correction.weight_kl weights the KL divergence in the loss, got it with "
            f"algorithm.kl_coef {algorithm.kl_coef:g} and kl_place "
            f"{algorithm.effective_kl_place!r}; leave it out, or set kl_coef and kl_place 'loss'",
        )

        ranks = self.cluster.trainer_ranks if self.cluster.is_used else 0
        require(
            algorithm.reference_refresh is None or (self.lora.rank is None and ranks == 0),
            "algorithm.reference_refresh copies the whole trained model, so it needs a trainer in "
            f"one process without adapters, got lora.rank {self.lora.rank} and "
            f"cluster.trainer_ranks {ranks}; leave it out",
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
            f"schedule.mode 'coupled' needs rollout.engine 'native', got {engine!r}, which cannot "
            "sample with our noise and verify cached tokens under new weights; set engine to "
            "'native', or mode to 'partial' (keeps the tokens, corrected by importance sampling) "
            "or 'on_policy' (samples again)",
        )

    def _check_environment(self) -> None:
        if not self.environment.is_used:
            return
        require(
            self.reward is None or self.environment.reward == "function",
            f"environment.reward is 'environment', so no reward function is used, got reward "
            f"{self.reward!r}; leave it out, or set environment.reward to 'function'",
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
            "rollout.engine 'servers' uses engines that already run elsewhere, so a cluster has "
            "none to place; leave cluster.rollout_workers out",
        )
        require(
            cluster.tensor_parallel == 1 or self.rollout.engine in ("vllm", "sglang"),
            f"cluster.tensor_parallel {cluster.tensor_parallel} needs rollout.engine 'vllm' or "
            f"'sglang', got {self.rollout.engine!r}; set tensor_parallel to 1",
        )
        require(
            not cluster.overlap or self.schedule.keeps_stale_tokens,
            f"cluster.overlap trains on answers of the previous version, which schedule.mode "
            f"{self.schedule.mode!r} rules out; set mode to 'partial'",
        )

    @property
    def update(self) -> UpdateSettings:
        """The settings that a policy update depends on."""
        kind = self.correction.effective_kind(is_needed=self.needs_correction)
        return UpdateSettings(
            algorithm=self.algorithm,
            correction=replace(self.correction, kind=kind),
            optimiser=self.optimiser,
            micro_batch_tokens=self.passes.micro_batch_tokens,
            max_tokens=self.engine.max_tokens,
            update_batch=self.schedule.update_batch,
            updates_per_group=self.schedule.updates_per_group,
            seed=self.seed,
        )

    @property
    def needs_seeds(self) -> bool:
        """Whether interrupted answers are resampled from their own seeds."""
        return self.schedule.mode == "redraw" and not self.schedule.never_interrupts

    @property
    def is_overlapped(self) -> bool:
        """Whether workers generate while the trainer updates."""
        return self.cluster.is_used and self.cluster.overlap

    @property
    def needs_correction(self) -> bool:
        """Whether sampling probabilities may differ from those that the trainer computes.

        Tokens then come from older weights, or from an engine with its own kernels.
        """
        is_stale = self.schedule.staleness_bound != 0 or self.is_overlapped
        return is_stale or self.rollout.is_outside

    def updates_expected(self, *, num_rows: int) -> int:
        """Estimated number of updates, which is the length of the learning-rate schedule."""
        answers = num_rows * self.epochs * self.schedule.samples_per_prompt
        whole = max(1, answers // self.schedule.update_batch)
        return whole if self.max_updates is None else min(whole, self.max_updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSettings:
    """Supervised fine-tuning on given answers."""

    model: str = "tiny"
    """A hub name, a folder, a GGUF file, or tiny: a small model with random weights."""
    task: str = "knights_knaves:people=3-5,count=4096,style=compact"
    """Rows with a field `response`, the answer to imitate: a task, a file or a hub name."""
    out: Path = Path("runs/sft")
    """The folder for the trained model and its losses."""
    seed: int = 0
    """Seed of the row order."""
    epochs: PositiveInt = 1
    """Epochs: passes over the data."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps."""
    batch_tokens: PositiveInt = 16384
    """Minimum number of tokens of an optimiser step, prompts included."""
    folder: Path | None = None
    """Folder with data set files; by default $SORTEDRL_DATA, and then the hub."""
    device: str | None = None
    """cuda, cpu, ...; by default the GPU if there is one."""
    threads: PositiveInt | None = None
    """CPU threads; by default all cores but one. Tiny models are fastest with 1."""
    precision: PrecisionChoice = "auto"
    """Precision of the weights; auto is bfloat16 on a GPU, float32 on a CPU."""
    optimiser: Optimisation = field(
        default_factory=lambda: Optimisation(
            learning_rate=1e-5, schedule="cosine", warmup_steps=10, beta2=0.98
        )
    )
    passes: PassSettings = field(default_factory=PassSettings)
    lora: Lora = field(default_factory=Lora)
    data: DataSettings = field(default_factory=DataSettings)

    def __post_init__(self) -> None:
        check_values(self)
        check_device(self.device)
        require(
            self.optimiser.mini_batches == self.optimiser.epochs == 1,
            "optimiser.mini_batches and optimiser.epochs are for reinforcement learning, got "
            f"{self.optimiser.mini_batches} and {self.optimiser.epochs}; set batch_tokens and "
            "epochs",
        )
