"""TOML: a file as tables, and a value as such a file shows it.

What `toml_value` writes, any reader of TOML reads back as the same value.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sortedrl.errors import DataError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"not TOML: {error}") from error


def toml_value(value: object) -> str:
    """A value as TOML shows it; a path is its text.

    >>> toml_value(True), toml_value("a"), toml_value([1, 2.5]), toml_value(1e-8)
    ('true', '"a"', '[1, 2.5]', '1e-08')
    """
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(part) for part in value)}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name} = {toml_value(part)}" for name, part in value.items())
        return f"{{{inside}}}"
    # numbers, and dates and times, which are written as they are
    return str(value)
