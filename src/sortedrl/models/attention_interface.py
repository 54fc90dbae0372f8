"""Replaceable attention, plain log-probabilities, and checks for finite weights.

`plain_logprobs` is the reference for every engine: one text, one forward pass, no KV cache.

Axes: T positions of a text, V vocabulary, R rows, H query heads, K key/value heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sortedrl.errors import ModelError


def refuse_foreign_attention(model: PreTrainedModel, *, instead: str) -> None:
    """Refuse attention in which rows of a batch affect each other; `instead` says what to do."""
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise ModelError(
            f"the attention of {name} cannot be replaced through transformers; {instead}"
        )
    values = model.config.get_text_config().to_dict()
    kinds = set(values.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(f"{name} has layers of kind {', '.join(sorted(kinds))}; {instead}")
    ropes = values.get("rope_parameters") or {}
    for rope in [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise ModelError(
                f"{name} uses rope_type {rope['rope_type']!r}, which depends on the whole batch: "
                f"a row would not be the same in every batch; {instead}"
            )


class AttentionInputs(NamedTuple):
    """The arguments that transformers passes to the attention of one layer."""

    module: nn.Module
    q_1HRD: Tensor
    k_1KRD: Tensor
    v_1KRD: Tensor
    scale: float
    """Factor of the scores."""
    window: int | None
    """Sliding window: maximum number of keys per query; `None` for all."""

    @property
    def layer(self) -> int:
        """The index of the layer."""
        layer = self.module.layer_idx
        assert isinstance(layer, int), "transformers numbers its attention layers"
        return layer


def register_attention(
    name: str,
    attend: Callable[[AttentionInputs, Any], Tensor],
    *,
    argument: str,
    instead: str,
    is_traceable: bool = False,
) -> None:
    """Register an attention with transformers, under a name for `_attn_implementation`.

    `attend` gets the model's keyword argument `argument`, and returns the output as `[1, R, H, D]`.
    No mask is registered under the name, so transformers creates none. Attention other than a
    softmax of scaled scores is refused; `instead` says what to do. Only a traceable attention can
    be part of a compiled graph; any other causes a graph break.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **keywords: Any,  # noqa: ANN401
    ) -> tuple[Tensor, None]:
        if softcap is not None or s_aux is not None or query.shape[-1] != value.shape[-1]:
            raise ModelError(
                f"{type(module).__name__} uses an attention that is not supported (capped scores, "
                f"sinks or values of another size than the keys); {instead}"
            )
        if argument not in keywords:
            raise TypeError(f"{type(module).__name__} does not pass {argument} to its attention")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        inputs = AttentionInputs(module, query, key, value, scale, sliding_window)
        return attend(inputs, keywords[argument]), None

    made = attention if is_traceable else torch.compiler.disable(attention)
    AttentionInterface.register(name, made)


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


def best_logprobs(model: PreTrainedModel, tokens: Sequence[int], *, after: int) -> Tensor:
    """The log-probability of the most likely token at each position from `after` on."""
    return _logits(model, tokens)[after - 1 : -1].log_softmax(-1).max(-1).values


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that contain NaN or infinity."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def why_not_finite(model: PreTrainedModel) -> str:
    """Why the output of a model is not finite, and what to do about it."""
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
