"""Where a reward function is found: `module:function`, or `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from sortedrl.errors import ConfigError, unknown_name

Kind = Literal["plain", "async", "batched"]


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The address of a reward function, and the keyword arguments it is always given.

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
    """The source of a function that a worker process can import too."""
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
                f"{name} was typed in, and worker processes cannot import it; put it in a file"
            )
    return RewardSource(f"{place}:{name}", options)


def load(source: RewardSource) -> tuple[Callable[..., Any], Kind]:
    """The function and how it is to be called; a `ConfigError` says why it cannot be used.

    An exception of the module itself comes through as it is.
    """
    module = _module(source)
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
    _check_signature(function, source)
    return function, _kind(function)


def _module(source: RewardSource) -> ModuleType:
    if not source.place.endswith(".py"):
        try:
            return importlib.import_module(source.place)
        except ModuleNotFoundError as error:
            if error.name is None or not (source.place + ".").startswith(error.name + "."):
                raise
            raise ConfigError(
                f"reward {source.function!r}: there is no module {source.place!r}; give "
                "module:function, or path/to/file.py:function"
            ) from error
    path = Path(source.place)
    if not path.is_file():
        raise ConfigError(f"reward {source.function!r}: there is no file {source.place}")
    # A file called like a module that is loaded already must not take its place.
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_reward"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What stands beside the file can be imported from it, as if it were run.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _check_signature(function: Callable[..., object], source: RewardSource) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(None, None, **source.options)
    except TypeError as error:
        raise ConfigError(
            f"reward {source.function!r} must take (prompt, response) and the options "
            f"{sorted(source.options)}, but its signature is {signature}: {error}"
        ) from error


def _kind(function: Callable[..., object]) -> Kind:
    if inspect.iscoroutinefunction(function):
        return "async"
    names = list(inspect.signature(function).parameters)[:2]
    return "batched" if names == ["prompts", "responses"] else "plain"
