"""The speed of devices, the costs of a model on them, and the inputs of the memory plan.

The arithmetic is that of the simulator's hardware presets. What differs from their data sheets:
launching the kernels of a step costs the same for every layer, matrices narrower than `full_width`
reach a share of the speed of wide ones, and on one device the weights are shared, so a weight sync
takes no time.

The devices of the engines share the rollout evenly, those of the trainer the updates; colocated
engines and ranks are on the same devices. A layer that is sharded over some of them needs two
all-reduces in a step. In every pass of an update the trainer gathers its weights, forward and
backward, and scatters its gradients; that overlaps with computing as far as computing takes longer.
A cluster on CPUs is planned as one machine that runs all of its processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from sortedrl.config.algorithm import GradientPrecision, OptimiserState
from sortedrl.config.checks import require
from sortedrl.config.cluster import Cluster
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.models.shape import Shape
from sortedrl.simulate.costs import Costs, Machine

# Weight, master, gradient and both moments are read and all but the gradient written.
_OPTIMISER_BYTES = 34
_STATE_BYTES = 12
_GRADIENT_BYTES = 4
_ALL_REDUCE_SECONDS = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The measured or computed speed of one device."""

    text: str
    memory_bytes: int | None
    """`None`: what the machine has."""
    bandwidth: float
    """Bytes per second from its memory."""
    flops: float
    """Operations per second that wide matrices reach."""
    layer_seconds: float
    """Launching the kernels of one layer of a decode step."""
    sequence_seconds: float
    """Sampling and bookkeeping for one running sequence."""
    full_width: int = 1
    """Hidden width from which on matrices reach `flops`."""
    decode_flops: float | None = None
    """Where decoding is bound by compute: operations per second of its narrow products."""
    link: float = 300e9
    """Bytes per second to other devices of the same machine, as collectives reach them."""
    host_link: float = 50e9
    """Bytes per second to and from the memory of the host."""

    @property
    def is_gpu(self) -> bool:
        """Whether weights are kept in 16 bits on it."""
        return self.decode_flops is None

    def costs(
        self,
        shape: Shape,
        *,
        number_bytes: int,
        cluster: Cluster | None = None,
        optimiser_state: OptimiserState = "fp32",
    ) -> Costs:
        """The constants of the simulator for a model on it, or on those of a cluster."""
        cluster = Cluster() if cluster is None else cluster
        narrow = 0.0 if self.decode_flops is None else 2 * shape.parameters / self.decode_flops
        sums = 0.0 if cluster.tensor_parallel == 1 else 2 * _ALL_REDUCE_SECONDS
        rollout, update = (
            Machine(
                parameters=shape.parameters,
                weight_bytes_per_parameter=number_bytes,
                cache_bytes_per_token=shape.cache_token_bytes(number_bytes),
                bandwidth=self.bandwidth,
                flops=self.flops * min(1.0, shape.hidden / self.full_width),
                overhead_seconds=(self.layer_seconds + sums) * shape.layers,
                sequence_seconds=self.sequence_seconds + narrow,
                devices=devices,
                tensor_parallel=cluster.tensor_parallel,
            ).costs()
            for devices in (cluster.engine_devices, cluster.trainer_devices)
        )
        devices = cluster.trainer_devices
        step_seconds = _OPTIMISER_BYTES * shape.parameters / (devices * self.bandwidth)
        if optimiser_state == "offload" and self.is_gpu:
            # Copies in and out run at the same time.
            step_seconds += _STATE_BYTES * shape.parameters / devices / self.host_link
        return replace(
            rollout,
            weight_sync_seconds=rollout.weight_sync_seconds if cluster.is_used else 0.0,
            update_seconds=step_seconds,
            update_token_seconds=update.update_token_seconds,
        )

    def pass_seconds(
        self, shape: Shape, *, number_bytes: int, cluster: Cluster, trained: int | None = None
    ) -> float:
        """Of one pass of an update: gathering weights and scattering gradients.

        `trained` is how many numbers have a gradient, by default all.
        """
        if cluster.num_ranks == 1:
            return 0.0
        with_gradient = shape.parameters if trained is None else trained
        moved = 2 * number_bytes * shape.parameters + _GRADIENT_BYTES * with_gradient
        return moved / self.link


def h200() -> Card:
    """One H200: the constants of the native engine's benchmark on it.

    62 us per layer and 2 us per sequence give 51,800 tokens/s for the shape of Qwen2.5-1.5B with
    256 slots and 1,088 tokens of context each (measured: 50,200), and 91,000 for SmolLM2-135M
    with 320 tokens of context (measured: 106,000).
    """
    return Card(
        text="NVIDIA H200, 141 GB (near measured numbers)",
        memory_bytes=143_771 << 20,
        bandwidth=4.23e12,
        flops=500e12,
        layer_seconds=62e-6,
        sequence_seconds=2e-6,
        full_width=1440,
    )


def h100() -> Card:
    """One H100 with 80 GB: as the H200, with 3.35 TB/s (arithmetic, not measured)."""
    return replace(
        h200(),
        text="NVIDIA H100, 80 GB (arithmetic, not measured)",
        memory_bytes=81_559 << 20,
        bandwidth=3.35e12,
    )


def a100() -> Card:
    """One A100 with 80 GB: 2.04 TB/s, 200 of 312 TFLOP/s (arithmetic, not measured)."""
    return replace(
        h200(),
        text="NVIDIA A100, 80 GB (arithmetic, not measured)",
        memory_bytes=81_920 << 20,
        bandwidth=2.04e12,
        flops=200e12,
        link=200e9,
        host_link=25e9,
    )


def rtx_4090() -> Card:
    """One RTX 4090: 1.0 TB/s, 90 of 165 TFLOP/s (arithmetic, not measured)."""
    return replace(
        h200(),
        text="NVIDIA RTX 4090, 24 GB (arithmetic, not measured)",
        memory_bytes=24_564 << 20,
        bandwidth=1.0e12,
        flops=90e12,
        link=20e9,
        host_link=25e9,
    )


def cpu() -> Card:
    """Two CPU cores in fp32: the simulator's laptop, with 30 GFLOP/s in decoding.

    0.7 ms per layer make a step of 6 ms for one row of a model with 6.5 M parameters and 6 layers
    (measured: 6 ms). With 32 slots it gives 1,650 tokens/s for that model (measured with the tail
    of a batch included, when slots stand empty: 1,250) and 151 for 88 M (measured: 154 to 204).
    """
    return Card(
        text="two CPU cores (near measured numbers)",
        memory_bytes=None,
        bandwidth=20e9,
        flops=60e9,
        layer_seconds=0.7e-3,
        sequence_seconds=0.0,
        decode_flops=30e9,
        link=5e9,
        host_link=20e9,
    )


CARDS = {"h100": h100, "h200": h200, "a100": a100, "rtx-4090": rtx_4090, "cpu": cpu}


def card_named(name: str) -> Card:
    """The card of that name."""
    if name not in CARDS:
        raise ConfigError(unknown_name("hardware", name, CARDS))
    return CARDS[name]()


Precision = Literal["float32", "bfloat16", "float16"]

BLOCK_TOKENS = 32
"""Tokens of one block of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The inputs of the memory plan."""

    shape: Shape
    slots: int
    max_tokens: int
    prompt_tokens: int
    """The longest prompt."""
    pass_tokens: int
    precision: Precision
    is_gpu: bool = True
    has_reference: bool = False
    has_critic: bool = False
    has_engine_copy: bool = False
    """Whether the engine of a single process has weights of its own."""
    lora_rank: int | None = None
    gradient_checkpointing: bool = False
    optimiser_state: OptimiserState = "fp32"
    gradients: GradientPrecision = "fp32"
    cache_bytes: int | None = None
    """What the cache of an engine may take; by default what all of its slots can fill."""
    cluster: Cluster = field(default_factory=Cluster)
    """The workers and ranks that share the run."""

    def __post_init__(self) -> None:
        """Refuse answers beyond the context, and heads that cannot be divided over GPUs."""
        require(
            self.prompt_tokens < self.shape.context,
            f"the model's context of {self.shape.context:,} tokens must hold the prompt and "
            f"an answer, got prompts of up to {self.prompt_tokens:,}; lower max_prompt_tokens",
        )
        require(
            self.shape.heads % self.cluster.tensor_parallel == 0,
            f"cluster.tensor_parallel must divide the {self.shape.heads} heads of the model, got "
            f"{self.cluster.tensor_parallel}",
        )
        require(
            not self.cluster.is_used or self.is_gpu == bool(self.cluster.gpus_per_worker),
            f"cluster.gpus_per_worker {self.cluster.gpus_per_worker} must be planned on "
            f"{'a GPU' if self.cluster.gpus_per_worker else 'CPUs'}; give one with --card, or "
            "change gpus_per_worker",
        )

    @property
    def number_bytes(self) -> int:
        """Bytes of one number of the weights, the cache and the activations."""
        return 4 if self.precision == "float32" else 2

    @property
    def sequence_tokens(self) -> int:
        """Prompt and answer at their longest."""
        return min(self.shape.context, self.prompt_tokens + self.max_tokens)

    @property
    def adapter_parameters(self) -> int:
        """Numbers of the adapters."""
        return (self.lora_rank or 0) * self.shape.linear_width

    @property
    def trained_parameters(self) -> int:
        """Numbers of the policy that an update changes."""
        return self.shape.parameters if self.lora_rank is None else self.adapter_parameters

    @property
    def is_separated(self) -> bool:
        """Whether engines and trainer are on different devices."""
        return self.is_gpu and self.cluster.is_used and self.cluster.kind == "separated"

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainer ranks share GPUs, so that the engines sleep in an update."""
        return self.is_gpu and self.cluster.is_used and self.cluster.kind == "colocated"

    @property
    def ranks_per_device(self) -> int:
        """Trainer ranks that share a device: one on a GPU, all of them on a machine's CPUs."""
        return 1 if self.is_gpu else self.cluster.num_ranks

    @property
    def engines_per_device(self) -> int:
        """Engines that share a device."""
        return 1 if self.is_gpu else self.cluster.num_engines

    @property
    def engine_slots(self) -> int:
        """Slots of one engine, where there are several."""
        return -(-self.slots // self.cluster.num_engines)

    @property
    def engine_bytes(self) -> int:
        """The engine's own weights on one device; only a single process shares the trainer's.

        >>> from sortedrl.models.shape import KNOWN_SHAPES
        >>> one = Demand(
        ...     shape=KNOWN_SHAPES["Qwen/Qwen2.5-32B"],
        ...     slots=128,
        ...     max_tokens=8192,
        ...     prompt_tokens=512,
        ...     pass_tokens=8192,
        ...     precision="bfloat16",
        ...     cluster=Cluster(
        ...         kind="colocated",
        ...         rollout_workers=1,
        ...         gpus_per_worker=8,
        ...         tensor_parallel=8,
        ...         trainer_ranks=8,
        ...     ),
        ... )
        >>> round(one.engine_bytes / 1e9, 1)
        8.2
        """
        has_copy = self.has_engine_copy or self.cluster.is_used
        whole = self.shape.parameters * self.number_bytes
        shard = -(-whole // self.cluster.tensor_parallel)
        return self.engines_per_device * shard if has_copy else 0

    @property
    def cache_token_bytes(self) -> int:
        """A device's share of the keys and values of one token; a head is never cut."""
        heads = -(-self.shape.kv_heads // self.cluster.tensor_parallel)
        return replace(self.shape, kv_heads=heads).cache_token_bytes(self.number_bytes)

    @property
    def sequence_cache_bytes(self) -> int:
        """The cache of the longest answer, in whole blocks."""
        blocks = -(-self.sequence_tokens // BLOCK_TOKENS)
        return blocks * self._block_bytes

    @property
    def full_cache_bytes(self) -> int:
        """A device's cache if every slot holds the longest answer, or what was set for it."""
        # One block of an engine belongs to no answer.
        full = self.engine_slots * self.sequence_cache_bytes + self._block_bytes
        each = full if self.cache_bytes is None else min(full, self.cache_bytes)
        return self.engines_per_device * each

    @property
    def least_cache_bytes(self) -> int:
        """The least that works: one answer at a time and engine, at the longest."""
        return self.engines_per_device * (self.sequence_cache_bytes + self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        return BLOCK_TOKENS * self.cache_token_bytes
