"""SortedRL inside other trainers: one package each, importable without the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.errors import ConfigError, unknown_name

_GIVEN = ("mode", "group_prompts", "lookahead", "max_staleness")
_UPDATES_PER_GROUP = 4


def schedule_of_batches(
    given: Mapping[str, Any], *, prompts: int, samples: int, prefix: str, batch_name: str
) -> Schedule:
    """The schedule of a trainer that updates on exactly `prompts` prompts with `samples` answers.

    `given` has what the user set, `prefix` and `batch_name` are how that trainer spells our
    settings and its number of prompts.
    """
    for name in given:
        if name not in _GIVEN:
            raise ConfigError(unknown_name(f"setting {prefix}*", name, _GIVEN))
    group = given.get("group_prompts", _UPDATES_PER_GROUP * prompts)
    require(
        isinstance(group, int) and group % prompts == 0,
        f"{prefix}group_prompts must be a multiple of {batch_name} = {prompts}, got {group}; try "
        f"{_UPDATES_PER_GROUP * prompts}",
    )
    return Schedule(
        **{**given, "group_prompts": group},
        samples_per_prompt=samples,
        update_batch=prompts * samples,
        harvest_unit="prompt",
        exact=True,
    )
