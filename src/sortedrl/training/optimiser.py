"""AdamW on 32-bit master weights, even where the model has 16 bits.

The model's weights are changed in place, because the engine shares them.

    gradients -> norm -> finite? -- no --> gradients dropped, nothing else changes
                            |
                           yes -> clip -> AdamW on 32-bit weights -> copied to the 16-bit ones

Small steps would be lost in 16 bits: a weight of 1 in bfloat16 moves by 0.004 or not at all. So
16-bit weights have a 32-bit master, which AdamW works on, and gradients are added up in 32 bits too
unless `optimiser.gradients` keeps them in the precision of the weights. Masters and moments are an
`AdamState`: on the device, in 8 bits, or in main memory (`optimiser.state`).

Small gradients would underflow in float16, whose smallest number is 6e-8: one token of a million
has a millionth of the loss. So where the model computes in float16, `backward` multiplies the loss
by a power of two, and `step` divides the gradients by it. A scale at which gradients overflow is
lowered, and the caller repeats the micro-batches (`StepResult.is_to_repeat`); no batch is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from sortedrl.config.algorithm import Optimisation, learning_rate_at
from sortedrl.config.checks import require
from sortedrl.errors import CheckpointError, ModelError
from sortedrl.models.offload import Offloader
from sortedrl.training.adam_state import HALF, Kind, adam_state

_FULL = (torch.float32, torch.float64)
_FOREIGN = "(is it of another model or in another precision? resume with the settings of its run)"
_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_SCALE_FALLS_BY = 16.0
_SCALE_RISES_AFTER = 100
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimiser step."""

    grad_norm: float
    """The norm of all gradients together, before clipping."""
    learning_rate: float
    """The learning rate of the step."""
    is_applied: bool
    """Whether the weights were changed; not if a gradient was infinite or NaN."""
    is_to_repeat: bool = False
    """Whether the gradients overflowed in float16 and the loss scale was lowered: the same
    micro-batches, repeated, may give finite gradients."""


class LossScale:
    """The power of two that keeps gradients within the range of float16.

    It falls when gradients overflow and doubles after a hundred steps without. Where they are not
    finite even at 1, overflow is not the cause: the scale is what it was before that step.
    """

    def __init__(self) -> None:
        """The usual first scale."""
        self.value = _FIRST_SCALE
        self._num_good = 0
        self._before: list[float] | None = None

    def fell(self) -> bool:
        """Record gradients that are not finite; whether to retry with the lower scale."""
        before = self.state() if self._before is None else self._before
        if self.value == 1:
            self.load_state(before)
            return False
        self.value, self._num_good = max(1.0, self.value / _SCALE_FALLS_BY), 0
        self._before = before
        return True

    def held(self) -> None:
        """Record finite gradients."""
        self._before = None
        self._num_good += 1
        if self._num_good >= _SCALE_RISES_AFTER:
            self.value, self._num_good = min(self.value * 2, _LARGEST_SCALE), 0

    def state(self) -> list[float]:
        """The state for a checkpoint."""
        return [self.value, self._num_good]

    def load_state(self, state: Sequence[float]) -> None:
        """Continue from a checkpoint."""
        value, num_good = state
        self.value, self._num_good, self._before = float(value), int(num_good), None


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, added up in 32 bits."""
    if all(gradient.dtype not in HALF for gradient in gradients):
        return get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


class Optimiser:
    """Accumulates gradients over backward passes and applies them in steps."""

    def __init__(
        self,
        named_parameters: Mapping[str, Parameter],
        settings: Optimisation,
        *,
        total_steps: int | None,
        norm: Callable[[Sequence[Tensor]], Tensor] = total_norm,
        computes_in: torch.dtype | None = None,
    ) -> None:
        """Optimise the parameters that require a gradient; `total_steps` are those of the run.

        `norm` gives the norm of all gradients together, where this process has parts of them.
        `computes_in` is the precision of the model, where the trained weights (such as adapters)
        have another.
        """
        # Refuses a schedule that needs the length of the run now, not at the first step.
        learning_rate_at(0, settings=settings, total_steps=total_steps)
        self._settings = settings
        self._total_steps = total_steps
        self._norm = norm
        self._num_steps = 0
        self._offloader = Offloader(keep_values=True)
        self._parameters = {n: p for n, p in named_parameters.items() if p.requires_grad}
        _check_parameters(self._parameters, settings)
        self._state = adam_state(self._parameters, settings)
        self._steps = dict.fromkeys(self._parameters, 0)
        self._sums: dict[str, Tensor] = {}
        precisions = {computes_in, *(p.dtype for p in self._parameters.values())}
        self._scale = LossScale() if torch.float16 in precisions else None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_adds_to(ref(self), name))
            for name, parameter in self._parameters.items()
            if parameter.dtype in HALF and settings.gradients == "fp32"
        ]

    @property
    def num_steps(self) -> int:
        """Steps that were applied."""
        return self._num_steps

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss; `None` where it is not scaled."""
        return None if self._scale is None else self._scale.value

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a part of the step's loss."""
        (loss if self._scale is None else loss * self._scale.value).backward()

    def step(self, *, loss: float = 0.0, rate_scale: float = 1.0) -> StepResult:
        """Apply the gradients accumulated since the last step, and drop them.

        The learning rate is that of the schedule times `rate_scale`. A loss or gradients that are
        not finite change nothing, not even the count of steps.
        """
        rate = rate_scale * learning_rate_at(
            self._num_steps, settings=self._settings, total_steps=self._total_steps
        )
        if not math.isfinite(loss):
            self.zero_grad()
            return StepResult(grad_norm=math.nan, learning_rate=rate, is_applied=False)
        gradients = self.gradients()
        if self._scale is not None:
            for gradient in gradients.values():
                gradient.mul_(1 / self._scale.value)
        norm = self._norm(list(gradients.values()))
        grad_norm = norm.item()
        is_finite = math.isfinite(grad_norm)
        is_to_repeat = not is_finite and self._scale is not None and self._scale.fell()
        if is_finite:
            if self._scale is not None:
                self._scale.held()
            for name in gradients:
                self._steps[name] += 1
            self._state.step(gradients, scale=self._clip_scale(norm), rate=rate, steps=self._steps)
            self._num_steps += 1
        self.zero_grad()
        return StepResult(
            grad_norm=grad_norm,
            learning_rate=rate,
            is_applied=is_finite,
            is_to_repeat=is_to_repeat,
        )

    def gradients(self) -> dict[str, Tensor]:
        """The gradients accumulated since the last step, by the names of their weights.

        They are multiplied by the loss scale, where there is one.
        """
        own = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        found = own | self._sums
        return {name: found[name] for name in self._parameters if name in found}

    def zero_grad(self) -> None:
        """Drop the gradients accumulated since the last step."""
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def close(self) -> None:
        """Release the parameters, so that another optimiser can have them."""
        self.zero_grad()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def offload(self) -> None:
        """Move masters and moments to main memory, until `onload`."""
        if not self._offloader.is_offloaded:
            self._offloader.offload(self._state.on_device())

    def onload(self) -> None:
        """Move masters and moments back to the device."""
        self._offloader.onload()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and JSON values: with the weights, all that further steps depend on.

        The tensors may be the live ones: save them before the next step.
        """
        values: dict[str, Any] = {
            "num_steps": self._num_steps,
            "parameter_steps": dict(self._steps),
        }
        if self._scale is not None:
            values["loss_scale"] = self._scale.state()
        return self._state.tensors(), values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from where `state` was taken; nothing is changed unless all of it fits.

        16-bit weights are set from their masters; 32-bit weights are loaded with the model. The
        state may be that of an optimiser with another `optimiser.state`.
        """
        _check_tensors(self._state.kinds(), tensors)
        num_steps, parameter_steps = _checked_counts(values, names=self._parameters)
        self._state.load(tensors)
        self._steps = {name: parameter_steps[name] for name in self._parameters}
        self._num_steps = num_steps
        # One saved without a scale continues with the initial one.
        if self._scale is not None and "loss_scale" in values:
            self._scale.load_state(values["loss_scale"])
        self.zero_grad()

    def _clip_scale(self, norm: Tensor) -> Tensor | None:
        """The factor of the gradients with which their norm is at most `max_grad_norm`."""
        most = self._settings.max_grad_norm
        return None if most is None else (most / (norm + _CLIP_EPSILON)).clamp(max=1.0)


def _adds_to(optimiser: ref[Optimiser], name: str) -> Callable[[Tensor], None]:
    """A hook that moves the gradient of a 16-bit weight to a sum in 32 bits.

    That of an optimiser that is gone leaves the gradient to the next one.
    """

    @torch.no_grad()
    def add(parameter: Tensor) -> None:
        gradient, owner = parameter.grad, optimiser()
        if gradient is None or owner is None:
            return
        sums = owner._sums
        if name in sums:
            sums[name] += gradient
        else:
            sums[name] = gradient.float()
        parameter.grad = None

    return add


def _check_parameters(parameters: Mapping[str, Parameter], settings: Optimisation) -> None:
    if not parameters:
        raise ModelError("the model must have weights to train, got none that require a gradient")
    assert len({id(p) for p in parameters.values()}) == len(parameters), "a parameter came twice"
    for name, parameter in parameters.items():
        if parameter.dtype not in HALF + _FULL:
            raise ModelError(
                f"weights must be real numbers of at least 16 bits to be trained, got {name} in "
                f"{parameter.dtype}; load the model in float32 or bfloat16"
            )
        require(
            parameter.dtype != torch.float64 or settings.state == "fp32",
            f"optimiser.state {settings.state!r} keeps moments of 16-bit and 32-bit weights, got "
            f"{name} in float64; set optimiser.state to 'fp32'",
        )
        require(
            parameter.dtype != torch.float16 or settings.gradients == "fp32",
            "optimiser.gradients 'weights' needs weights in bfloat16 or float32, got "
            f"{name} in float16, whose sums overflow; set optimiser.gradients to 'fp32'",
        )


def _check_tensors(own: Mapping[str, Kind], given: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() | given.keys()):
        if name not in given:
            raise CheckpointError(f"the saved optimiser must hold {name!r} {_FOREIGN}")
        if name not in own:
            raise CheckpointError(f"the saved optimiser holds an unknown {name!r} {_FOREIGN}")
        expected, found = own[name], Kind(given[name].dtype, given[name].shape)
        if expected != found:
            raise CheckpointError(
                f"{name!r} of the saved optimiser must be {expected}, got {found} {_FOREIGN}"
            )


def _checked_counts(
    values: Mapping[str, Any], *, names: Mapping[str, object]
) -> tuple[int, dict[str, int]]:
    num_steps = values.get("num_steps")
    counts = values.get("parameter_steps")
    if not isinstance(num_steps, int) or not isinstance(counts, dict):
        raise CheckpointError(
            "the saved optimiser must give num_steps and parameter_steps, got "
            f"{sorted(values)}; use an older checkpoint"
        )
    for name in sorted(names.keys() | counts.keys()):
        if name not in names or not isinstance(counts.get(name), int):
            raise CheckpointError(f"parameter_steps differ in {name!r} {_FOREIGN}")
    return num_steps, counts
