"""What a model computes on its own: one text, one pass, no cache. The yardstick of every engine.

Axes: T positions of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def plain_logprobs(
    model: PreTrainedModel,
    tokens: Sequence[int],
    *,
    after: int,
    temperature: float = 1.0,
) -> Tensor:
    """The log-probabilities, in float32 on the host, of the tokens from position `after` on."""
    logits_TV = _logits(model, tokens)[after - 1 : -1]
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    written_T = torch.tensor(list(tokens[after:]))
    return logprobs_TV.gather(-1, written_T[:, None])[:, 0]


def _logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            texts = torch.tensor([list(tokens)], device=model.device)
            logits_TV: Tensor = model(input_ids=texts).logits[0].float().cpu()
    finally:
        for module in training:
            module.training = True
    return logits_TV
