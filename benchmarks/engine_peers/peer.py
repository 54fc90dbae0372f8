"""The interface of peers: `Workload` in, `Peer`, and `Sample` out.

Every peer generates the same answers: the prompts of the workload, each to its forced length, at
temperature 1 and without stop tokens. Only useful tokens count, the sum of the lengths, whatever
else the engine computes.

The vLLM worker imports this in another interpreter, so it needs only the standard library and
torch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

SHORT = 8
"""Answer tokens of a warm-up run, if nothing depends on the shape of the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests and their device."""

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
    """One timed run; unknown values are `None`."""

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
        """A note for readers of the table."""

    def warm_up(self) -> None:
        """Do one-time work before timed runs."""

    def run(self, seed: int) -> Sample:
        """Generate all answers and time it."""

    def close(self) -> None:
        """Free the memory."""


def clock(device: str) -> float:
    """The time, after the device has finished its work."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def free_memory(device: str) -> None:
    """Return freed tensors to the device."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def check_lengths(found: Sequence[int], workload: Workload) -> None:
    """Check that all answers have their forced lengths."""
    assert list(found) == list(workload.lengths), "every answer has its forced length"
