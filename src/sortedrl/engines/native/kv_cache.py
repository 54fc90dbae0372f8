"""The KV cache in blocks: allocation, reference counts, prefix sharing, and its size.

    free  --allocate/acquire-->  used by one or more requests  --release-->  free

A block is either used by at least one request or free. Block 0 is never allocated: padding rows
write to it. A full block can be *cached* under the tokens from the start of the sequence to its
end, so that another request with the same prefix shares it instead of computing it again. Free
blocks keep their contents until they are allocated, least recently freed first, so the cache of a
conversation that waits for its environment is kept while there is room. Only without conversations
are contiguous blocks preferred to the least recently freed ones.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sortedrl.engines.native.hf_model import HFModel, attention_shape
from sortedrl.engines.sampling import CacheSize
from sortedrl.errors import ConfigError

PADDING_BLOCK = 0

PrefixId = int
"""Identifies all tokens up to the end of a block; `EMPTY_PREFIX` for none."""
EMPTY_PREFIX: PrefixId = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached blocks that hold the beginning of a sequence."""

    blocks: tuple[int, ...]
    prefix_id: PrefixId


class BlockPool:
    """A fixed number of blocks of `block_tokens` tokens each."""

    def __init__(self, num_blocks: int, *, block_tokens: int) -> None:
        """All blocks free and empty."""
        self.block_tokens = block_tokens
        self.num_usable = num_blocks - 1
        self.keeps_cached = False
        """Whether a cached block is allocated only when it is the least recently freed one."""
        # An ordered dict finds its first key at once; a dict would scan the removed entries.
        self._free = OrderedDict.fromkeys(range(PADDING_BLOCK + 1, num_blocks))
        self._ref_counts = [0] * num_blocks
        self._cached: dict[tuple[PrefixId, tuple[int, ...]], tuple[int, PrefixId]] = {}
        self._key_of: dict[int, tuple[PrefixId, tuple[int, ...]]] = {}
        self._num_prefixes = EMPTY_PREFIX

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for a number of tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int, *, near: int) -> list[int]:
        """Empty blocks, contiguous from `near` on if those are free and may be overwritten."""
        assert count <= len(self._free), "ask num_free first"
        blocks = []
        for _ in range(count):
            is_kept = self.keeps_cached and near in self._key_of
            block = near if near in self._free and not is_kept else next(iter(self._free))
            self._drop_cached(block)
            self._acquire(block)
            blocks.append(block)
            near = block + 1
        return blocks

    def match_prefix(self, tokens: Sequence[int], *, limit: int) -> Prefix:
        """The longest cached prefix of a sequence, of at most `limit` tokens."""
        blocks: list[int] = []
        prefix_id = EMPTY_PREFIX
        size = self.block_tokens
        for end in range(size, limit + 1, size):
            found = self._cached.get((prefix_id, tuple(tokens[end - size : end])))
            if found is None:
                break
            block, prefix_id = found
            blocks.append(block)
        return Prefix(tuple(blocks), prefix_id)

    def num_free_without(self, prefix: Prefix) -> int:
        """Blocks that can still be allocated once the prefix is acquired."""
        return len(self._free) - sum(block in self._free for block in prefix.blocks)

    def acquire(self, prefix: Prefix) -> None:
        """Take a reference on cached blocks, which other requests may use too."""
        for block in prefix.blocks:
            self._acquire(block)

    def cache_block(self, block: int, *, parent: PrefixId, tokens: Sequence[int]) -> PrefixId:
        """Cache a full block under its tokens; returns the prefix up to its end.

        If another block with the same contents is cached already, that one stays.
        """
        key = (parent, tuple(tokens))
        known = self._cached.get(key)
        if known is not None:
            return known[1]
        self._drop_cached(block)
        self._num_prefixes += 1
        self._cached[key] = (block, self._num_prefixes)
        self._key_of[block] = key
        return self._num_prefixes

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block; blocks without any become free, the last one first."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, "a block is released once for each reference"
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free[block] = None

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes: they were computed with other weights."""
        self._cached.clear()
        self._key_of.clear()

    def _acquire(self, block: int) -> None:
        self._free.pop(block, None)
        self._ref_counts[block] += 1

    def _drop_cached(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._cached[key]


_SHARE_OF_RAM = 0.25
_SHARE_OF_GPU = 0.85
_GIB = 1 << 30


def cache_size(
    hf_model: HFModel, *, slots: int, cache_bytes: int | None, block_tokens: int
) -> CacheSize:
    """The size for a budget, by default for the free memory; never more than the slots can fill."""
    layers, heads, dim = attention_shape(hf_model.config)
    token_bytes = 2 * layers * heads * dim * hf_model.dtype.itemsize
    available = available_bytes(hf_model.device)
    budget = available if cache_bytes is None else cache_bytes
    fillable = slots * -(-hf_model.max_context // block_tokens)
    num_blocks = min(1 + fillable, budget // (block_tokens * token_bytes))
    size = CacheSize(num_blocks, block_tokens, token_bytes)
    if num_blocks < 2:
        raise ConfigError(
            f"the cache needs at least 2 blocks of {block_tokens} tokens "
            f"({2 * block_tokens * token_bytes:,} bytes), got {budget:,} bytes; raise cache_bytes"
        )
    if hf_model.device.type == "cuda" and size.bytes > available / _SHARE_OF_GPU:
        fits = int(available / token_bytes)
        raise ConfigError(
            f"a cache of {size.bytes / _GIB:.1f} GiB does not fit: "
            f"{available / _SHARE_OF_GPU / _GIB:.1f} GiB are free on {hf_model.device}; "
            f"{available / _GIB:.1f} GiB would fit and hold {fits:,} tokens: set cache_bytes to at "
            f"most {available:,}, lower slots, or load the model in a smaller dtype"
        )
    return size


def available_bytes(device: torch.device) -> int:
    """The default budget of the cache."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_GPU)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * _SHARE_OF_RAM)
