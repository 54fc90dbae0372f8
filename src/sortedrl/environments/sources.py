"""Environments by name or address, and the rows of a task as they open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from sortedrl.config.environment import EnvironmentSettings
from sortedrl.config.spec import options_from
from sortedrl.data.rows import Row
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.rewards.functions import RewardSource

if TYPE_CHECKING:
    from sortedrl.environments.pool import EnvironmentPool

ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "calculator": "sortedrl.environments.calculator:Calculator",
        "python": "sortedrl.environments.python_tool:PythonTool",
        "questions": "sortedrl.environments.questions:Questions",
    }
)
"""The built-in environments."""


def environment_source(settings: EnvironmentSettings) -> RewardSource:
    """The address and the options of an environment; addresses are written as those of rewards."""
    assert settings.name is not None, "there is an environment"
    address = ENVIRONMENTS.get(settings.name, settings.name)
    if ":" not in address:
        raise ConfigError(
            unknown_name("environment", address, ENVIRONMENTS)
            + "; or give my_module:MyClass or my_file.py:MyClass"
        )
    return RewardSource(address, options_from(settings.arguments))


def opened_rows(pool: EnvironmentPool, rows: Sequence[Row]) -> list[Row]:
    """The rows with the messages and the tools that their environments open with."""
    fields = [_fields(row) for row in rows]
    return [
        replace(
            row,
            prompt=_prompt(opening.messages),
            tools=opening.tools,
            fields={"prompt": own["prompt"], **row.fields},
        )
        for row, own, opening in zip(rows, fields, pool.open_rows(fields), strict=True)
    ]


def _fields(row: Row) -> dict[str, object]:
    """The columns of a row as its environment gets them."""
    prompt = row.prompt if isinstance(row.prompt, str) else [dict(m) for m in row.prompt]
    return {"prompt": prompt, "place": row.place, **row.fields}


def _prompt(messages: Sequence[Mapping[str, str]]) -> str | tuple[Mapping[str, str], ...]:
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return tuple(messages)
