"""How many blocks the cache gets, and what to say when they are too few."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sortedrl.engines.native.driver import Driver, attention_shape
from sortedrl.errors import ConfigError

_SHARE_OF_RAM = 0.25
_SHARE_OF_GPU = 0.85
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The cache in blocks; one of them is nobody's and takes what padding rows write."""

    num_blocks: int
    block_tokens: int
    token_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens it holds."""
        return (self.num_blocks - 1) * self.block_tokens

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self.num_blocks * self.block_tokens * self.token_bytes


def cache_size(
    driver: Driver, *, slots: int, cache_bytes: int | None, block_tokens: int
) -> CacheSize:
    """The cache for a budget, or for what is there; never more than the slots can fill."""
    layers, heads, dim = attention_shape(driver.config)
    token_bytes = 2 * layers * heads * dim * driver.dtype.itemsize
    available = available_bytes(driver.device)
    budget = available if cache_bytes is None else cache_bytes
    fillable = slots * -(-driver.max_context // block_tokens)
    num_blocks = min(1 + fillable, budget // (block_tokens * token_bytes))
    size = CacheSize(num_blocks, block_tokens, token_bytes)
    if num_blocks < 2:
        raise ConfigError(
            f"the cache needs at least 2 blocks of {block_tokens} tokens "
            f"({2 * block_tokens * token_bytes:,} bytes), got {budget:,} bytes; raise cache_bytes"
        )
    if driver.device.type == "cuda" and size.bytes > available / _SHARE_OF_GPU:
        fits = int(available / token_bytes)
        raise ConfigError(
            f"a cache of {size.bytes / _GIB:.1f} GiB does not fit: "
            f"{available / _SHARE_OF_GPU / _GIB:.1f} GiB are free on {driver.device}; "
            f"{available / _GIB:.1f} GiB would fit and hold {fits:,} tokens: set cache_bytes to at "
            f"most {available:,}, lower slots, or load the model in a smaller dtype"
        )
    return size


def available_bytes(device: torch.device) -> int:
    """The bytes the cache may take if nobody says otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_GPU)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * _SHARE_OF_RAM)
