"""Builds settings from presets, TOML files and flags.

A TOML file has the keys of the settings, by section, and may name a preset to start from:

    preset = "paper"
    seed = 1
    [schedule]
    mode = "coupled"

The fields of the settings define all keys and flags: a file and a command line are both checked
against them, and an error in either is reported in one sentence. tyro prints the help.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from sortedrl.config.checks import check_text, check_values
from sortedrl.config.parsing import (
    NO_VALUE,
    RENAMED_KEYS,
    TYPE_NAMES,
    field_type,
    flat,
    refuse_empty_path,
    refuse_renamed,
    replaced,
)
from sortedrl.config.sizes import Chosen, with_siblings
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.simulate.settings import PRESETS, Simulation, simulation_from

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SHORT = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
_DOTTED = (tyro.conf.FlagCreatePairsOff,)
_Command = TypeVar("_Command", bound="DataclassInstance")
_Settings = TypeVar("_Settings", bound="DataclassInstance")
_POSITIONAL = get_args(tyro.conf.Positional[str])[1]
_MANY = -1
_HELP = ("-h", "--help")
_FILES = (".toml", ".jsonl", ".parquet")
"""How sources of settings end."""


def parse(
    command: type[_Command],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: _Command | None = None,
    is_dotted: bool = False,
) -> _Command:
    """Parse flags into the command; `ConfigError` says what is wrong with them.

    With `is_dotted`, a flag carries its section: `--schedule.mode` is `mode` in `[schedule]`.
    Flags and positional arguments may come in any order.
    """
    if _asks_for_help(arguments):
        return tyro.cli(
            command,
            args=list(arguments),
            # MISSING would make every field required.
            default=tyro.MISSING_NONPROP if default is None else default,
            prog=prog,
            description=description,
            config=_DOTTED if is_dotted else _SHORT,
        )
    options = _options(command, is_dotted=is_dotted)
    values = _CommandLine.read(arguments, options).values(
        has_default=default is not None, prog=prog
    )
    given = _made(command, values) if default is None else replaced(default, values)
    check_values(given)
    return given


def parse_over_train_settings(
    command: type[_Command],
    flags: Sequence[str],
    *,
    default: _Command,
    chosen: Chosen,
    prog: str,
    aliases: Mapping[str, str],
) -> tuple[_Command, Chosen]:
    """Parse flags over settings; gives the command and the names of all settings chosen so far.

    `chosen` names those that a file or a run set already; `aliases` are short names of flags.
    Algorithms that compare siblings also get the schedule they need.
    """
    options = _options(command, is_dotted=True)
    line = _CommandLine.read(flags, options, aliases=aliases)
    values = line.values(has_default=True, prog=prog)
    settings = values.get("settings", {})
    chosen |= frozenset(flat(settings))
    values["settings"] = with_siblings(settings, chosen=chosen)
    given = replaced(default, values)
    check_values(given)
    return given, chosen


def parse_over_settings(
    command: Callable[[Simulation], _Command],
    arguments: Sequence[str],
    *,
    name: str,
    description: str,
) -> _Command:
    """Parse a command line whose positional argument names the settings to start from.

    `command` builds the default from settings; without the argument they are the preset `paper`.
    """
    source, rest = source_and_flags(type(command(PRESETS["paper"]())), arguments)
    default = command(simulation_from("paper" if source is None else source))
    return parse(
        type(default),
        rest,
        prog=f"sortedrl {name} [PRESET|TOML]",
        description=description,
        default=default,
    )


def flag_help(command: type, flag: str) -> str:
    """The help of a flag: the string under its field on one line, and the default."""
    options = _options(command, is_dotted=True)
    option, _ = _option_of(flag, options)
    kind: Any = command
    for section in option.path[:-1]:
        hint = get_type_hints(kind, include_extras=True)[section]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    text = " ".join(field_text(kind, option.path[-1]).split())
    default = next(field.default for field in fields(kind) if field.name == option.path[-1])
    is_shown = default is not None and default is not MISSING and option.takes != 0
    return f"{text} (default: {default})" if is_shown and default != () else text


@cache
def field_text(kind: type, name: str) -> str:
    """The string under a field of a dataclass."""
    (tree,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for before, after in pairwise(tree.body):
        if isinstance(before, ast.AnnAssign) and ast.unparse(before.target) == name:
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            return str(after.value.value)
    raise AssertionError(f"{kind.__name__} has no field {name}")


def source_and_flags(
    command: type[DataclassInstance],
    arguments: Sequence[str],
    *,
    is_dotted: bool = False,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str | None, list[str]]:
    """The one positional argument that is not the command's own, and the rest of the command line.

    It names the source of the settings: a preset, a file or a run.
    """
    if _asks_for_help(arguments):
        return None, [word for word in arguments if word.startswith("-")]
    options = _options(command, is_dotted=is_dotted)
    line = _CommandLine.read(arguments, options, aliases=aliases)
    own = sum(option.is_positional for option in options.values())
    words, more = line.words[:own], line.words[own:]
    if len(more) > 1:
        raise ConfigError(f"give one preset, file or run, got {', '.join(map(repr, more))}")
    if more and not more[0].strip():
        raise ConfigError("the preset, file or run must not be empty")
    return more[0] if more else None, [*words, *line.flags]


def _made(command: type[_Command], values: Mapping[str, Any]) -> _Command:
    """Build a command from values by field, nested for its sections."""
    made: dict[str, Any] = {}
    for field in fields(command):
        value = values.get(field.name, MISSING)
        if isinstance(value, dict):
            assert field.default_factory is not MISSING, "a section has a default"
            made[field.name] = replaced(field.default_factory(), value)
        elif value is not MISSING:
            made[field.name] = value
    return command(**made)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A field of a command or of one of its sections, as a command-line option."""

    flag: str
    path: tuple[str, ...]
    """Names of the enclosing sections, then that of the field."""
    hint: Any
    is_positional: bool = False
    is_needed: bool = False

    @property
    def takes(self) -> int:
        """How many values follow the flag; `_MANY` for any number."""
        kind, _ = field_type(self.hint)
        if self.hint is bool:
            return 0
        if get_origin(kind) is not tuple:
            return 1
        return _MANY if get_args(kind)[-1] is Ellipsis else len(get_args(kind))

    @property
    def called(self) -> str:
        """The name used in errors: the flag, or the name of the positional argument."""
        return self.flag.removeprefix("--").upper() if self.is_positional else self.flag

    def ends_before(self, word: str) -> bool:
        """Whether a word after values, of any number, is the source of the settings instead."""
        kind, _ = field_type(self.hint)
        first = get_args(kind)[0]
        if get_origin(first) is Literal or first in (int, float):
            return word in PRESETS or "/" in word or word.endswith(_FILES)
        return word.endswith(".toml")

    def value(self, words: Sequence[str]) -> object:
        kind, is_optional = field_type(self.hint)
        if is_optional and list(words) == [NO_VALUE]:
            return None
        if self.takes not in (_MANY, len(words)):
            raise ConfigError(f"{self.called} needs {_count(self.takes)}, got {_count(len(words))}")
        if get_origin(kind) is not tuple:
            return _from_word(words[0], kind, self.called)
        first, *more = get_args(kind)
        if more != [Ellipsis]:
            pairs = zip(words, (first, *more), strict=True)
            return tuple(_from_word(word, kind, self.called) for word, kind in pairs)
        if get_origin(first) is not tuple:
            return tuple(_from_word(word, first, self.called) for word in words)
        inner = get_args(first)
        if len(words) % len(inner):
            raise ConfigError(f"{self.called} needs {len(inner)} values each, got {len(words)}")
        flat = [_from_word(w, inner[n % len(inner)], self.called) for n, w in enumerate(words)]
        return tuple(tuple(flat[n : n + len(inner)]) for n in range(0, len(flat), len(inner)))


def _from_word(word: str, kind: Any, called: str) -> object:  # noqa: ANN401
    check_text(word, called)
    if get_origin(kind) is Literal:
        if word not in get_args(kind):
            raise ConfigError(unknown_name(called.strip("-"), word, get_args(kind)))
        return word
    if kind is bool:
        if word not in ("True", "False"):
            raise ConfigError(f"{called} must be True or False, got {word!r}")
        return word == "True"
    if kind is Path:
        refuse_empty_path(word, called)
    try:
        return kind(word)
    except ValueError as error:
        raise ConfigError(f"{called} must be {TYPE_NAMES[kind]}, got {word!r}") from error


@cache
def _options(
    command: type, *, is_dotted: bool, path: tuple[str, ...] = (), section: str = ""
) -> Mapping[str, _Option]:
    """Every option of a command, by its flag."""
    options: dict[str, _Option] = {}
    hints = get_type_hints(command)
    marked = get_type_hints(command, include_extras=True)
    for field in fields(command):
        hint = hints[field.name]
        is_marked = get_origin(marked[field.name]) is Annotated
        marks = get_args(marked[field.name])[1:] if is_marked else ()
        if is_dataclass(hint):
            assert isinstance(hint, type)
            # A command's settings are its top level: their fields have no section before them.
            inner = section if field.name == "settings" else f"{section}{field.name}."
            options |= _options(hint, is_dotted=is_dotted, path=(*path, field.name), section=inner)
            continue
        flag = "--" + ((section if is_dotted else "") + field.name).replace("_", "-")
        options[flag] = _Option(
            flag=flag,
            path=(*path, field.name),
            hint=hint,
            is_positional=_POSITIONAL in marks,
            is_needed=field.default is MISSING and field.default_factory is MISSING,
        )
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class _CommandLine:
    """A parsed command line: positional arguments, and options with their values."""

    options: Mapping[str, _Option]
    words: Sequence[str]
    given: Mapping[str, object]
    """The values, by flag."""
    flags: Sequence[str]
    """The command line without its positional arguments."""

    @classmethod
    def read(
        cls,
        arguments: Sequence[str],
        options: Mapping[str, _Option],
        *,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> _CommandLine:
        """Parse the arguments; `ConfigError` for what no option accepts."""
        words: list[str] = []
        flags: list[str] = []
        given: dict[str, object] = {}
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if not word.startswith("--"):
                words.append(word)
                continue
            name, equals, value = word.partition("=")
            flag = name.replace("_", "-")
            option, is_on = _option_of(aliases.get(flag, flag), options)
            if option.flag in given:
                raise ConfigError(f"{option.flag} is given twice; give it once")
            if option.takes == 0:
                if equals:
                    raise ConfigError(f"{name} takes no value, got {value!r}; leave it out")
                given[option.flag] = is_on
                flags.append(word)
                continue
            values = [value] if equals else _taken(rest, option)
            given[option.flag] = option.value(values)
            flags += [word] if equals else [word, *values]
        return cls(options=options, words=words, given=given, flags=flags)

    def values(self, *, has_default: bool, prog: str) -> dict[str, Any]:
        """All values by field; `ConfigError` if an argument is missing or left over."""
        found = dict(self.given)
        rest = list(self.words)
        for option in self.options.values():
            if option.is_positional:
                taken = rest if option.takes == _MANY else rest[: option.takes]
                rest = rest[len(taken) :]
                if taken or (option.takes == _MANY and not has_default):
                    found[option.flag] = option.value(taken)
            if option.is_needed and option.flag not in found and not has_default:
                raise ConfigError(f"{option.called} is missing; see {prog} --help")
        if rest:
            raise ConfigError(f"unexpected {', '.join(map(repr, rest))}; see {prog} --help")
        values: dict[str, Any] = {}
        for flag, value in found.items():
            *sections, name = self.options[flag].path
            place = values
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return values


def _option_of(flag: str, options: Mapping[str, _Option]) -> tuple[_Option, bool]:
    """The option of a flag, and whether the flag turns it on; `no-` turns a switch off."""
    section, dot, last = flag.removeprefix("--").rpartition(".")
    switch = options.get(f"--{section}{dot}{last.removeprefix('no-')}")
    option = options.get(flag)
    if option is None and switch is not None and switch.takes == 0:
        return switch, False
    option = option or _same_elsewhere(section, last, options)
    if option is None or option.is_positional:
        _refuse_renamed(flag, options)
        known = {name: option for name, option in options.items() if not option.is_positional}
        meant = _OF_OTHERS.get(last.replace("_", "-"))
        found = _same_elsewhere("", meant, options) if meant is not None else None
        # Without the hyphens, which all of them share.
        bare = {name.removeprefix("--"): name for name in known}
        close = get_close_matches(flag.removeprefix("--"), bare, n=1, cutoff=0.5)
        nearest = [found.flag] if found is not None else [bare[name] for name in close]
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(f"unknown option {flag}; {hint}--help lists them all")
    return option, True


_OF_OTHERS = {
    "lr": "learning-rate",
    "batch-size": "update-batch",
    "train-batch-size": "update-batch",
    "num-generations": "samples-per-prompt",
    "max-completion-length": "max-tokens",
    "max-new-tokens": "max-tokens",
    "beta": "kl-coef",
    "dataset": "task",
    "output-dir": "out",
    "max-steps": "max-updates",
}
"""What other trainers call our options."""


def _same_elsewhere(section: str, name: str, options: Mapping[str, _Option]) -> _Option | None:
    """The option whose flag differs from this one only in its section."""
    found = [
        option
        for option in options.values()
        if option.flag.removeprefix("--").rpartition(".")[2] == name
        and not option.is_positional
        and (not section or section == ".".join(option.path[-2:-1]))
    ]
    if len(found) > 1:
        flags = " or ".join(option.flag for option in found)
        raise ConfigError(f"--{name} is ambiguous; give {flags}")
    return found[0] if found else None


def _refuse_renamed(flag: str, options: Mapping[str, _Option]) -> None:
    """Refuse a flag of an older version, naming the new one; the section may be left out."""
    key = flag.removeprefix("--").replace("-", "_")
    flags = {
        ".".join(
            part for part in option.path if part not in ("settings", "simulation")
        ): option.flag
        for option in options.values()
    }
    for old, new in RENAMED_KEYS.items():
        if key in (old, old.rpartition(".")[2]) and new in flags:
            raise ConfigError(f"{flag} is now {flags[new]}; change it")
    refuse_renamed(key)


def _taken(rest: list[str], option: _Option) -> list[str]:
    """Take the values of a flag from the front of the remaining arguments."""
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and len(taken) != option.takes:
        if option.takes == _MANY and taken and option.ends_before(rest[0]):
            break
        taken.append(rest.pop(0))
        if taken == [NO_VALUE]:
            break
    return taken


def _count(values: int) -> str:
    return {0: "no value", 1: "one value"}.get(values, f"{values} values")


def _asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether tyro should print its help, or shell completions."""
    return any(word in _HELP or word.startswith("--tyro-") for word in arguments)
