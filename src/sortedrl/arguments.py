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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from sortedrl.errors import ConfigError, DataError, unknown_name
from sortedrl.simulate.presets import PRESETS
from sortedrl.simulate.settings import Simulation
from sortedrl.toml_file import read_toml, toml_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SHORT = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
_DOTTED = (tyro.conf.FlagCreatePairsOff,)
_Command = TypeVar("_Command")
_Settings = TypeVar("_Settings")


def parse(
    command: type[_Command],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: _Command | None = None,
    is_dotted: bool = False,
) -> _Command:
    """The command that the flags describe; a mistake ends the program with code 2.

    Where many sections meet, flags are dotted: `--schedule.mode` is `mode` in `[schedule]`.
    """
    _check_choices(command, arguments, is_dotted=is_dotted)
    args, config = list(arguments), _DOTTED if is_dotted else _SHORT
    if default is None:
        return tyro.cli(command, args=args, prog=prog, description=description, config=config)
    return tyro.cli(
        command, args=args, default=default, prog=prog, description=description, config=config
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
    return settings_over(PRESETS[preset](), table, path=path, is_dotted=False)


def settings_over(
    default: _Settings, table: Mapping[str, Any], *, path: Path, is_dotted: bool
) -> _Settings:
    """The settings that the tables of a file make of others; `path` is what errors name."""
    kind = type(default)
    flags = list(_flags(table, kind, path, section="", is_dotted=is_dotted))
    try:
        _check_choices(kind, flags, is_dotted=is_dotted)
    except ConfigError as error:
        raise DataError(path, str(error)) from error
    config = () if is_dotted else (tyro.conf.OmitArgPrefixes,)
    try:
        return tyro.cli(kind, args=flags, default=default, prog=str(path), config=config)
    except SystemExit:
        print(f"The mistake is in {path}.", file=sys.stderr)
        raise


def to_toml(simulation: Simulation) -> str:
    """The settings as a TOML file that `settings_from` reads back as the same settings."""
    lines = ['preset = "paper"', *_lines(asdict(simulation), asdict(PRESETS["paper"]()))]
    return "\n".join(lines) + "\n"


def all_to_toml(settings: DataclassInstance, default: DataclassInstance) -> str:
    """Every setting as a TOML file, also those that are as by default."""
    return "\n".join(_lines(asdict(settings), asdict(default), everything=True)) + "\n"


def _flags(
    table: Mapping[str, Any], settings: type, path: Path, *, section: str, is_dotted: bool
) -> Iterator[str]:
    hints = get_type_hints(settings)
    for key, value in table.items():
        if key not in hints:
            known = [section + name for name in hints]
            raise DataError(path, unknown_name("key", section + key, known))
        if is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise DataError(path, f"[{section}{key}] must be a section, got {value!r}")
            inner = f"{section}{key}."
            yield from _flags(value, hints[key], path, section=inner, is_dotted=is_dotted)
            continue
        prefix = section if is_dotted else ""
        flag = f"--{prefix}{key}".replace("_", "-")
        if isinstance(value, bool) and hints[key] is bool:
            yield flag if value else f"--{prefix}no-{key}".replace("_", "-")
        elif isinstance(value, list):
            yield flag
            yield from (str(part) for part in _flat(value))
        else:
            yield f"{flag}={value}"


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else (value,)


def _lines(
    settings: Mapping[str, Any],
    default: Mapping[str, Any],
    *,
    section: str = "",
    everything: bool = False,
) -> Iterator[str]:
    for name, value in settings.items():
        is_told = value != default[name] or (everything and value is not None)
        if not isinstance(value, Mapping) and is_told:
            # the parser reads the word None as no value
            yield f"{name} = {toml_value('None' if value is None else value)}"
    for name, value in settings.items():
        if isinstance(value, Mapping) and (everything or value != default[name]):
            yield ""
            yield f"[{section}{name}]"
            yield from _lines(
                value, default[name], section=f"{section}{name}.", everything=everything
            )


def _check_choices(settings: type, arguments: Sequence[str], *, is_dotted: bool) -> None:
    """Refuse a misspelt choice with the nearest valid one, which the parser does not offer."""
    choices = dict(_choices(settings, section="", is_dotted=is_dotted))
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


def _choices(
    settings: type, *, section: str, is_dotted: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, hint in get_type_hints(settings).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            # A command's settings stand at its top: their fields have no name before them.
            inner = section if name == "settings" else f"{section}{name}."
            yield from _choices(hint, section=inner, is_dotted=is_dotted)
            continue
        kinds = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        if kinds:
            known = get_args(kinds[0])
            is_optional = type(None) in get_args(hint)
            flag = "--" + ((section if is_dotted else "") + name).replace("_", "-")
            yield flag, (*known, "None") if is_optional else known
