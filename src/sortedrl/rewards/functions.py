"""Loading of reward functions: `module:function`, or `path/to/file.py:function`.

A function `lowest_NAME` next to the function `NAME` may return the lowest reward that it gives,
from its options: an answer that could not be scored gets no more than that.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from sortedrl.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """How a reward function is called."""

    is_async: bool = False
    """It is a coroutine function: one worker runs many calls concurrently."""
    is_batched: bool = False
    """Its parameters are called `prompts` and `responses`: it takes lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedReward:
    """A reward function, and what is known about it."""

    function: Callable[..., Any]
    style: CallStyle
    lowest: float | None
    """The lowest reward it gives with its options; `None` if unknown."""


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The address of a reward function, and its keyword arguments.

    An address and plain values, never the function itself: worker processes import it.
    Without a name after the colon the function is called `reward`.
    """

    function: str
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The module or file."""
        return self._parts[0]

    @property
    def name(self) -> str:
        """The function's name there."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str]:
        if self.function.endswith(".py"):
            return self.function, "reward"
        place, colon, name = self.function.rpartition(":")
        return (place, name) if colon else (name, "reward")


def source_of(function: Callable[..., object], **options: object) -> RewardSource:
    """The source of a function that worker processes can import."""
    place, name = function.__module__, function.__qualname__
    if "<" in name or "." in name:
        raise ConfigError(
            f"a reward must be a function at the top of a module, where worker processes can "
            f"import it, got {name}; move it there"
        )
    if place == "__main__":
        place = str(inspect.getsourcefile(function) or "")
        if not place.endswith(".py"):
            raise ConfigError(
                f"worker processes cannot import {name}, which was defined interactively; put it "
                "in a file"
            )
    return RewardSource(f"{place}:{name}", options)


def load(source: RewardSource) -> LoadedReward:
    """The function and how it is called; raises `ConfigError` if it cannot be used.

    An exception raised by the module itself is passed on unchanged.
    """
    module = imported(source.place, f"reward {source.function!r}")
    functions = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("__")
    }
    if source.name not in functions:
        raise ConfigError(
            f"reward {source.function!r}: "
            + unknown_name("function", source.name, functions)
            + f" (in {source.place})"
        )
    function = functions[source.name]
    bound = _bound_options(function, source)
    lowest = functions.get(f"lowest_{source.name}")
    return LoadedReward(
        function=function,
        style=_style(function),
        lowest=None if lowest is None else float(lowest(bound)),
    )


def imported(place: str, what: str) -> ModuleType:
    """The module of that name, or in that file; `what` names it in errors."""
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place + ".").startswith(error.name + "."):
                raise
            raise ConfigError(
                f"{what}: there is no module {place!r}; give module:name, or path/to/file.py:name"
            ) from error
    path = Path(place)
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {place}")
    # A file with the name of a loaded module must not replace it.
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_reward"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Modules next to the file can be imported from it, as if it were a script.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _bound_options(function: Callable[..., object], source: RewardSource) -> dict[str, object]:
    """The given options, and the defaults of the others."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind(None, None, **source.options)
    except TypeError as error:
        raise ConfigError(
            f"reward {source.function!r} must take (prompt, response) and the options "
            f"{sorted(source.options)}, but its signature is {signature}: {error}"
        ) from error
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[2:])


def _style(function: Callable[..., object]) -> CallStyle:
    names = list(inspect.signature(function).parameters)[:2]
    # An object that is called like a function is async if its class says so.
    is_async = inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
    )
    return CallStyle(is_async=is_async, is_batched=names == ["prompts", "responses"])
