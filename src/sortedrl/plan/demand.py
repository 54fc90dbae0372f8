"""What the memory of a run depends on: the model, the answers, the passes, the devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from sortedrl.config import require
from sortedrl.models.shape import Shape
from sortedrl.training.layout import Layout

Precision = Literal["float32", "bfloat16", "float16"]

BLOCK_TOKENS = 32
"""Tokens of one block of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What memory depends on."""

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
    """Whether the engine has weights of its own on the same device."""
    lora_rank: int | None = None
    gradient_checkpointing: bool = False
    cache_bytes: int | None = None
    """What the cache of a device may take; by default what all slots can fill."""
    layout: Layout = field(default_factory=Layout)
    """The devices, and how they share the run."""

    def __post_init__(self) -> None:
        """Refuse an answer that the model has no room for, and heads that cannot be shared out."""
        require(
            self.prompt_tokens < self.shape.context,
            f"the model's context of {self.shape.context:,} tokens must hold the prompt and "
            f"an answer, got prompts of up to {self.prompt_tokens:,}; lower max_prompt_tokens",
        )
        require(
            self.shape.heads % self.layout.tensor_parallel == 0,
            f"layout.tensor_parallel must divide the {self.shape.heads} heads of the model, got "
            f"{self.layout.tensor_parallel}",
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
    def engine_slots(self) -> int:
        """Slots of one engine, where there are several."""
        return -(-self.slots // self.layout.engines)

    @property
    def engine_bytes(self) -> int:
        """A device's share of the engine's own weights; a trainer that is spread out shares none.

        >>> from sortedrl.models.known_shapes import KNOWN_SHAPES
        >>> one = Demand(
        ...     shape=KNOWN_SHAPES["Qwen/Qwen2.5-32B"],
        ...     slots=128,
        ...     max_tokens=8192,
        ...     prompt_tokens=512,
        ...     pass_tokens=8192,
        ...     precision="bfloat16",
        ...     layout=Layout(devices=8, tensor_parallel=8),
        ... )
        >>> round(one.engine_bytes / 1e9, 1)
        8.2
        """
        has_copy = self.has_engine_copy or self.layout.devices > 1
        whole = self.shape.parameters * self.number_bytes
        return -(-whole // self.layout.tensor_parallel) if has_copy else 0

    @property
    def cache_token_bytes(self) -> int:
        """A device's share of the keys and values of one token; a head is never cut."""
        heads = -(-self.shape.kv_heads // self.layout.tensor_parallel)
        return replace(self.shape, kv_heads=heads).cache_token_bytes(self.number_bytes)

    @property
    def sequence_cache_bytes(self) -> int:
        """The cache of the longest answer, in whole blocks."""
        blocks = -(-self.sequence_tokens // BLOCK_TOKENS)
        return blocks * self._block_bytes

    @property
    def full_cache_bytes(self) -> int:
        """The cache if every slot holds the longest answer; one block is nobody's."""
        return self.engine_slots * self.sequence_cache_bytes + self._block_bytes

    @property
    def least_cache_bytes(self) -> int:
        """The least that works: one answer at a time at the longest."""
        return self.sequence_cache_bytes + self._block_bytes

    @property
    def _block_bytes(self) -> int:
        return BLOCK_TOKENS * self.cache_token_bytes
