"""From presets, TOML files and flags to settings, through one parser.

A TOML file has the keys of the settings, by section, and may name a preset to start from:

    preset = "paper"
    seed = 1
    [schedule]
    mode = "coupled"

Its values are turned into flags, so a file and a flag mean the same and fail alike.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from sortedrl.errors import ConfigError, DataError, unknown_name
from sortedrl.simulate.presets import PRESETS
from sortedrl.simulate.settings import Simulation

_CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
_Command = TypeVar("_Command")


def parse(
    command: type[_Command],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: _Command | None = None,
) -> _Command:
    """The command that the flags describe; a mistake ends the program with code 2."""
    _check_choices(command, arguments)
    args = list(arguments)
    if default is None:
        return tyro.cli(command, args=args, prog=prog, description=description, config=_CONFIG)
    return tyro.cli(
        command, args=args, default=default, prog=prog, description=description, config=_CONFIG
    )


def parse_over_settings(
    command: Callable[[Simulation], _Command],
    arguments: Sequence[str],
    *,
    name: str,
    description: str,
) -> _Command:
    """The command that the flags make of the settings the first word stands for.

    `command` makes its default from settings; without a first word these are the preset `paper`.
    """
    has_source = bool(arguments) and not arguments[0].startswith("-")
    default = command(settings_from(arguments[0] if has_source else "paper"))
    return parse(
        type(default),
        arguments[1:] if has_source else arguments,
        prog=f"sortedrl {name} [PRESET|TOML]",
        description=description,
        default=default,
    )


def settings_from(source: str) -> Simulation:
    """The settings a preset's name or the path of a TOML file stands for."""
    if source in PRESETS:
        return PRESETS[source]()
    path = Path(source)
    if path.suffix != ".toml":
        raise ConfigError(
            unknown_name("preset", source, PRESETS) + "; or give the path of a .toml file"
        )
    table = read_toml(path)
    preset = table.pop("preset", "paper")
    if preset not in PRESETS:
        raise DataError(path, unknown_name("preset", str(preset), PRESETS))
    flags = list(_flags(table, Simulation, path, section=""))
    try:
        _check_choices(Simulation, flags)
    except ConfigError as error:
        raise DataError(path, str(error)) from error
    try:
        return tyro.cli(
            Simulation,
            args=flags,
            default=PRESETS[preset](),
            prog=str(path),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except SystemExit:
        print(f"The mistake is in {path}.", file=sys.stderr)
        raise


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"not TOML: {error}") from error


def to_toml(simulation: Simulation) -> str:
    """The settings as a TOML file that `settings_from` reads back as the same settings."""
    lines = ['preset = "paper"', *_lines(asdict(simulation), asdict(PRESETS["paper"]()))]
    return "\n".join(lines) + "\n"


def _flags(table: Mapping[str, Any], settings: type, path: Path, *, section: str) -> Iterator[str]:
    hints = get_type_hints(settings)
    for key, value in table.items():
        if key not in hints:
            known = [section + name for name in hints]
            raise DataError(path, unknown_name("key", section + key, known))
        if is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise DataError(path, f"[{section}{key}] must be a section, got {value!r}")
            yield from _flags(value, hints[key], path, section=f"{section}{key}.")
            continue
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif isinstance(value, list):
            yield flag
            yield from (str(part) for part in _flat(value))
        else:
            yield f"{flag}={value}"


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else (value,)


def _lines(settings: Mapping[str, Any], default: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if not isinstance(value, Mapping) and value is not None and value != default[name]:
            yield f"{name} = {_toml_value(value)}"
    for name, value in settings.items():
        if isinstance(value, Mapping) and value != default[name]:
            yield ""
            yield f"[{name}]"
            yield from _lines(value, default[name])


def _toml_value(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(part) for part in value) + "]"
    if isinstance(value, str | Path):
        text = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    return repr(value)


def _check_choices(settings: type, arguments: Sequence[str]) -> None:
    """Refuse a misspelt choice with the nearest valid one, which the parser does not offer."""
    choices = dict(_choices(settings))
    flag = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            flag = name.replace("_", "-")
            values = [value] if equals else []
        else:
            values = [argument]
        for given in values:
            if flag in choices and given not in choices[flag]:
                raise ConfigError(unknown_name(flag.strip("-"), given, choices[flag]))


def _choices(settings: type) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, hint in get_type_hints(settings).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _choices(hint)
            continue
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        if get_origin(inner) is Literal:
            yield "--" + name.replace("_", "-"), get_args(inner)
