"""Matrix products on the GPU: the same bits for a row in any batch, and logits in fp32.

cuBLAS sums a row in one order whatever the number of rows, as long as it does not split the sum:
so splitting is forbidden while the engine runs or records a pass. That holds for 16-bit weights;
in fp32 small batches still differ in the last bits.
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
    """The output layer with its sums in fp32 kept, not rounded back to the weights' type."""
    if output.weight.dtype == torch.float32:
        return lambda x: linear(x, output.weight, output.bias)

    def forward(x: Tensor) -> Tensor:
        logits = torch.mm(x.flatten(0, -2), output.weight.t(), out_dtype=torch.float32)
        if output.bias is not None:
            logits = logits + output.bias.float()
        result: Tensor = logits.unflatten(0, x.shape[:-1])
        return result

    return forward
