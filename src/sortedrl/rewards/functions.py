"""The address of a reward function: `module:function`, `path/to/file.py:function`, or an object.

A function that exists only in this process, such as a lambda or a closure in a notebook, is sent to
our own worker processes with cloudpickle; it is never written to a file, and never read from one.

A function `lowest_NAME` next to the function `NAME` may return the lowest reward that it gives,
from its options: an answer that could not be scored gets no more than that.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    """A reward function, with how it is called and its lowest reward."""

    function: Callable[..., Any]
    style: CallStyle
    lowest: float | None
    """The lowest reward it gives with its options; `None` if unknown."""


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The address of a reward function, and its keyword arguments.

    Worker processes import it from there. Without a name after the colon the function is called
    `reward`. A function that exists only in this process is `packed`, and `function` is its label.
    """

    function: str
    options: Mapping[str, object] = field(default_factory=dict)
    packed: bytes | None = field(default=None, repr=False)

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


OBJECT = "python:"
"""The prefix of the label of a reward that is an object of one process."""


def source_of_object(
    reward: Callable[..., object] | Sequence[Callable[..., object]],
) -> RewardSource:
    """The source of any callable, or of several whose rewards are added up.

    One that worker processes can import is named by its address, so that another process can
    resume the run.
    """
    if isinstance(reward, Sequence):
        parts = _named(reward)
        return RewardSource(f"{OBJECT}{'+'.join(parts)}", packed=_packed(_together(parts)))
    _refuse_no_reward(reward)
    try:
        source = source_of(reward)
    except (ConfigError, AttributeError, TypeError):
        source = None
    # A script is not imported a second time: it would start another run.
    is_script = source is not None and source.place.endswith(".py")
    if source is not None and not is_script and _is_importable(reward, source):
        return source
    return RewardSource(f"{OBJECT}{name_of(reward)}", packed=_packed(reward))


def name_of(reward: Callable[..., object]) -> str:
    """The name of a callable in logs."""
    if isinstance(reward, partial):
        return name_of(reward.func)
    if inspect.isroutine(reward) or isinstance(reward, type):
        return reward.__name__.strip("<>")
    return type(reward).__name__


def _refuse_no_reward(reward: object) -> None:
    if not callable(reward):
        raise ConfigError(
            "a reward must be a function of (prompt, response), a list of such functions, or "
            f"text such as 'my_file.py:my_function', got {reward!r:.80}"
        )


def _is_importable(reward: Callable[..., object], source: RewardSource) -> bool:
    module = sys.modules.get(source.place)
    return module is not None and vars(module).get(source.name) is reward


def _packed(reward: object) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a reward that is a Python object needs cloudpickle, not installed; "
            "pip install 'sortedrl[native]', or put the function in a file: my_file.py:my_function"
        ) from error
    try:
        packed: bytes = cloudpickle.dumps(reward)
    except Exception as error:
        raise ConfigError(
            f"the reward cannot be sent to worker processes ({error}): it must not hold open "
            "files, locks, connections or models; make these inside the function"
        ) from error
    return packed


def _together(parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Several rewards as one: each is a part under its own name, and the reward is their sum."""
    styles = {name: _style(function) for name, function in parts.items()}

    def rewards(prompt: object, response: str) -> dict[str, Any]:
        return {
            name: _one_reward(_called(function, styles[name], prompt, response))
            for name, function in parts.items()
        }

    async def awaited(prompt: object, response: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, function in parts.items():
            given = _called(function, styles[name], prompt, response)
            found[name] = _one_reward(await given if styles[name].is_async else given)
        return found

    return awaited if any(style.is_async for style in styles.values()) else rewards


def _called(function: Callable[..., Any], style: CallStyle, prompt: object, response: str) -> Any:  # noqa: ANN401  the result of the user's function
    return function([prompt], [response]) if style.is_batched else function(prompt, response)


def _one_reward(given: Any) -> Any:  # noqa: ANN401
    """The reward of one answer, not yet validated: from named parts, or a list of one."""
    if isinstance(given, list | tuple) and len(given) == 1:
        return _one_reward(given[0])
    if isinstance(given, Mapping):
        if "reward" in given:
            return _one_reward(given["reward"])
        return sum(map(_one_reward, given.values()))
    return given


def _named(rewards: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The rewards under their own names, numbered where two have the same."""
    parts: dict[str, Callable[..., Any]] = {}
    for number, reward in enumerate(rewards, start=1):
        _refuse_no_reward(reward)
        name = name_of(reward)
        while name in parts or name == "reward":  # a part of that name would be the whole reward
            name = f"{name}_{number}"
        parts[name] = reward
    if not parts:
        raise ConfigError("a list of rewards must hold at least one function, got none")
    return parts


def _unpacked(source: RewardSource) -> LoadedReward:
    assert source.packed is not None
    # Packed by our own process; data from outside never gets here.
    import cloudpickle

    function = cloudpickle.loads(source.packed)
    _bound_options(function, source)
    return LoadedReward(function=function, style=_style(function), lowest=None)


def load(source: RewardSource) -> LoadedReward:
    """The function and how it is called; raises `ConfigError` if it cannot be used.

    An exception raised by the module itself is passed on unchanged.
    """
    if source.packed is not None:
        return _unpacked(source)
    module = load_module(source.place, called=f"reward {source.function!r}", suffix="reward")
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


def load_module(place: str, *, called: str, suffix: str) -> ModuleType:
    """The module of that name, or in that file; `called` names it in errors.

    A file with the name of a loaded module is loaded as NAME_SUFFIX, so that it does not replace
    that module.
    """
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place + ".").startswith(error.name + "."):
                raise
            raise ConfigError(
                f"{called}: there is no module {place!r}; give module:function, or "
                "path/to/file.py:function"
            ) from error
    path = Path(place)
    if not path.is_file():
        raise ConfigError(f"{called}: there is no file {place}")
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_{suffix}"
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
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ConfigError(
            f"reward {source.function!r} has no signature that can be inspected ({error}); wrap it "
            "in a function of (prompt, response)"
        ) from error
    options = f" and the options {sorted(source.options)}" if source.options else ""
    try:
        bound = signature.bind(None, None, **source.options)
    except TypeError as error:
        raise ConfigError(
            f"reward {source.function!r} must take (prompt, response){options}, but its signature "
            f"is {signature}: {error}"
        ) from error
    names = list(bound.signature.parameters)[:2]
    if names in (["response", "prompt"], ["responses", "prompts"]):
        raise ConfigError(
            f"reward {source.function!r} must take the prompt first and the response second, but "
            f"its signature is {signature}; swap them"
        )
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[2:])


def _style(function: Callable[..., object]) -> CallStyle:
    names = list(inspect.signature(function).parameters)[:2]
    # A callable object is async if its __call__ is.
    is_async = inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
    )
    return CallStyle(is_async=is_async, is_batched=names == ["prompts", "responses"])
