"""The trained weights in fp32, and their updates.

An update is a policy gradient with a random advantage of +1 or -1 per answer: as large as those of
a real run, which are mostly noise too, but without direction.

Axes: B answers, T positions, N positions of all answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from coupling_study.copies import Dither
from coupling_study.settings import Start
from sortedrl.types import Trajectory

MAX_GRADIENT_NORM = 1.0
WEIGHT_DECAY = 0.01
_IGNORED = -100


class Master:
    """The trained module, and two snapshots to return to."""

    def __init__(self, model: PreTrainedModel, *, micro_batch: int) -> None:
        """Start from the loaded model."""
        self._model = model
        self._micro_batch = micro_batch
        self._checkpoint = self._snapshot()
        self.start = self._checkpoint
        self._optimizer = self._fresh_optimizer(0.0)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The current weights by name."""
        return {name: weight.detach() for name, weight in self._model.named_parameters()}

    def begin_study(self, start: Start, *, seed: int) -> None:
        """Set the weights of version 0.

        Weights in a running study lie anywhere between two bf16 values; those of a checkpoint saved
        in bf16 lie exactly on one.
        """
        self.start = self._checkpoint
        self._restore()
        if start == "running":
            dither = Dither(torch.bfloat16, spread=0.5, seed=seed)
            for weight in self.tensors.values():
                weight.copy_(dither(weight))
            self.start = self._snapshot()

    def begin_training(self, *, learning_rate: float) -> None:
        """Return to version 0, with a fresh optimiser."""
        self._restore()
        self._optimizer = self._fresh_optimizer(learning_rate)

    def update(self, answers: Sequence[Trajectory], advantages: Sequence[int]) -> None:
        """One step on a batch of answers."""
        self._optimizer.zero_grad()
        num_tokens = sum(answer.num_tokens for answer in answers)
        for first in range(0, len(answers), self._micro_batch):
            part = slice(first, first + self._micro_batch)
            loss = -self._weighted_logprobs(answers[part], advantages[part]) / num_tokens
            torch.autograd.backward(loss)
        clip_grad_norm_(self._model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def mean_step(self) -> float:
        """The mean distance of the weights from version 0."""
        weights = self.tensors
        total = sum(
            (weight - self.start[name]).abs().sum(dtype=torch.float64).item()
            for name, weight in weights.items()
        )
        return total / sum(weight.numel() for weight in weights.values())

    def _weighted_logprobs(
        self, answers: Sequence[Trajectory], advantages: Sequence[int]
    ) -> Tensor:
        """The sum over all tokens of log-probability times advantage."""
        rows = [torch.tensor([*answer.prompt.tokens, *answer.tokens]) for answer in answers]
        targets = [row.clone() for row in rows]
        for answer, target in zip(answers, targets, strict=True):
            target[: len(answer.prompt.tokens)] = _IGNORED
        device = self._model.device
        tokens_BT = pad_sequence(rows, batch_first=True).to(device)
        targets_BT = pad_sequence(targets, batch_first=True, padding_value=_IGNORED).to(device)
        lengths_B1 = torch.tensor([[len(row)] for row in rows], device=device)
        mask_BT = torch.arange(tokens_BT.shape[1], device=device) < lengths_B1
        with self._autocast():
            output: Any = self._model(
                input_ids=tokens_BT, attention_mask=mask_BT.long(), use_cache=False
            )
        losses_N = cross_entropy(
            output.logits[:, :-1].float().flatten(0, 1),
            targets_BT[:, 1:].flatten(),
            ignore_index=_IGNORED,
            reduction="none",
        )
        weights_B1 = torch.tensor(advantages, device=device)[:, None]
        losses_BT: Tensor = losses_N.view(len(rows), -1)
        return -(losses_BT * weights_B1).sum()

    def _autocast(self) -> AbstractContextManager[None]:
        if self._model.device.type == "cuda":
            context: AbstractContextManager[None] = torch.autocast("cuda", torch.bfloat16)
            return context
        return nullcontext()

    def _fresh_optimizer(self, learning_rate: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY
        )

    def _snapshot(self) -> Mapping[str, Tensor]:
        return {name: weight.clone() for name, weight in self.tensors.items()}

    def _restore(self) -> None:
        for name, weight in self.tensors.items():
            weight.copy_(self.start[name])
