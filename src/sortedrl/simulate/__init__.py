"""Simulated runs: lengths, costs, presets, engines on a virtual clock, constants fitted to runs.

Controller, buffer and loop are the real ones; engine, trainer and clock are simulated.
The package is also callable: `sortedrl.simulate("paper", mode="coupled")`, see `calls`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sortedrl.simulate.compare import SimulationResult


class _Callable(ModuleType):
    """This package, made callable."""

    def __call__(self, *arguments: Any, **named: Any) -> SimulationResult:  # noqa: ANN401
        """Run one simulation; see `calls.simulate`."""
        from sortedrl.simulate.calls import simulate

        return simulate(*arguments, **named)


sys.modules[__name__].__class__ = _Callable
