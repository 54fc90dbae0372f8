"""Triton's kernels without a GPU: its interpreter, with products that do not feel their neighbours.

The interpreter multiplies tiles with numpy's BLAS. On some CPUs that rounds a row by its place in
the tile, which a GPU does not do; so tiles are multiplied here in a fixed order instead.
Importing this module puts the interpreter to work; import it before the kernels.
"""

import importlib
import os

import numpy as np
import torch
import triton.language as tl

HAS_CUDA = torch.cuda.is_available()


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    del builder, input_precision, max_num_imprecise_acc
    product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype, optimize=False)
    return TensorHandle(product + d.data, d.dtype.scalar)


if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    # Triton's own functions were made to be compiled, unless the variable was set before.
    importlib.reload(tl.standard)
    importlib.reload(tl)
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    InterpreterBuilder.create_dot = _dot
