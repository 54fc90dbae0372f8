"""What a peer is asked (`Workload`), how it is asked (`Peer`) and what it tells (`Sample`).

Every peer writes the same answers: the prompts of the workload, each to its forced length, at
temperature 1 and without a stop token. What a run counts is the useful tokens, the sum of the
lengths, whatever else the engine computed on the way.

The vLLM worker imports this in another interpreter: the standard library and torch will do.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

SHORT = 8
"""Answer tokens of a warm-up run where nothing depends on the shape of the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every peer is asked to write, and where."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    slots: int
    device: str
    dtype: str
    threads: int | None

    @property
    def tokens(self) -> int:
        """Useful tokens: those of the answers."""
        return sum(self.lengths)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return max(len(p) + n for p, n in zip(self.prompts, self.lengths, strict=True))

    @property
    def contexts_read(self) -> int:
        """Cached tokens that the decoding of all answers must read, summed over their tokens."""
        pairs = zip(self.prompts, self.lengths, strict=True)
        return sum(n * len(p) + n * (n - 1) // 2 for p, n in pairs)

    def shortened(self) -> Workload:
        """The same prompts with short answers."""
        return replace(self, lengths=[min(SHORT, length) for length in self.lengths])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed run; what a peer does not tell is `None`."""

    seconds: float
    tokens: int
    mean_logprob: float | None = None
    occupancy: float | None = None
    steps: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Useful tokens over the time of the run."""
        return self.tokens / self.seconds


class Peer(Protocol):
    """An engine with the model loaded."""

    @property
    def note(self) -> str:
        """What a reader of the table should know."""

    def warm_up(self) -> None:
        """Do once what later runs need not do again."""

    def run(self, seed: int) -> Sample:
        """Write all answers and say how long it took."""

    def close(self) -> None:
        """Free the memory."""


def clock(device: str) -> float:
    """Seconds, once the device has done what it was given."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def free_memory(device: str) -> None:
    """Give dropped tensors back to the device."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def check_lengths(found: Sequence[int], workload: Workload) -> None:
    """An engine that wrote other lengths than it was told has not run this benchmark."""
    assert list(found) == list(workload.lengths), "every answer has its forced length"
