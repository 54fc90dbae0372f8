"""The fewest rows that a pass on the GPU is given: below them, passes take longer, not shorter.

With sums that may not be split, the library's products for few rows can be several times slower
than those for a hundred. Rows beyond those needed are padding, which costs little: a decode step
is bound by reading the weights. So the products of the model are timed once for each size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_REPEATS = 5
_CLEARLY = 1.05


def fewest_rows(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest size that no larger one beats clearly.

    >>> fewest_rows((8, 64, 96, 128), {8: 8.2, 64: 8.3, 96: 2.8, 128: 2.9}.__getitem__)
    96
    >>> fewest_rows((8, 64, 96, 128), {8: 1.1, 64: 1.2, 96: 1.2, 128: 1.3}.__getitem__)
    8
    """
    taken = [seconds(size) for size in sizes]
    return next(
        size for place, size in enumerate(sizes) if taken[place] <= _CLEARLY * min(taken[place:])
    )


class ProductTimer:
    """Times the matrix products of one pass through a model on the GPU."""

    def __init__(self, model: nn.Module, replaced: dict[nn.Module, Callable[..., Tensor]]) -> None:
        """`replaced` has the layers that compute in a way of their own."""
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        self._counts = Counter(_kind(linear) for linear in linears)
        self._products: dict[tuple[int, int, bool], Callable[[Tensor], Tensor]] = {}
        for linear in linears:
            self._products[_kind(linear)] = replaced.get(linear, linear)
        self._like = next(model.parameters())

    @torch.inference_mode()
    def __call__(self, rows: int) -> float:
        """Seconds of all products of a pass with so many rows."""
        return sum(count * self._seconds(kind, rows) for kind, count in self._counts.items())

    def _seconds(self, kind: tuple[int, int, bool], rows: int) -> float:
        x = torch.zeros(rows, kind[0], dtype=self._like.dtype, device=self._like.device)
        product = self._products[kind]
        product(x)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(_REPEATS):
            product(x)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000 / _REPEATS


def _kind(linear: nn.Linear) -> tuple[int, int, bool]:
    return linear.in_features, linear.out_features, linear.bias is not None
