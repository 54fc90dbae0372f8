"""What rollout and training need from a model: attention that can be replaced, and finite numbers.

`plain_logprobs` is what a model computes on its own, one text in one pass without a cache: every
engine is compared with it.

Axes: T positions of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sortedrl.errors import ModelError


def refuse_foreign_attention(model: PreTrainedModel, *, instead: str) -> None:
    """Raise `ModelError` where rows would depend on their neighbours; `instead` says what to do."""
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise ModelError(f"the attention of {name} cannot be exchanged in transformers; {instead}")
    values = model.config.get_text_config().to_dict()
    kinds = set(values.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(f"{name} has layers of kind {', '.join(sorted(kinds))}; {instead}")
    ropes = values.get("rope_parameters") or {}
    for rope in [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise ModelError(
                f"{name} turns its positions by {rope['rope_type']!r}, which depends on the whole "
                f"batch, so a row would not be the same in every batch; {instead}"
            )


def checked_scale(
    module: nn.Module,
    query: Tensor,
    *,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    instead: str,
) -> float:
    """What scores are multiplied by; refuses an attention that is more than a softmax of them."""
    if softcap is not None or sinks is not None or query.shape[-1] != value.shape[-1]:
        raise ModelError(
            f"{type(module).__name__} uses an attention that is not ours (capped scores, sinks or "
            f"values of another size than the keys); {instead}"
        )
    size: int = query.shape[-1]
    return size**-0.5 if scaling is None else scaling


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
