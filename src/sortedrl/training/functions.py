"""Loss and advantage functions of the user: `module:function`, or `path/to/file.py:function`.

A function is called with plain tensors, by the names of its parameters, which are among
`LOSS_ARGUMENTS` or `ADVANTAGE_ARGUMENTS`. What it returns is checked: type, shape, gradient.

Axes: N answers, T answer tokens of all of them together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from torch import Tensor

from sortedrl.config.algorithm import Algorithm, is_function
from sortedrl.errors import ConfigError, TrainingError, unknown_name
from sortedrl.rewards.functions import load_module

LOSS_ARGUMENTS = ("current_T", "anchor_T", "advantages_T", "owners_T", "lengths_N")
ADVANTAGE_ARGUMENTS = (
    "rewards_N",
    "rewards_T",
    "prompts_N",
    "lengths_N",
    "owners_T",
    "is_truncated_N",
)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ARGUMENTS = MappingProxyType({"loss": LOSS_ARGUMENTS, "advantage": ADVANTAGE_ARGUMENTS})


def check_functions(algorithm: Algorithm) -> None:
    """Load the functions that the settings name, so that an error shows before the first update."""
    for kind, address in (("loss", algorithm.loss), ("advantage", algorithm.advantage)):
        if address is not None and is_function(address):
            _loaded(address, kind)


def token_losses(address: str, given: Mapping[str, Tensor]) -> Tensor:
    """The losses that the function gives for the tokens: `losses_T`, with a gradient."""
    found = _called(address, "loss", given)
    current_T = given["current_T"]
    if found.shape != current_T.shape:
        raise TrainingError(
            f"{_name(address, 'loss')} must return one loss per token, a tensor of shape "
            f"{tuple(current_T.shape)}, got {tuple(found.shape)}; do not take the mean, "
            "algorithm.aggregation does"
        )
    if current_T.requires_grad and not found.requires_grad:
        raise TrainingError(
            f"{_name(address, 'loss')} must return losses that depend on current_T, got a tensor "
            "without a gradient; detach only what should have none"
        )
    return found


def token_advantages(address: str, given: Mapping[str, Tensor]) -> Tensor:
    """The advantages that the function gives: `advantages_T`."""
    found = _called(address, "advantage", given).detach()
    lengths_N, num_tokens = given["lengths_N"], len(given["owners_T"])
    if found.shape == (num_tokens,):
        return found
    if found.shape == lengths_N.shape:
        return found[given["owners_T"]]
    raise TrainingError(
        f"{_name(address, 'advantage')} must return one advantage per answer or per token, a "
        f"tensor of shape ({len(lengths_N)},) or ({num_tokens},), got {tuple(found.shape)}"
    )


def _called(address: str, kind: str, given: Mapping[str, Tensor]) -> Tensor:
    function, names = _loaded(address, kind)
    found = function(**{name: given[name] for name in names})
    if not isinstance(found, Tensor):
        raise TrainingError(
            f"{_name(address, kind)} must return a tensor, got {type(found).__name__}; end with "
            "the tensor of all tokens"
        )
    if not found.is_floating_point():
        raise TrainingError(
            f"{_name(address, kind)} must return floating-point numbers, got {found.dtype}; "
            "convert with .float()"
        )
    return found


@cache
def _loaded(address: str, kind: str) -> tuple[Callable[..., object], tuple[str, ...]]:
    """The function, and the names of the tensors that it takes, in order."""
    called = _name(address, kind)
    place, name = (address, kind) if address.endswith(".py") else _parted(address)
    functions = {
        name: value
        for name, value in vars(load_module(place, called=called, suffix=kind)).items()
        if inspect.isroutine(value)
    }
    if name not in functions:
        raise ConfigError(f"{called}: {unknown_name('function', name, functions)} (in {place})")
    names = []
    for parameter in inspect.signature(functions[name]).parameters.values():
        if parameter.name in _ARGUMENTS[kind] and parameter.kind in _BY_NAME:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"{called}: {unknown_name('parameter', parameter.name, _ARGUMENTS[kind])}"
            )
    return functions[name], tuple(names)


def _parted(address: str) -> tuple[str, str]:
    place, _, name = address.rpartition(":")
    return place, name


def _name(address: str, kind: str) -> str:
    return f"algorithm.{kind} {address!r}"
