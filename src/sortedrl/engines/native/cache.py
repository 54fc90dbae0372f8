"""The blocks of the KV cache: which sequence holds which, and how many there are.

    free  --allocate/hold-->  held by one or more sequences  --release-->  free

A block is held by at least one sequence or free, never both; block 0 is never allocated: padding
rows write there. A full block may be *remembered* by its content, the tokens from the start of the
text to its end, so that another text with the same prefix holds it too and does not compute it
again. Free blocks keep their content until they are allocated, the longest free first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sortedrl.engines.native.driver import Driver, attention_shape
from sortedrl.errors import ConfigError

PADDING_BLOCK = 0

Content = int
"""A number that stands for all tokens up to the end of a block; `ROOT` for none."""
ROOT: Content = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """Remembered blocks that hold the beginning of a text."""

    blocks: tuple[int, ...]
    content: Content


class BlockPool:
    """A fixed number of blocks of `block_tokens` tokens each."""

    def __init__(self, num_blocks: int, *, block_tokens: int) -> None:
        """All blocks free and empty."""
        self.block_tokens = block_tokens
        self.num_usable = num_blocks - 1
        self._free: dict[int, None] = dict.fromkeys(range(PADDING_BLOCK + 1, num_blocks))
        self._holders = [0] * num_blocks
        self._remembered: dict[tuple[Content, tuple[int, ...]], tuple[int, Content]] = {}
        self._key_of: dict[int, tuple[Content, tuple[int, ...]]] = {}
        self._contents = ROOT

    @property
    def num_free(self) -> int:
        """Blocks that can be given away."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int, *, near: int) -> list[int]:
        """Blocks with nothing in them, one after the other from `near` on where those are free."""
        assert count <= len(self._free), "ask num_free first"
        blocks = []
        for _ in range(count):
            block = near if near in self._free else next(iter(self._free))
            self._forget_block(block)
            self._hold(block)
            blocks.append(block)
            near = block + 1
        return blocks

    def match(self, tokens: Sequence[int], *, limit: int) -> Prefix:
        """The longest remembered beginning of a text, of at most `limit` tokens."""
        blocks: list[int] = []
        content = ROOT
        size = self.block_tokens
        for end in range(size, limit + 1, size):
            found = self._remembered.get((content, tuple(tokens[end - size : end])))
            if found is None:
                break
            block, content = found
            blocks.append(block)
        return Prefix(tuple(blocks), content)

    def num_free_without(self, prefix: Prefix) -> int:
        """Blocks that are left to give away once the prefix is held."""
        return len(self._free) - sum(block in self._free for block in prefix.blocks)

    def hold(self, prefix: Prefix) -> None:
        """Hold remembered blocks, together with whoever holds them already."""
        for block in prefix.blocks:
            self._hold(block)

    def remember(self, block: int, *, parent: Content, tokens: Sequence[int]) -> Content:
        """Keep in mind what a full block holds; gives the content up to its end.

        Where another block with the same content is known already, that one stays the known one.
        """
        key = (parent, tuple(tokens))
        known = self._remembered.get(key)
        if known is not None:
            return known[1]
        self._forget_block(block)
        self._contents += 1
        self._remembered[key] = (block, self._contents)
        self._key_of[block] = key
        return self._contents

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks; those nobody else holds are free, the end of the text first."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, "a block is released once for each hold"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def forget(self) -> None:
        """Forget all content: the weights that made it are gone."""
        self._remembered.clear()
        self._key_of.clear()

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._holders[block] += 1

    def _forget_block(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._remembered[key]


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
