"""The critic of PPO: a second model that estimates the value of an unfinished answer.

It begins as a copy of the policy with a value head of zeros, so at first every value is 0.

Axes: T answer tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sortedrl.config.algorithm import Optimisation
from sortedrl.training.batch import (
    SINGLE_RANK,
    Answers,
    RankGroup,
    TokenSequence,
    micro_batches,
    mini_batches,
)
from sortedrl.training.forward import PackedModel
from sortedrl.training.losses import value_losses
from sortedrl.training.optimiser import Optimiser


class Critic(nn.Module):
    """Values of the states before each answer token."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Use the model as the trunk; its output layer is not used. It may have no weights yet."""
        super().__init__()
        self.trunk = model
        device = "cpu" if model.device.type == "meta" else model.device
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._packed = PackedModel(model)

    def values(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`values_T`, in fp32."""
        values_T1: Tensor = self(sequences)
        return values_T1[:, 0]

    def forward(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`values_T1`, in fp32."""
        values_T1: Tensor = self.head(self._packed.hidden(sequences).float())
        return values_T1

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters that values depend on."""
        output = self.trunk.get_output_embeddings()
        assert isinstance(output, nn.Linear), "transformers' causal models end in a linear layer"
        is_tied = output.weight is self.trunk.get_input_embeddings().weight
        unused = set() if is_tied else {id(parameter) for parameter in output.parameters()}
        return {name: p for name, p in self.named_parameters() if id(p) not in unused}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return {name: parameter.detach() for name, parameter in self.learned().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of a checkpoint."""
        for name, parameter in self.learned().items():
            parameter.copy_(tensors[name])


@dataclass(frozen=True, slots=True)
class CriticTrainer:
    """Trains the critic on the returns of an update's answers."""

    critic: Critic
    optimiser: Optimiser
    settings: Optimisation
    micro_batch_tokens: int
    ranks: RankGroup = SINGLE_RANK
    """Those of the policy's trainer."""

    def train(
        self,
        answers: Answers,
        sequences: Sequence[TokenSequence],
        *,
        old_values_T: Tensor,
        returns_T: Tensor,
        clip: float | None,
        seed: int,
        is_masked_T: Tensor | None = None,
    ) -> float:
        """Make the optimiser steps of one update; gives the mean of their losses.

        Masked tokens have no loss and stay in its denominator.
        """
        parts, epochs = self.settings.mini_batches, self.settings.epochs
        losses = []
        for chosen in mini_batches(len(answers), parts=parts, epochs=epochs, seed=seed):
            weight = 1 / int(answers.lengths_N[torch.tensor(list(chosen))].sum())
            batches = micro_batches(
                chosen,
                answers,
                sequences,
                micro_batch_tokens=self.micro_batch_tokens,
                ranks=self.ranks,
            )
            is_to_repeat = True
            while is_to_repeat:
                total = torch.zeros((), device=returns_T.device)
                for batch in batches.parts:
                    at = batch.token_indices.to(returns_T.device)
                    values_T = self.critic.values(batch.read(sequences))[: len(at)]
                    losses_T = value_losses(values_T, old_values_T[at], returns_T[at], clip=clip)
                    if is_masked_T is not None:
                        losses_T = losses_T.masked_fill(is_masked_T[at], 0.0)
                    part = losses_T.sum() * weight
                    self.optimiser.backward(part)
                    total += part.detach()
                value = float(self.ranks.all_reduce(total))
                is_to_repeat = self.optimiser.step(loss=value).is_to_repeat
            losses.append(value)
        return sum(losses) / len(losses)
