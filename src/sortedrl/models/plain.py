"""What a model computes on its own: one text, one pass, no cache. The yardstick of every engine.

And whether its weights are numbers at all.

Axes: T positions of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinite number."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def why_not_finite(model: PreTrainedModel) -> str:
    """Why a model may compute what is not finite, and what to do about it."""
    names = not_finite(dict(model.named_parameters()))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"its weights {names[0]}{more} hold NaN or infinite numbers; use another copy of the "
            "model, or an earlier checkpoint"
        )
    if model.dtype == torch.float16:
        return "its weights are finite, so it overflows in float16; use bfloat16 or float32"
    return "its weights are finite, so it overflows; lower the learning rate, or use another model"


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
