"""Forward passes of a Hugging Face model over rows of many requests, on the unmodified module.

The trained module is also the rollout module. Two things are patched only during a pass: attention
goes through transformers' attention interface to the engine's KV cache, and linear layers may be
replaced by faster batch-invariant ones. A model is verified before use: it must compute the same in
the engine as in plain transformers.

Axes: R rows, Q sampled rows, V vocabulary, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sortedrl.core.randomness import mix
from sortedrl.errors import ModelError
from sortedrl.models.attention_interface import (
    AttentionInputs,
    plain_logprobs,
    refuse_foreign_attention,
    register_attention,
)
from sortedrl.types import Prompt, Segment, Trajectory

_NAME = "sortedrl"
_INSTEAD = "use the vLLM or SGLang engine for this model"


class PagedAttention(Protocol):
    """The attention of one forward pass, over the KV cache."""

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Write the new keys and values, then return the attention output, `[1, R, H, D]`."""


def _attend(inputs: AttentionInputs, attention: Any) -> Tensor:  # noqa: ANN401
    return cast(PagedAttention, attention).attend(inputs)


register_attention(_NAME, _attend, argument="paged_attention", instead=_INSTEAD)


class HFModel:
    """Forward passes of a model for the engine."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Refuse a model that is not supported, before any work."""
        self.model = model
        self.config = model.config.get_text_config()
        _refuse_unsupported(model)
        self.replaced: dict[nn.Module, Callable[..., Any]] = {}
        self._modules = list(model.modules())

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return self.model.dtype

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together that the model supports."""
        return int(self.config.max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """Token ids lie below it."""
        return int(self.config.vocab_size)

    @property
    def output_layer(self) -> nn.Linear:
        """The layer that computes the logits."""
        layer = self.model.get_output_embeddings()
        assert isinstance(layer, nn.Linear), "transformers' causal models end in a linear layer"
        return layer

    def compile_layers(self) -> None:
        """Compile the decoder layers with torch.compile.

        All layers of a class share one compiled function, so it takes seconds, not minutes.
        """
        names = set(self.model._no_split_modules or ())
        compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        for layer in self.model.modules():
            kind = type(layer)
            if kind.__name__ in names:
                if kind not in compiled:
                    compiled[kind] = torch.compile(kind.forward, dynamic=True)
                self.replaced[layer] = partial(compiled[kind], layer)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patch in the engine's attention and linear layers, and restore the module afterwards."""
        before = self.config._attn_implementation
        training = [module for module in self._modules if module.training]
        forwards = {m: m.__dict__["forward"] for m in self.replaced if "forward" in m.__dict__}
        self.config._attn_implementation = _NAME
        for module, forward in self.replaced.items():
            module.__dict__["forward"] = forward
        try:
            for module in training:
                module.training = False
            yield
        finally:
            self.config._attn_implementation = before
            for module in self.replaced:
                module.__dict__.pop("forward", None)
            for module, forward in forwards.items():
                module.__dict__["forward"] = forward
            for module in training:
                module.training = True

    def forward(
        self, tokens_R: Tensor, positions_R: Tensor, keep_Q: Tensor, attention: PagedAttention
    ) -> Tensor:
        """The logits of the rows in `keep_Q`; call it while patched and without gradients."""
        output: Any = self.model(
            input_ids=tokens_R[None],
            position_ids=positions_R[None],
            use_cache=False,
            logits_to_keep=keep_Q,
            paged_attention=attention,
        )
        logits_QV: Tensor = output.logits[0]
        return logits_QV.float()


def attention_shape(config: Any) -> tuple[int, int, int]:  # noqa: ANN401
    """Layers, key/value heads and head dimension of a model."""
    values = config.to_dict()
    missing = {"num_attention_heads", "num_hidden_layers", "hidden_size"} - values.keys()
    if missing:
        raise ModelError(f"{type(config).__name__} has no {', '.join(sorted(missing))}")
    heads = values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    return values["num_hidden_layers"], values.get("num_key_value_heads") or heads, head_dim


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(
            f"the native engine supports decoder-only models, but {name} has an encoder"
        )
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{name} has no output layer for logits; load it with AutoModelForCausalLM"
        )
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ModelError(f"{name} must be in float32, float16 or bfloat16, got {model.dtype}")
    refuse_foreign_attention(model, instead=_INSTEAD)


_TOKENS = 24
_GAPS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


def probe(*, vocabulary: int, max_tokens: int) -> Trajectory:
    """A complete answer of arbitrary tokens, to be scored."""
    count = min(_TOKENS, max_tokens)
    tokens = [mix(index) % vocabulary for index in range(count)]
    cached = Segment(tokens[1:], [0.0] * (count - 1), version=-1)
    prompt = Prompt(id=0, tokens=tokens[:1])
    return Trajectory(prompt=prompt, sample_index=0, group=0, seed=0, segments=(cached,))


def refuse_other_logprobs(
    model: PreTrainedModel, known: Trajectory, logprobs: Sequence[float]
) -> None:
    """Refuse a model whose plain forward pass gives other log-probabilities than the engine."""
    tokens = [*known.prompt.tokens, *known.tokens]
    plain_T = plain_logprobs(model, tokens, after=len(known.prompt.tokens))
    gap = (plain_T - torch.tensor(logprobs)).abs().mean().item()
    if not gap <= _GAPS[model.dtype]:
        raise ModelError(
            f"{type(model).__name__} gives other results in the native engine than in transformers "
            f"(log-probabilities differ by {gap:.2g} on average): its attention has a "
            "feature that the engine does not support; use the vLLM or SGLang engine for this model"
        )


def checked_weights(model: nn.Module, tensors: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensor for each parameter of a model; raises `ModelError` if a name or shape differs."""
    return dict(_fitting(model, tensors))


def copy_weights(model: nn.Module, tensors: Mapping[str, object]) -> None:
    """Copy named tensors into a model's parameters, each as it is read.

    Of streamed tensors only one at a time is in memory. One that does not fit leaves the model with
    those before it.
    """
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in _fitting(model, tensors):
            own[name].copy_(tensor)


def _fitting(model: nn.Module, tensors: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    own = dict(model.named_parameters())
    tied = model.state_dict().keys() - own.keys()
    missing, unknown = {*own}, []
    for name, tensor in tensors.items():
        if name not in own:
            unknown += [] if name in tied else [name]
            continue
        shape = tuple(own[name].shape)
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ModelError(f"{name} must be a tensor of shape {shape}, got {got}")
        missing.discard(name)
        yield name, tensor
    if missing or unknown:
        raise ModelError(
            "the weights must be those of this model; "
            f"missing: {', '.join(sorted(missing)[:3]) or 'none'}; "
            f"unknown: {', '.join(sorted(unknown)[:3]) or 'none'}"
        )
