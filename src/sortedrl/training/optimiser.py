"""AdamW on 32-bit master weights, even where the model has 16 bits.

The model's weights are changed in place, because the engine shares them.

    gradients -> norm -> finite? -- no --> gradients dropped, nothing else changes
                            |
                           yes -> clip -> AdamW on 32-bit weights -> copied to the 16-bit ones

Small steps would be lost in 16 bits: a weight of 1 in bfloat16 moves by 0.004 or not at all. So
16-bit weights have a 32-bit master, which gradients are added up in and AdamW works on.

Small gradients would underflow in float16, whose smallest number is 6e-8: one token of a million
has a millionth of the loss. So where the model computes in float16, `backward` multiplies the loss
by a power of two, and `step` divides the gradients by it. A scale at which gradients overflow is
lowered, and the caller repeats the micro-batches (`StepResult.is_to_repeat`); no batch is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sortedrl.config.algorithm import Optimisation, learning_rate_at
from sortedrl.config.checks import require
from sortedrl.errors import CheckpointError, ModelError
from sortedrl.models.offload import Offloader

_HALF = (torch.bfloat16, torch.float16)
_FULL = (torch.float32, torch.float64)
_MOMENTS = MappingProxyType({"first_moment": "exp_avg", "second_moment": "exp_avg_sq"})
_FOREIGN = "(is it of another model or in another precision? resume with the settings of its run)"
_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_SCALE_FALLS_BY = 16.0
_SCALE_RISES_AFTER = 100


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
        """What a checkpoint holds."""
        return [self.value, self._num_good]

    def load_state(self, state: Sequence[float]) -> None:
        """Continue from a checkpoint."""
        value, num_good = state
        self.value, self._num_good, self._before = float(value), int(num_good), None


class Optimiser:
    """Accumulates gradients over backward passes and applies them in steps."""

    def __init__(
        self,
        named_parameters: Mapping[str, Parameter],
        settings: Optimisation,
        *,
        total_steps: int | None,
        norm: Callable[[Sequence[Tensor]], Tensor] = get_total_norm,
        computes_in: torch.dtype | None = None,
    ) -> None:
        """Optimise the parameters that require a gradient; `total_steps` are those of the run.

        `norm` gives the norm of all gradients together, where this process has parts of them.
        `computes_in` is the precision of the model, where the trained weights (such as adapters)
        have another.
        """
        require(
            settings.schedule == "constant" or total_steps is not None,
            f"optimiser.schedule {settings.schedule!r} needs to know the number of steps of the "
            "run, got none; limit the run or set the schedule to 'constant'",
        )
        self._settings = settings
        self._total_steps = total_steps
        self._norm = norm
        self._num_steps = 0
        self._offloader = Offloader(keep_values=True)
        self._parameters = {n: p for n, p in named_parameters.items() if p.requires_grad}
        _check_parameters(self._parameters)
        self._masters = {
            name: Parameter(p.detach().float()) if p.dtype in _HALF else p
            for name, p in self._parameters.items()
        }
        self._adam = _adam(list(self._masters.values()), settings)
        precisions = {computes_in, *(p.dtype for p in self._parameters.values())}
        self._scale = LossScale() if torch.float16 in precisions else None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_adds_to(self._masters[name]))
            for name, parameter in self._half_parameters().items()
        ]

    @property
    def num_steps(self) -> int:
        """Steps that were applied."""
        return self._num_steps

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by; `None` where it is not scaled."""
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
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        if self._scale is not None:
            for gradient in gradients:
                gradient.mul_(1 / self._scale.value)
        norm = self._norm(gradients)
        grad_norm = norm.item()
        is_finite = math.isfinite(grad_norm)
        is_to_repeat = not is_finite and self._scale is not None and self._scale.fell()
        if is_finite:
            if self._scale is not None:
                self._scale.held()
            if self._settings.max_grad_norm is not None:
                clip_grads_with_norm_(self._masters.values(), self._settings.max_grad_norm, norm)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self._copy_masters()
            self._num_steps += 1
        self.zero_grad()
        return StepResult(
            grad_norm=grad_norm,
            learning_rate=rate,
            is_applied=is_finite,
            is_to_repeat=is_to_repeat,
        )

    def zero_grad(self) -> None:
        """Drop the gradients accumulated since the last step."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    def close(self) -> None:
        """Release the parameters, so that another optimiser can have them."""
        self.zero_grad()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def offload(self) -> None:
        """Move masters and moments to main memory, until `onload`."""
        if not self._offloader.is_offloaded:
            self._offloader.offload(self._tensors().values())

    def onload(self) -> None:
        """Move masters and moments back to the device."""
        self._offloader.onload()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and JSON values: with the weights, all that further steps depend on.

        The tensors are the live ones: save them before the next step.
        """
        steps = {name: int(self._adam.state[p]["step"]) for name, p in self._masters.items()}
        values: dict[str, Any] = {"num_steps": self._num_steps, "parameter_steps": steps}
        if self._scale is not None:
            values["loss_scale"] = self._scale.state()
        return self._tensors(), values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from where `state` was taken; nothing is changed unless all of it fits.

        16-bit weights are set from their masters; 32-bit weights are loaded with the model.
        """
        own = self._tensors()
        _check_tensors(own, tensors)
        num_steps, parameter_steps = _checked_counts(values, names=self._masters)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
            for name, master in self._masters.items():
                self._adam.state[master]["step"].fill_(parameter_steps[name])
        self._copy_masters()
        self._num_steps = num_steps
        # One saved without a scale goes on with the first.
        if self._scale is not None and "loss_scale" in values:
            self._scale.load_state(values["loss_scale"])
        self.zero_grad()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"{moment}.{name}": self._adam.state[master][key]
            for moment, key in _MOMENTS.items()
            for name, master in self._masters.items()
        }
        masters = {f"master.{n}": self._masters[n].detach() for n in self._half_parameters()}
        return tensors | masters

    def _half_parameters(self) -> dict[str, Parameter]:
        return {n: p for n, p in self._parameters.items() if p is not self._masters[n]}

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, parameter in self._half_parameters().items():
            parameter.copy_(self._masters[name])


def _adam(parameters: list[Parameter], settings: Optimisation) -> torch.optim.AdamW:
    """AdamW with all its memory allocated now, so that what does not fit fails at the start."""
    is_fused = all(parameter.is_cuda for parameter in parameters)
    adam = torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.ndim >= 2],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=is_fused,
        foreach=False,
    )
    for parameter in parameters:
        device = parameter.device if is_fused else None
        adam.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return adam


def _adds_to(master: Parameter) -> Callable[[Tensor], None]:
    """A hook that moves the gradient of a 16-bit weight to its master, adding in 32 bits."""

    @torch.no_grad()
    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient
        parameter.grad = None

    return add


def _check_parameters(parameters: Mapping[str, Parameter]) -> None:
    if not parameters:
        raise ModelError("the model must have weights to train, got none that require a gradient")
    assert len({id(p) for p in parameters.values()}) == len(parameters), "a parameter came twice"
    for name, parameter in parameters.items():
        if parameter.dtype not in _HALF + _FULL:
            raise ModelError(
                f"weights must be real numbers of at least 16 bits to be trained, got {name} in "
                f"{parameter.dtype}; load the model in float32 or bfloat16"
            )


def _check_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() | given.keys()):
        if name not in given:
            raise CheckpointError(f"the saved optimiser must hold {name!r} {_FOREIGN}")
        if name not in own:
            raise CheckpointError(f"the saved optimiser holds an unknown {name!r} {_FOREIGN}")
        expected, found = _kind(own[name]), _kind(given[name])
        if expected != found:
            raise CheckpointError(
                f"{name!r} of the saved optimiser must be {expected}, got {found} {_FOREIGN}"
            )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


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
