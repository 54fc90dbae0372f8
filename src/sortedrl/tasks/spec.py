"""A task in one word: `name`, or `name:option=value,option=value`.

    gsm8k
    knights_knaves:people=3-7,count=5000,split=train
    reasoning_gym:name=countdown,count=200

A pair of numbers is written with a dash, a list of words with plus signs.
The same words stand on a command line and in a TOML file.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sortedrl.errors import ConfigError, unknown_name

_Settings = TypeVar("_Settings")


def parsed(spec: str) -> tuple[str, Mapping[str, str]]:
    """The name and the options of a spec."""
    name, colon, rest = spec.partition(":")
    options = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = part.partition("=")
        if not equals or not option:
            raise ConfigError(
                f"task {spec!r}: an option must be written option=value, got {part!r}"
            )
        if option.strip() in options:
            raise ConfigError(f"task {spec!r}: the option {option.strip()} must be given once")
        options[option.strip()] = value.strip()
    return name, options


def options_from(words: Sequence[str]) -> dict[str, object]:
    """Options written name=value; values are JSON, and what is no JSON is text."""
    options: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"an option must be written name=value, got {word!r}")
        try:
            options[name.strip()] = json.loads(text)
        except json.JSONDecodeError:
            options[name.strip()] = text.strip()
    return options


def settings_from(
    kind: type[_Settings], options: Mapping[str, str], *, spec: str, **fixed: object
) -> _Settings:
    """Settings with these options; one that does not exist or has no such value is refused."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name not in fixed]  # type: ignore[arg-type]
    given: dict[str, object] = {}
    for option, text in options.items():
        if option not in names:
            raise ConfigError(f"task {spec!r}: {unknown_name('option', option, names)}")
        try:
            given[option] = _value(text, hints[option])
        except ValueError as error:
            raise ConfigError(f"task {spec!r}: option {option} must be {error}") from error
    return kind(**given, **fixed)


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
