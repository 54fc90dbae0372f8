"""What rollout and training ask of a model's attention, which both exchange for their own."""

from __future__ import annotations

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
