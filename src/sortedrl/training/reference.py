"""The policy that the run began with, which the trained one is kept close to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.training.forward import PackedModel
from sortedrl.training.packing import TokenSequence


class CopiedReference:
    """A second model that never changes."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        """Freeze the model, which must not be the one that is trained."""
        model.requires_grad_(False)
        self._packed = PackedModel(model, temperature=temperature)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""
        return self._packed.logprobs(sequences).logprobs_T


class AdapterReference:
    """The trained model without its adapters: a reference that takes no memory."""

    def __init__(self, policy: PackedModel) -> None:
        """The policy whose adapters are trained."""
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""
        with self._without_adapters():
            return self._policy.logprobs(sequences).logprobs_T

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        self._policy.model.disable_adapters()
        try:
            yield
        finally:
            self._policy.model.enable_adapters()
