"""The model of all peers, and the memory-bandwidth limit for it.

A model is a folder, or one of `SHAPES` with random weights: speed does not depend on their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from engine_peers.peer import Workload, clock

NO_SPECIAL_TOKENS: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
_UNTIED = NO_SPECIAL_TOKENS | {"tie_word_embeddings": False}

SHAPES: dict[str, LlamaConfig | Qwen2Config] = {
    "llama-5m": LlamaConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=688,
        vocab_size=4096,
        max_position_embeddings=2048,
        **NO_SPECIAL_TOKENS,
    ),
    "llama-88m": LlamaConfig(
        hidden_size=768,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=2048,
        **NO_SPECIAL_TOKENS,
    ),
    "smollm2-135m": LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        **NO_SPECIAL_TOKENS,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        max_position_embeddings=32768,
        **NO_SPECIAL_TOKENS,
    ),
    "llama-8b": LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072,
        **_UNTIED,
    ),
    "qwen2.5-32b": Qwen2Config(
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=27648,
        vocab_size=152064,
        max_position_embeddings=131072,
        **_UNTIED,
    ),
}


def load(name: str, *, device: str, dtype: str, seed: int) -> PreTrainedModel:
    """The model of a folder, or a shape with random weights, on its device."""
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    auto: Any = AutoModelForCausalLM
    if name in SHAPES:
        torch.manual_seed(seed)
        with torch.device(device):
            model: PreTrainedModel = auto.from_config(SHAPES[name], dtype=torch_dtype)
    elif Path(name).is_dir():
        model = auto.from_pretrained(name, dtype=torch_dtype).to(device)
    else:
        raise ValueError(f"model must be a folder or one of {', '.join(SHAPES)}, got {name!r}")
    model.train(False)
    return model


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of one cached token: its keys and values in all layers."""
    config: Any = model.config
    heads = config.num_attention_heads
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // heads
    return int(
        2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    )


def cache_bytes(model: PreTrainedModel, workload: Workload) -> int:
    """A cache with room for the longest context in every slot, and a few extra blocks."""
    return (workload.slots + 1) * (workload.longest_context + 64) * token_bytes(model)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights read by a decode step: all except an untied input embedding.

    A tied embedding is read once, as the output layer.
    """
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    is_tied = model.config.tie_word_embeddings
    return total if is_tied else total - embedding.numel() * embedding.element_size()


def copy_bandwidth(device: str) -> float:
    """Best of several large copies, in bytes per second read and written."""
    size = (4 << 30) if device.startswith("cuda") else (256 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        began = clock(device)
        target.copy_(source)
        best = min(best, clock(device) - began)
    return 2 * size / best


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The speed limit set by memory bandwidth.

    Every step reads the weights once, and for every answer its cached tokens.
    """

    bandwidth: float
    weight_bytes: int
    token_bytes: int
    steps: int
    tokens: int
    contexts_read: int

    @property
    def tokens_per_second(self) -> float:
        """Useful tokens over the time the bytes take."""
        moved = self.steps * self.weight_bytes + self.contexts_read * self.token_bytes
        return self.tokens * self.bandwidth / moved
