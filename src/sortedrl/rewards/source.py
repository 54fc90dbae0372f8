"""Where a reward function is found: `module:function`, or `path/to/file.py:function`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The address of a reward function, and the keyword arguments it is always given.

    An address and plain values, never the function itself: worker processes import it.
    """

    function: str
    options: Mapping[str, object] = field(default_factory=dict)
