"""The native engine as a peer: the baseline of the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedModel

from engine_peers.peer import Sample, Workload, check_lengths, clock, free_memory
from sortedrl.engines.native import NativeEngine


class Native:
    """The native engine, on the module itself."""

    def __init__(self, model: PreTrainedModel, workload: Workload, *, cache_bytes: int) -> None:
        """An engine with room for the longest answer in every slot.

        The note has what the engine logs when it starts: its speed depends on the products.
        """
        self._workload = workload
        with _logged() as messages:
            self._engine = NativeEngine(
                model,
                slots=workload.slots,
                max_tokens=max(workload.lengths),
                stop_tokens=(),
                cache_bytes=cache_bytes,
            )
        self.note = "; ".join(["log-probabilities included", *messages])

    def warm_up(self) -> None:
        """On a GPU run the whole workload, which captures all graphs."""
        on_gpu = self._workload.device.startswith("cuda")
        self._write(self._workload if on_gpu else self._workload.shortened(), seed=0)

    def run(self, seed: int) -> Sample:
        """Generate all answers."""
        self._engine.reset_stats()
        sample = self._write(self._workload, seed=seed)
        stats = self._engine.stats
        occupancy = stats.slot_steps / (stats.steps * self._workload.slots)
        return replace(sample, occupancy=occupancy, steps=stats.steps)

    def close(self) -> None:
        """Free the engine and its cache."""
        del self._engine
        free_memory(self._workload.device)

    def _write(self, workload: Workload, *, seed: int) -> Sample:
        began = clock(workload.device)
        answers = self._engine.generate(
            workload.prompts, max_tokens=workload.lengths, seed=seed, progress=False
        )
        seconds = clock(workload.device) - began
        check_lengths([answer.num_tokens for answer in answers], workload)
        total = math.fsum(logprob for answer in answers for logprob in answer.logprobs)
        return Sample(seconds=seconds, tokens=workload.tokens, mean_logprob=total / workload.tokens)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextmanager
def _logged() -> Iterator[list[str]]:
    """The messages of the native engine inside the block."""
    logger, handler = logging.getLogger("sortedrl.engines.native"), _Messages()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.found
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
