"""Linear layers for rollout on the CPU: weights packed once per version, same bits in any batch.

oneDNN's packed products read the weights in the order they are used, which for a few dozen rows
is up to twice as fast, and sum each row in an order that does not depend on the number of rows.
The packed copy doubles the memory of the linear weights and must be made again when they change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ROW_MULTIPLE = 8
"""Rows are padded to a multiple of this: products of fewer rows sum in another order."""


def can_pack(model: nn.Module) -> bool:
    """Whether this build and this model can use packed products."""
    return bool(torch.backends.mkldnn.is_available()) and all(
        parameter.device.type == "cpu" and parameter.dtype == torch.float32
        for parameter in model.parameters()
    )


def packed_linears(model: nn.Module, *, rows: int) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """For each linear layer, a forward with packed weights, best for about `rows` rows."""
    return {
        module: _packed(module, rows=rows)
        for module in model.modules()
        if type(module) is nn.Linear
    }


def _packed(linear: nn.Linear, *, rows: int) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
    bias: Tensor | None = linear.bias
    bias = bias.detach() if bias is not None else None
    product = torch.ops.mkldnn._linear_pointwise.default

    def forward(x: Tensor) -> Tensor:
        result: Tensor = product(x, weight, bias, "none", [], "")
        return result

    return forward
