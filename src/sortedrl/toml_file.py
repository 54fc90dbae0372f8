"""TOML files: read into tables, and written so that any reader gets the same tables back."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from sortedrl.errors import DataError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror}); check the path") from error
    # A number of thousands of digits is a plain ValueError, and so is a NUL in the path.
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"not TOML: {error}") from error


def toml_text(tables: Mapping[str, Any]) -> str:
    """Tables as the text of a TOML file; a path is its text, and `None` is left out.

    >>> print(toml_text({"out": Path("runs/a"), "limit": None, "a b": {"c.d": 1e-8}}), end="")
    out = "runs/a"
    <BLANKLINE>
    ["a b"]
    "c.d" = 1e-08
    """
    return tomli_w.dumps(_plain(tables))


def toml_value(value: object) -> str:
    """A value on one line, as TOML shows it.

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
