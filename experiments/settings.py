"""Settings of a table: tables laid over tables, and single values replaced."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from sortedrl.config.checks import require


def assigned(assignment: str) -> dict[str, Any]:
    """A dotted assignment as tables.

    >>> assigned("workload.seed=1")
    {'workload': {'seed': 1}}
    """
    name, equals, value = assignment.partition("=")
    require(bool(equals and name), f"--set takes name=value, got {assignment!r}")
    try:
        read: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        read = value
    for key in reversed(name.split(".")):
        read = {key: read}
    table: dict[str, Any] = read
    return table


def merged(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Tables laid over tables: what `part` has takes the place of what `whole` has.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(whole)
    for name, value in part.items():
        old = result.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            result[name] = merged(old, value)
        else:
            result[name] = value
    return result
