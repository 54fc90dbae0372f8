"""Attention over a packed row: every token attends to its own sequence only.

The model stays as it is: its attention is replaced through transformers' attention interface while
a packed row goes through it, also when gradient checkpointing runs a layer once more in the
backward pass, and is restored afterwards. Dropout is off meanwhile, as it is in rollout: otherwise
the ratio of new to old probabilities would be noise. For the same time decoder layers may be
compiled, which keeps less for the backward pass and launches fewer kernels.

Axes: R tokens of the row, H query heads, K key/value heads, D head dimension, L tokens of one
sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sortedrl.models.attention_interface import AttentionInputs, register_attention

Forwards = Mapping[nn.Module, Callable[..., Any]]


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute layers in the backward pass; models do so in training mode only."""
    # transformers 5.23 has a new name for it, and warns of the old one.
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})


def compiled_layers(model: PreTrainedModel) -> Forwards:
    """For each decoder layer its compiled forward; all layers of a class share one function."""
    names = set(model._no_split_modules or ())
    kinds = {type(layer) for layer in model.modules() if type(layer).__name__ in names}
    compiled = {kind: _compiled(kind) for kind in kinds}
    return {
        layer: partial(compiled[type(layer)], layer)
        for layer in model.modules()
        if type(layer) in compiled
    }


def _compiled(kind: type[nn.Module]) -> Callable[..., Any]:
    # A function of its own: what torch.compile keeps for it is not shared with the engine, which
    # compiles the same layers for passes of another kind.
    def forward(layer: nn.Module, *inputs: object, **named: object) -> Any:  # noqa: ANN401
        return kind.forward(layer, *inputs, **named)

    return torch.compile(forward, dynamic=True)


@contextmanager
def replaced_forwards(forwards: Forwards) -> Iterator[None]:
    """The modules with these forwards inside the block."""
    before = {m: m.__dict__["forward"] for m in forwards if "forward" in m.__dict__}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)
        for module, forward in before.items():
            module.__dict__["forward"] = forward


INSTEAD = "train another model"
"""What to do with a model whose sequences cannot be packed."""
_NAME = "sortedrl_packed"
# This argument came later than the function; before it, keys and values must be repeated.
_VARLEN_SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Row:
    """Where the sequences of a packed row begin and end.

    Nothing but tensors: compiled layers would be compiled anew for every number or count of
    numbers in it.
    """

    bounds: Tensor
    """0 and the end of each sequence, int32, on the device of the model."""
    host_bounds: Tensor
    """The same on the host, which so need not wait for the device."""
    longest_L0: Tensor
    """Empty, as long as the longest sequence: compiled layers read a size without a new graph."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device) -> Row:
        """The row of sequences of these lengths."""
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(bounds.to(device), bounds, torch.empty(max(lengths), 0))

    @property
    def lengths(self) -> list[int]:
        """The lengths of the sequences, in order."""
        lengths: list[int] = self.host_bounds.diff().tolist()
        return lengths


@contextmanager
def packed_attention(model: PreTrainedModel, forwards: Forwards) -> Iterator[None]:
    """The model with packed attention, these layers and no dropout inside the block.

    Gradient checkpointing is applied here: since 5.23 transformers applies it inside a layer's
    forward, which would break the graph of a compiled layer; earlier versions apply it outside.
    """
    config = model.config.get_text_config()
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    layers = [m for m in model.modules() if _is_checkpointed(m)]

    def repeated(layer: Any) -> Callable[..., Any]:  # noqa: ANN401
        """The forward of a layer that the backward pass repeats, where it is packed again."""
        forward, checkpoint = forwards.get(layer, layer.forward), layer._gradient_checkpointing_func

        def checkpointed(*inputs: object, **named: object) -> Any:  # noqa: ANN401
            def packed(*inputs: object) -> Any:  # noqa: ANN401
                with _switched(config, dropouts, [layer]):
                    return forward(*inputs, **named)

            return checkpoint(packed, *inputs)

        return checkpointed

    replaced = {**forwards, **{layer: repeated(layer) for layer in layers}}
    hooks = [] if not forwards else [_alike_for_all_layers(model)]
    try:
        with _switched(config, dropouts, layers), replaced_forwards(replaced):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _alike_for_all_layers(model: PreTrainedModel) -> RemovableHandle:
    """Let the input of the first layer have a gradient exactly where those of the others have one.

    Otherwise the first layer is compiled a second time where embeddings are frozen, as they are
    beside adapters, and where transformers gives them a gradient that nobody asks for.
    """

    def alike(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return embedded.detach()
        return embedded if embedded.requires_grad else embedded.requires_grad_()

    return model.get_input_embeddings().register_forward_hook(alike)


@contextmanager
def _switched(
    config: Any,  # noqa: ANN401
    dropouts: Sequence[nn.Module],
    layers: Sequence[Any],
) -> Iterator[None]:
    """Our attention, without these dropouts, and with layers that do not checkpoint themselves."""
    before = config._attn_implementation
    training = [dropout for dropout in dropouts if dropout.training]
    checkpointed = [layer for layer in layers if layer.gradient_checkpointing]
    config._attn_implementation = _NAME
    try:
        for dropout in training:
            dropout.training = False
        for layer in checkpointed:
            layer.gradient_checkpointing = False
        yield
    finally:
        config._attn_implementation = before
        for dropout in training:
            dropout.training = True
        for layer in checkpointed:
            layer.gradient_checkpointing = True


def _is_checkpointed(module: nn.Module) -> bool:
    return (
        isinstance(module, GradientCheckpointingLayer)
        and module.gradient_checkpointing
        and module.training
    )


def _attend(inputs: AttentionInputs, row: Row) -> Tensor:
    """Packed attention over the sequences of a row."""
    q_1HRD = inputs.q_1HRD
    attend = _by_kernel if q_1HRD.is_cuda and q_1HRD.dtype in _HALF else _one_by_one
    return attend(
        q_1HRD, inputs.k_1KRD, inputs.v_1KRD, row, scale=inputs.scale, window=inputs.window
    )


register_attention(_NAME, _attend, argument="row", instead=INSTEAD, is_traceable=True)


def _by_kernel(
    q_1HRD: Tensor, k_1KRD: Tensor, v_1KRD: Tensor, row: Row, *, scale: float, window: int | None
) -> Tensor:
    """One flash kernel over all sequences."""
    shared: dict[str, Any] = {"enable_gqa": True} if _VARLEN_SHARES_HEADS else {}
    if not _VARLEN_SHARES_HEADS:
        k_1KRD, v_1KRD = _repeated(k_1KRD, q_1HRD), _repeated(v_1KRD, q_1HRD)
    longest = row.longest_L0.shape[0]
    attended_RHD = varlen_attn(
        q_1HRD[0].transpose(0, 1),
        k_1KRD[0].transpose(0, 1),
        v_1KRD[0].transpose(0, 1),
        row.bounds,
        row.bounds,
        longest,
        longest,
        scale=scale,
        # transformers counts the token itself, the kernel only those to its left.
        window_size=(-1 if window is None else window - 1, 0),
        **shared,
    )
    assert isinstance(attended_RHD, Tensor)
    return attended_RHD[None]


@torch.compiler.disable  # it reads numbers from tensors
def _one_by_one(
    q_1HRD: Tensor, k_1KRD: Tensor, v_1KRD: Tensor, row: Row, *, scale: float, window: int | None
) -> Tensor:
    """One sequence at a time; on the CPU as fast as a batch of equal lengths."""
    if q_1HRD.is_cuda:
        # The kernels for float32 do not share heads, and without a kernel scores take L x L.
        k_1KRD, v_1KRD = _repeated(k_1KRD, q_1HRD), _repeated(v_1KRD, q_1HRD)
    # Splitting, not slicing: the gradient of slices would be a full row for each of them.
    parts = (tensor.split(row.lengths, dim=2) for tensor in (q_1HRD, k_1KRD, v_1KRD))
    attended = []
    for q_1HLD, k_1KLD, v_1KLD in zip(*parts, strict=True):
        length = q_1HLD.shape[2]
        near_LL = None
        if window is not None and window < length:
            near_LL = q_1HLD.new_ones(length, length, dtype=torch.bool).tril()
            near_LL = near_LL.triu(1 - window)
        attended_1HLD = scaled_dot_product_attention(
            q_1HLD,
            k_1KLD,
            v_1KLD,
            attn_mask=near_LL,
            is_causal=near_LL is None,
            scale=scale,
            enable_gqa=q_1HLD.shape[1] != k_1KLD.shape[1],
        )
        attended.append(attended_1HLD.transpose(1, 2))
    return torch.cat(attended, dim=1)


def _repeated(x_1KRD: Tensor, q_1HRD: Tensor) -> Tensor:
    """Keys or values, once for every query head that reads them."""
    return x_1KRD.repeat_interleave(q_1HRD.shape[1] // x_1KRD.shape[1], dim=1)
