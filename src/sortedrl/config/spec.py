"""Specs of tasks and models: `name`, or `name:option=value,option=value`.

    gsm8k
    knights_knaves:people=3-7,count=5000,split=train
    reasoning_gym:name=countdown,count=200
    tiny:hidden=128,layers=3

A pair of numbers is written with a dash, a list of words with plus signs.
A spec is written the same way on a command line and in a TOML file.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sortedrl.config.checks import check_values
from sortedrl.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Settings = TypeVar("_Settings", bound="DataclassInstance")


def parsed(spec: str, *, what: Literal["task", "model"] = "task") -> tuple[str, Mapping[str, str]]:
    """The name and the options of a spec; `what` is what errors call it."""
    name, colon, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = (side.strip() for side in part.partition("="))
        if not equals or not option:
            raise ConfigError(
                f"{what} {spec!r}: an option must be written option=value, got {part!r}"
            )
        _refuse_second(option, options, f"{what} {spec!r}: option")
        options[option] = value
    return name, options


def options_from(words: Sequence[str]) -> dict[str, object]:
    """Options written name=value; values are JSON, and what is no JSON is text."""
    options: dict[str, object] = {}
    for word in words:
        name, equals, text = (side.strip() for side in word.partition("="))
        if not equals or not name:
            raise ConfigError(f"an option must be written name=value, got {word!r}")
        _refuse_second(name, options, "option")
        options[name] = _option_value(name, text)
    return options


def _option_value(name: str, text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if not _is_finite(value):
        raise ConfigError(f"option {name} must be a finite number, got {text!r}")
    return value


def _is_finite(value: object) -> bool:
    """Whether a value of JSON, or text that says one, holds neither NaN nor infinity."""
    if isinstance(value, list):
        return all(map(_is_finite, value))
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, str):
        try:
            return math.isfinite(float(value))
        except ValueError:
            return True
    return not isinstance(value, float) or math.isfinite(value)


def _refuse_second(name: str, given: Mapping[str, object], called: str) -> None:
    if name in given:
        raise ConfigError(f"{called} {name} is given twice; give it once")


def settings_from(
    kind: type[_Settings], options: Mapping[str, str], *, spec: str, **fixed: object
) -> _Settings:
    """Settings of a task with these options; one that does not exist or cannot be is refused."""
    return settings_of(kind, options, called=f"task {spec!r}", fixed=fixed)


def settings_of(
    kind: type[_Settings],
    options: Mapping[str, str],
    *,
    called: str,
    fixed: Mapping[str, object] = MappingProxyType({}),
) -> _Settings:
    """Settings with these options; `called` is what errors name, such as `model 'tiny'`."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name not in fixed]
    given: dict[str, object] = {}
    for option, text in options.items():
        if option not in names:
            raise ConfigError(f"{called}: {unknown_name('option', option, names)}")
        try:
            given[option] = _value(text, hints[option])
        except ValueError as error:
            raise ConfigError(f"{called}: option {option} must be {error}") from error
    settings = kind(**given, **fixed)
    try:
        check_values(settings)
    except ConfigError as error:
        raise ConfigError(f"{called}: {error}") from error
    return settings


def _value(text: str, hint: Any) -> object:  # noqa: ANN401
    """The text as a value of the type; a `ValueError` says what it must be."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return _value(text, next(kind for kind in inner if kind is not type(None)))
    if origin is Literal:
        if text not in inner:
            raise ValueError(f"one of {', '.join(inner)}, got {text!r}")
        return text
    if origin is tuple:
        return _several(text, inner)
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(f"true or false, got {text!r}")
        return text == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError as error:
            raise ValueError(f"a number, got {text!r}") from error
    return Path(text) if hint is Path else text


def _several(text: str, inner: tuple[Any, ...]) -> tuple[object, ...]:
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(_value(part, inner[0]) for part in text.split("+"))
    parts = text.split("-")
    if len(parts) == 1:
        parts *= len(inner)
    if len(parts) != len(inner):
        raise ValueError(f"{len(inner)} values with dashes between, got {text!r}")
    return tuple(_value(part, kind) for part, kind in zip(parts, inner, strict=True))
