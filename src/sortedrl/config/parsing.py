"""Parses text into settings: TOML files, and specs of tasks and models.

A file has the keys of the settings, by section. An error is reported in one sentence. Settings
written by `settings_to_toml` and read by `settings_over` are equal.

A spec is `name`, or `name:option=value,option=value`, on the command line or in a TOML file:

    gsm8k
    knights_knaves:people=3-7,count=5000,split=train
    reasoning_gym:name=countdown,count=200
    tiny:hidden=128,layers=3

A range of numbers is written with a dash, a list of words with plus signs.
"""

from __future__ import annotations

import json
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from sortedrl.config.checks import check_text, check_values
from sortedrl.errors import ConfigError, DataError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_Settings = TypeVar("_Settings", bound="DataclassInstance")
NO_VALUE = "None"
RENAMED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "layout": "[cluster] with rollout_workers, trainer_ranks, gpus_per_worker and kind",
        "layout.devices": "cluster.trainer_ranks, on as many GPUs, with cluster.kind colocated",
        "layout.tensor_parallel": "cluster.tensor_parallel",
        "layout.offload": 'optimiser.state = "offload"',
        "cluster.offload": 'optimiser.state = "offload"',
        "cluster.hand_over": "cluster.weight_sync",
        "cluster.patience_seconds": "cluster.worker_timeout_seconds",
        "cluster.most_rollout_workers": "cluster.max_rollout_workers",
        "rollout.hand_over": "rollout.weight_sync_folder",
        "costs.hand_over_seconds": "costs.weight_sync_seconds",
        "algorithm.drop_equal": "algorithm.filter_zero_variance",
        "algorithm.entropy": "algorithm.entropy_coef",
        "algorithm.kl": "algorithm.kl_coef",
        "correction.least": "correction.min_ratio",
        "correction.most": "correction.max_ratio",
        "optimiser.final_share": "optimiser.min_lr_ratio",
        "optimiser.max_norm": "optimiser.max_grad_norm",
        "optimiser.steps": "optimiser.mini_batches",
        "passes.tokens": "passes.micro_batch_tokens",
    }
)
"""Keys and sections of older versions, and their present names.

A file or a flag with an old name is refused with an error that names the new one. Without a single
new key, the text says what to set instead. Saved settings of older runs are still read.
"""
RENAMED_VALUES: Mapping[str, Mapping[object, object]] = MappingProxyType(
    {"cluster.weight_sync": {"group": "broadcast"}}
)
"""Values of older versions in saved runs, by their new keys."""
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text in quotes",
    Path: "a path in quotes",
}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror}); check the path") from error
    # A number of thousands of digits raises a plain ValueError, and so does a NUL in the path.
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"not TOML: {error}") from error


def toml_text(tables: Mapping[str, Any]) -> str:
    """Format tables as TOML; a path becomes text, and `None` is left out.

    >>> print(toml_text({"out": Path("runs/a"), "limit": None, "a b": {"c.d": 1e-8}}), end="")
    out = "runs/a"
    <BLANKLINE>
    ["a b"]
    "c.d" = 1e-08
    """
    return tomli_w.dumps(_plain(tables))


def toml_value(value: object) -> str:
    """Format a value on one line of TOML.

    >>> toml_value(True), toml_value("a"), toml_value([1, 2.5]), toml_value({"a b": 1e-8})
    ('true', '"a"', '[1, 2.5]', '{"a b" = 1e-08}')
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(part) for part in value)}]"
    if isinstance(value, Mapping):
        names = {name: tomli_w.dumps({str(name): 0}).removesuffix(" = 0\n") for name in value}
        parts = (f"{names[name]} = {toml_value(part)}" for name, part in value.items())
        return f"{{{', '.join(parts)}}}"
    return tomli_w.dumps({"x": _plain(value)}).removeprefix("x = ").removesuffix("\n")


def _plain(value: Any) -> Any:  # noqa: ANN401  what TOML has a notation for
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def settings_over(
    default: _Settings,
    table: Mapping[str, Any],
    *,
    path: Path,
    section: str = "",
    takes_old_keys: bool = False,
) -> _Settings:
    """Apply the tables of a file to default settings; `path` is used in errors.

    `section` is the location of the table in the file, such as `cluster.`. Renamed keys are
    refused, unless `takes_old_keys`.
    """
    try:
        table = under_new_keys(table) if takes_old_keys else table
        return settings_with(default, table, section=section)
    except ConfigError as error:
        raise DataError(path, str(error)) from error


def settings_with(default: _Settings, table: Mapping[str, Any], *, section: str = "") -> _Settings:
    """Apply tables to default settings, checked like a file."""
    settings = replaced(default, _values(type(default), table, section=section))
    check_values(settings)
    return settings


def settings_to_toml(settings: DataclassInstance, default: DataclassInstance) -> str:
    """All settings as TOML, defaults included."""
    return toml_text(changed_values(asdict(settings), asdict(default), everything=True))


def replaced(settings: _Settings, values: Mapping[str, Any]) -> _Settings:
    """Replace values, nested by section."""
    changes = {
        name: replaced(getattr(settings, name), value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return replace(settings, **changes)


def flat(tables: Mapping[str, Any], *, section: str = "") -> dict[str, Any]:
    """The values of nested tables by their dotted names.

    >>> flat({"seed": 1, "engine": {"slots": 8}})
    {'seed': 1, 'engine.slots': 8}
    """
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, section=f"{section}{name}.")
        else:
            found[section + name] = value
    return found


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """The tables of values by their dotted names, with one section at most.

    >>> nested({"seed": 1, "engine.slots": 8})
    {'seed': 1, 'engine': {'slots': 8}}
    """
    tables: dict[str, Any] = {}
    for setting, value in values.items():
        section, _, name = setting.rpartition(".")
        (tables.setdefault(section, {}) if section else tables)[name] = value
    return tables


def under_new_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings with renamed keys replaced by their present names."""
    tables = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()
    }
    for old, new in RENAMED_KEYS.items():
        section, _, key = old.partition(".")
        place = tables.get(section)
        if not key:
            # A section without a successor was never used with other than its defaults.
            tables.pop(section, None)
            continue
        if not isinstance(place, dict) or key not in place:
            continue
        new_section, _, new_key = new.partition(".")
        target = tables.setdefault(new_section, {})
        if not isinstance(target, dict) or new_key in target:
            raise ConfigError(f"{old} is now {new}, got both; remove {old}")
        value = place.pop(key)
        target[new_key] = RENAMED_VALUES.get(new, {}).get(value, value)
    return tables


def refuse_renamed(key: str) -> None:
    """Refuse a key of an older version, or one in an old section, and name the new one."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        old = ".".join(parts[:count])
        if old in RENAMED_KEYS:
            raise ConfigError(f"{old} is now {RENAMED_KEYS[old]}; change it")


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _values(kind: type, table: Mapping[str, Any], *, section: str) -> dict[str, Any]:
    """The values of a file's tables, checked, by field."""
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            refuse_renamed(section + key)
            raise ConfigError(unknown_name("key", section + key, [section + n for n in hints]))
        if not is_dataclass(hints[key]):
            values[key] = _typed(value, hints[key], section + key)
        elif isinstance(value, Mapping):
            values[key] = _values(hints[key], value, section=f"{section}{key}.")
        else:
            raise ConfigError(f"[{section}{key}] must be a section, got {value!r}")
    return values


def _typed(value: Any, hint: Any, called: str) -> object:  # noqa: ANN401  as TOML and typing give them
    """Convert a TOML value to the type of its field."""
    kind, is_optional = field_type(hint)
    if is_optional and value == NO_VALUE:
        return None
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(unknown_name(called, str(value), get_args(kind)))
        return value
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if isinstance(value, list) and (parts[-1] is Ellipsis or len(value) == len(parts)):
            kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
            return tuple(_typed(v, k, called) for v, k in zip(value, kinds, strict=True))
        count = "a list" if parts[-1] is Ellipsis else f"a list of {len(parts)} values"
        raise ConfigError(f"{called} must be {count}, got {value!r}")
    accepted = {float: (int, float), Path: (str,)}.get(kind, (kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{called} must be {TYPE_NAMES[kind]}, got {value!r}")
    if kind is Path:
        check_text(value, called)
        refuse_empty_path(value, called)
    try:
        return kind(value)
    except OverflowError as error:
        raise ConfigError(f"{called} is too large a number") from error


def field_type(hint: Any) -> tuple[Any, bool]:  # noqa: ANN401
    """The type of a field without `None`, and whether `None` is allowed."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    assert len(kinds) == 1, f"a setting has one type, got {hint}"
    return kinds[0], True


def changed_values(
    settings: Mapping[str, Any], default: Mapping[str, Any], *, everything: bool = False
) -> dict[str, Any]:
    """The values that differ from the default; with `everything`, all that are not `None` too."""
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            if everything or value != default[name]:
                changed[name] = changed_values(value, default[name], everything=everything)
        elif value != default[name] or (everything and value is not None):
            # the word None is read as no value
            changed[name] = NO_VALUE if value is None else value
    return changed


def refuse_empty_path(text: str, called: str) -> None:
    """Refuse an empty path, which would mean the current folder."""
    if not text.strip():
        raise ConfigError(f"{called} must be a path, got {text!r}; . is the current folder")


def parsed(spec: str, *, what: Literal["task", "model"] = "task") -> tuple[str, Mapping[str, str]]:
    """Split a spec into name and options; `what` is used in errors."""
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
    """Parse options written name=value; values are JSON, or else text."""
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
    """Whether a JSON value, or a text that spells a number, contains no NaN or infinity."""
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
    """Build the settings of a task from options; unknown or invalid ones are refused."""
    return settings_of(kind, options, called=f"task {spec!r}", fixed=fixed)


def settings_of(
    kind: type[_Settings],
    options: Mapping[str, str],
    *,
    called: str,
    fixed: Mapping[str, object] = MappingProxyType({}),
) -> _Settings:
    """Build settings from options; `called` is used in errors, such as `model 'tiny'`."""
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
    """Convert the text to the type; a `ValueError` says what it must be."""
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
        raise ValueError(f"{len(inner)} values separated by dashes, got {text!r}")
    return tuple(_value(part, kind) for part, kind in zip(parts, inner, strict=True))
