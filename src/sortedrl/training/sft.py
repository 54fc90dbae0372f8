"""Supervised fine-tuning on given answers: the warm start before reinforcement learning.

Every row comes once per epoch, in an order fixed by the seed; a step takes rows until it has its
tokens. The micro-batches are those of an update: packed, without padding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sortedrl.core.randomness import mix
from sortedrl.errors import TrainingError
from sortedrl.training.batch import TokenSequence, packs
from sortedrl.training.forward import PackedModel
from sortedrl.training.optimiser import Optimiser


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedStep:
    """The metrics of one step."""

    step: int
    epoch: int
    loss: float
    """Mean negative log-likelihood of an answer token, before the step."""
    grad_norm: float
    learning_rate: float
    answer_tokens: int
    tokens: int
    """Prompts included."""
    seconds: float


def step_rows(
    lengths: Sequence[int], *, batch_tokens: int, epochs: int, seed: int
) -> list[list[int]]:
    """The rows of each step: all rows in every epoch, each step with at least its tokens.

    Only the last step may have fewer.
    """
    steps: list[list[int]] = [[]]
    room = batch_tokens
    for epoch in range(epochs):
        for row in sorted(range(len(lengths)), key=lambda row: mix(seed, epoch, row)):
            if room <= 0:
                steps.append([])
                room = batch_tokens
            steps[-1].append(row)
            room -= lengths[row]
    return steps


def supervised_steps(
    policy: PackedModel,
    optimiser: Optimiser,
    sequences: Sequence[TokenSequence],
    *,
    rows: Sequence[Sequence[int]],
    micro_batch_tokens: int,
    max_bad: int,
) -> Iterator[SupervisedStep]:
    """Train step by step; the weights are consistent whenever a step is yielded."""
    met = num_bad = 0
    for number, chosen in enumerate(rows):
        began = time.perf_counter()
        of_step = [sequences[row] for row in chosen]
        answer_tokens = sum(len(sequence.scored_places) for sequence in of_step)
        lengths = [sequence.num_rows for sequence in of_step]
        is_to_repeat = True
        while is_to_repeat:
            total = torch.zeros((), device=policy.model.device)
            for pack in packs(lengths, budget=micro_batch_tokens):
                found = policy.logprobs([of_step[index] for index in pack.indices])
                part = -found.logprobs_T.sum() / answer_tokens
                optimiser.backward(part)
                total += part.detach()
            result = optimiser.step(loss=float(total))
            is_to_repeat = result.is_to_repeat
        num_bad = 0 if result.is_applied else num_bad + 1
        if num_bad >= max_bad:
            raise TrainingError(
                f"{max_bad} steps in a row had a loss or a gradient that is not finite; they were "
                "skipped. Lower optimiser.learning_rate"
            )
        met += len(chosen)
        yield SupervisedStep(
            step=number + 1,
            epoch=(met - 1) // len(sequences),
            loss=float(total),
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            answer_tokens=answer_tokens,
            tokens=sum(lengths),
            seconds=time.perf_counter() - began,
        )
