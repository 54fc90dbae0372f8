"""The logits processor that brings our noise into vLLM's greedy decoding.

A row of logits becomes the race our engine runs, step for step, so the largest number is the token
our engine would choose. The processor works in this process: vLLM must not start a worker process.

Axes: R rows of a batch, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sortedrl.engines.native.noise import exponential, row_keys, words

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

SEEN: dict[tuple[int, int], float] = {}
"""Log-probabilities at the sampling temperature by (stream, position), from inside the processor:
vLLM itself reports them before the temperature, or with the noise in them."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the processor knows of a request: its noise, and how much of its answer is cached."""

    stream: int
    cached: int
    inverse_temperature: float
    output: list[int]
    """The new tokens; vLLM adds to this list."""


@cache
def processor_class() -> type[LogitsProcessor]:
    """A logits processor of vLLM's that makes greedy decoding our exact sampling."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class KeyedNoise(LogitsProcessor):  # type: ignore[misc]
        """Turns logits into the race our engine runs; the largest number wins."""

        def __init__(self, vllm_config: object, device: object, is_pin_memory: bool) -> None:
            """No request yet."""
            self._rows: dict[int, Row] = {}

        def is_argmax_invariant(self) -> bool:
            """It changes what greedy decoding takes; that is its purpose."""
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            """Follow the requests as they come, move and go."""
            process_dict_updates(self._rows, batch_update, self._row)

        def apply(self, logits: Tensor) -> Tensor:
            """The race in place of the logits, for the rows that brought a stream."""
            index = sorted(self._rows)
            if index:
                logits[index] = _race([self._rows[i] for i in index], logits[index])
            return logits

        @staticmethod
        def _row(rules: SamplingParams, prompt: object, output: list[int]) -> Row | None:
            return Row(**rules.extra_args, output=output) if rules.extra_args else None

    return KeyedNoise


def _race(rows: Sequence[Row], logits_RV: Tensor) -> Tensor:
    """`exp(logit / temperature) / exponential noise`, step for step as our engine has it."""
    positions = [row.cached + len(row.output) for row in rows]
    scaled_RV = logits_RV * torch.tensor([row.inverse_temperature for row in rows])[:, None]
    best_R1 = scaled_RV.amax(-1, keepdim=True)
    race_RV = (scaled_RV - best_R1).exp_()
    totals_R = race_RV.sum(-1)
    keys_R = row_keys(torch.tensor([row.stream for row in rows]), torch.tensor(positions))
    race_RV /= exponential(words(keys_R, torch.arange(logits_RV.shape[1])))
    chosen_R1 = race_RV.argmax(-1, keepdim=True)
    logprobs_R = (scaled_RV.gather(-1, chosen_R1) - best_R1)[:, 0] - totals_R.log()
    for row, position, logprob in zip(rows, positions, logprobs_R.tolist(), strict=True):
        SEEN[row.stream, position] = logprob
    return race_RV
