"""Matrix products: the same bits for a row in any batch, and logits in fp32.

On a GPU, cuBLAS sums a row in one order whatever the number of rows, as long as it does not split
the sum: so splitting is forbidden while the engine runs or records a pass. That holds for 16-bit
weights; in fp32, small batches still differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_cuda = torch.backends.cuda


@contextmanager
def unsplit_sums() -> Iterator[None]:
    """Forbid cuBLAS to split sums, for a while."""
    matmul = _cuda.matmul
    library = _cuda.preferred_blas_library()
    bf16 = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    fp16 = (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction_split_k,
    )
    _cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = bf16
        matmul.allow_fp16_reduced_precision_reduction = fp16
        _cuda.preferred_blas_library(library)


def fp32_logits(output: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The output layer with its sums kept in fp32, not rounded back to the weights' type."""
    bias: Tensor | None = output.bias

    def forward(x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return linear(x, output.weight, bias)
        logits = torch.mm(x.flatten(0, -2), output.weight.t(), out_dtype=torch.float32)
        logits = logits if bias is None else logits + bias.float()
        result: Tensor = logits.unflatten(0, x.shape[:-1])
        return result

    return forward


def widened_logits(output: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The same for a processor that has no such product: the weights are widened once."""
    weight = output.weight.detach().float()
    bias: Tensor | None = output.bias
    wide = bias.detach().float() if bias is not None else None
    return lambda x: linear(x.float(), weight, wide)
