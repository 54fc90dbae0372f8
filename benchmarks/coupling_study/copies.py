"""Rollout copies of the master weights, one for each precision and rounding rule.

A copy follows the master after every update, like an engine's weights, because a held weight
depends on its history. At version 0 of a running study it is where a long run would have brought
it: weights that drift randomly end up to `hold_ulps` ulps away from the master, with the density of
a uniform offset of half an ulp plus one of `hold_ulps - 0.5` ulps. For `hold_ulps = 1` that is
stochastic rounding. A copy that started nearest to the master would not move for the first
hundreds of updates, and survival would look better than it is.

Plain rounding moves a few weights by a whole ulp at every update. A held weight keeps its rounded
value until the master is more than `hold_ulps` ulps away: 0.5 is plain rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coupling_study.settings import Arithmetic, Precision, Settings

DTYPES: dict[Arithmetic, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
PLAIN_ROUNDING = 0.5
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}


def held(old: Tensor, master: Tensor, *, hold_ulps: float) -> Tensor:
    """The master rounded to the old tensor's type, except where the old value is close enough."""
    master = master.to(old.device)
    bits = _MANTISSA_BITS.get(old.dtype)
    if bits is None or hold_ulps <= PLAIN_ROUNDING or master.dtype == old.dtype:
        return master
    before = old.float()
    _, exponents = torch.frexp(before)
    reach = torch.ldexp(torch.full_like(before, hold_ulps), exponents - 1 - bits)
    # Zero has no ulp: it is replaced at once.
    is_near = ((master - before).abs() <= reach) & (before != 0)
    return torch.where(is_near, before, master)


@dataclass(frozen=True, slots=True)
class Rule:
    """How rollout weights are derived from the master."""

    precision: Precision
    hold_ulps: float

    @property
    def arithmetic(self) -> Arithmetic:
        """The engine's compute type."""
        return "fp32" if self.precision == "bf16-in-fp32" else self.precision

    @property
    def dtype(self) -> torch.dtype:
        """The storage type of the copy."""
        return DTYPES["bf16" if self.precision == "bf16-in-fp32" else self.precision]

    def __str__(self) -> str:
        """Its name in the tables."""
        if self.precision == "fp32":
            return "fp32"
        is_plain = self.hold_ulps <= PLAIN_ROUNDING
        return f"{self.precision} {'plain' if is_plain else f'held {self.hold_ulps:g}'}"


class Copy:
    """The rollout weights under one rule."""

    def __init__(self, rule: Rule, master: Mapping[str, Tensor]) -> None:
        """The master, rounded to the nearest."""
        self.rule = rule
        self.tensors = {name: weight.to(rule.dtype, copy=True) for name, weight in master.items()}
        self._start = self.tensors

    def settle(self, master: Mapping[str, Tensor], *, seed: int | None) -> None:
        """Start a study: nearest to the master, or where a long run would have brought it."""
        spread = 0.0 if seed is None else self.rule.hold_ulps - PLAIN_ROUNDING
        dither = Dither(self.rule.dtype, spread=spread, seed=seed or 0)
        for name, weight in master.items():
            self.tensors[name].copy_(dither(weight))
        self._start = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def reset(self) -> None:
        """Back to version 0."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self._start[name])

    def follow(self, master: Mapping[str, Tensor]) -> None:
        """Apply an update of the master as the engine does."""
        for name, tensor in self.tensors.items():
            tensor.copy_(held(tensor, master[name], hold_ulps=self.rule.hold_ulps))

    def nudge(self) -> None:
        """Move a single weight, the largest of the first layer, by one ulp."""
        # Not the embedding, which comes first: one of its rows affects only one token.
        _, tensor = [tensor for tensor in self.tensors.values() if tensor.dim() == 2][:2]
        weights = tensor.view(-1)
        place = weights.abs().argmax()
        value = weights[place].float()
        weights[place] = value + cell_widths(value, self.rule.dtype)

    def followed(self, master: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
        """The share of the master's movement from its start that the copy has followed.

        1 if rounding is unbiased: the few weights that move, move by more. 0 for a copy that does
        not move.
        """
        together = whole = 0.0
        for name, weight in master.items():
            way = weight - start[name]
            own = self.tensors[name].float() - self._start[name].float()
            together += (own * way).sum(dtype=torch.float64).item()
            whole += (way * way).sum(dtype=torch.float64).item()
        return together / whole if whole else 1.0

    def moved_share(self) -> float:
        """Share of the weights that have changed since version 0."""
        moved = sum(
            (tensor != self._start[name]).sum().item() for name, tensor in self.tensors.items()
        )
        return moved / sum(tensor.numel() for tensor in self.tensors.values())


def rules(settings: Settings) -> list[Rule]:
    """Every precision with every rounding rule that affects it."""
    return [
        Rule(precision, hold)
        for precision in settings.precisions
        for hold in ((PLAIN_ROUNDING,) if precision == "fp32" else settings.holds)
    ]


class Dither:
    """Random offsets of up to `spread` ulps of a type, fixed by the seed."""

    def __init__(self, dtype: torch.dtype, *, spread: float, seed: int) -> None:
        """Start the random sequence."""
        self._dtype = dtype
        self._spread = spread
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight with offsets added, in its own type."""
        if not self._spread:
            return weight
        device = weight.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        offsets = torch.rand(weight.shape, generator=self._generators[device], device=device)
        offsets = offsets.sub_(0.5).mul_(2 * self._spread)
        return weight + offsets.mul_(cell_widths(weight, self._dtype))


def cell_widths(values: Tensor, dtype: torch.dtype) -> Tensor:
    """For each value the distance of its neighbours in `dtype`; 0 for 0."""
    info = torch.finfo(dtype)
    _, exponents = torch.frexp(values)
    widths = torch.ldexp(torch.full_like(values, info.eps), exponents - 1)
    widths = widths.clamp_(min=info.smallest_normal * info.eps)
    return widths.masked_fill_(values == 0, 0.0)
