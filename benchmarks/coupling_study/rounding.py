"""Rounding that holds: a weight keeps its rounded value while the master stays near it.

Plain rounding moves a few weights by a whole unit in the last place at every update. A held weight
moves only when the master is more than `hold_ulps` units away: 0.5 is plain rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN_ROUNDING = 0.5
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}


def held(old: Tensor, master: Tensor, *, hold_ulps: float) -> Tensor:
    """The master rounded to the old tensor's type, except where the old value is near enough."""
    master = master.to(old.device)
    bits = _MANTISSA_BITS.get(old.dtype)
    if bits is None or hold_ulps <= PLAIN_ROUNDING or master.dtype == old.dtype:
        return master
    before = old.float()
    _, exponents = torch.frexp(before)
    reach = torch.ldexp(torch.full_like(before, hold_ulps), exponents - 1 - bits)
    # Zero has no unit in the last place: it is given up at once.
    is_near = ((master - before).abs() <= reach) & (before != 0)
    return torch.where(is_near, before, master)
