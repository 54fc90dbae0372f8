"""The generated parts of the reference: commands, settings, events, engine versions.

Each is Markdown made from the code: the flags and settings from the dataclasses and the strings
under their fields, the events from their classes.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sortedrl.cli import COMMANDS
from sortedrl.cli.arguments import field_text
from sortedrl.config.train import SupervisedSettings, TrainSettings
from sortedrl.core import events
from sortedrl.engines.installed import SGLANG, VLLM
from sortedrl.simulate.settings import Simulation

_FULL = {"train": TrainSettings, "sft": SupervisedSettings}
"""Commands whose settings have a page of their own."""


def cli() -> str:
    """Every command with its flags."""
    return "\n".join(_command(name) for name in sorted(COMMANDS))


def config() -> str:
    """Every setting of a training run, by section; then those of a warm start."""
    parts = [*_sections(TrainSettings, heading="top of the file")]
    parts += ["## A warm start: `sortedrl sft`\n"]
    parts += _sections(SupervisedSettings, heading="top of the file", level=3, known=TrainSettings)
    return "\n".join(parts)


def simulation() -> str:
    """The settings of `simulate`, `compare` and `tune`."""
    return "\n".join(_sections(Simulation, heading="top of the file", level=3))


def event_log() -> str:
    """The events of events.jsonl, in the order in which a round has them."""
    intro = dedent(events.__doc__ or "").split("\n\n", 1)[1]
    parts = [intro, ""]
    for kind in get_args(events.Event):
        names = [(f"`{f.name}`", _type(get_type_hints(kind)[f.name])) for f in fields(kind)]
        parts.append(f"### `{kind.kind}`\n\n{kind.__doc__}\n\n{_table(('field', 'type'), names)}")
    for row in (events.Trained, events.Scored):
        listed = ", ".join(f"`{name}`" for name in row._fields)
        parts.append(f"### {row.__name__}, a row of `{row.__name__.lower()}`\n\n{row.__doc__}\n")
        parts.append(f"Written as a list: {listed}.\n")
    return "\n".join(parts)


def engine_versions() -> str:
    """The versions of outside engines that are accepted."""
    rows = [(e.title, f"`{e.tested}`", f"`{e.remedy}`") for e in (VLLM, SGLANG)]
    return _table(("engine", "versions", "install"), rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "cli": cli,
    "config": config,
    "simulation": simulation,
    "events": event_log,
    "engine-versions": engine_versions,
}
"""What `<!-- generated: NAME -->` on a page is replaced with."""


def _command(name: str) -> str:
    module = import_module(f"sortedrl.cli.{name}")
    first, _, rest = module.HELP.partition("\n")
    parts = [f"## sortedrl {name}\n\n{first}\n"]
    if rest.strip():
        parts.append(f"```text\n{rest.strip(chr(10))}\n```\n")
    rows = list(_flags(module.Arguments, _FULL.get(name)))
    if rows:
        parts.append(_table(("flag", "type", "default", "meaning"), rows))
    if name in _FULL:
        parts.append("Every setting is a flag too: [configuration](config.md).\n")
    elif "simulation" in {field.name for field in fields(module.Arguments)}:
        parts.append("So are the settings of a [simulation](config.md#simulation).\n")
    return "\n".join(parts)


def _flags(command: type, left_out: type | None) -> Iterator[tuple[str, str, str, str]]:
    hints = get_type_hints(command)
    for field in fields(command):
        hint = hints[field.name]
        if hint is left_out or hint is Simulation:
            continue
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _flags(hint, left_out)
            continue
        is_word = "Positional" in str(command.__annotations__[field.name])
        shown = field.name.upper() if is_word else f"--{field.name.replace('_', '-')}"
        yield f"`{shown}`", _type(hint), _default(field), _words(command, field.name)


def _sections(
    settings: type, *, heading: str, level: int = 2, known: type | None = None
) -> Iterator[str]:
    """A table of the fields at the top, then one for each section."""
    hints = get_type_hints(settings)
    plain = [field for field in fields(settings) if not is_dataclass(hints[field.name])]
    mark = "#" * level
    yield f"{mark} {heading.capitalize()}\n\n{_settings_table(settings, plain)}"
    others = {} if known is None else get_type_hints(known)
    for field in fields(settings):
        kind = hints[field.name]
        if not is_dataclass(kind):
            continue
        assert isinstance(kind, type)
        if others.get(field.name) is kind:
            yield f"{mark} `[{field.name}]` of a warm start\n\nAs [above](#{field.name}).\n"
            continue
        yield f"{mark} `[{field.name}]`\n\n{_first_paragraph(kind)}\n\n"
        yield _settings_table(kind, fields(kind))


def _settings_table(kind: type, of: Sequence[Field[Any]]) -> str:
    hints = get_type_hints(kind)
    return _table(
        ("key", "type", "default", "meaning"),
        [
            (f"`{field.name}`", _type(hints[field.name]), _default(field), _words(kind, field.name))
            for field in of
        ],
    )


def _first_paragraph(kind: type) -> str:
    return dedent(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _words(kind: type, name: str) -> str:
    return html.escape(" ".join(field_text(kind, name).split()), quote=False)


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is MISSING and field.default_factory is not MISSING:
        value = field.default_factory()
    if value is MISSING:
        return "required"
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{value.as_posix() if isinstance(value, Path) else value}`"


def _type(hint: Any) -> str:  # noqa: ANN401
    origin = get_origin(hint)
    if origin is Annotated:
        return _type(get_args(hint)[0])
    if origin in (Union, UnionType):
        return " or ".join(_type(kind) for kind in get_args(hint) if kind is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if origin is tuple:
        kinds = [kind for kind in get_args(hint) if kind is not Ellipsis]
        inner = ", ".join(dict.fromkeys(_type(kind) for kind in kinds))
        return f"list of {inner}"
    names = {str: "text", int: "int", float: "number", bool: "true or false", Path: "path"}
    return names.get(hint, f"`{hint.__name__}`")


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"
