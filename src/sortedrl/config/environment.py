"""The section `[environment]`: what answers the policy in a conversation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from sortedrl.config.checks import PositiveFloat, PositiveInt, above, check_values, require

OnTimeout = Literal["tell", "end", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Conversations with an environment; by default there is none."""

    name: str | None = None
    """A built-in environment (calculator, python, questions), or my_module:Class or
    my_file.py:Class."""
    arguments: tuple[str, ...] = ()
    """Keyword arguments of the environment, written name=value."""
    reward: Literal["environment", "function"] = "environment"
    """environment: the reward that the environment gives. function: the reward function, which
    gets the text of the whole conversation."""
    max_turns: PositiveInt = 16
    """Turns of the policy after which a conversation is cut off."""
    max_open: PositiveInt | None = None
    """Conversations begun at a time, at most; by default any number."""
    processes: PositiveInt | None = None
    """Worker processes that run environments; by default half of the cores, at least 2 and at most
    8."""
    reply_seconds: PositiveFloat = 10.0
    """Timeout of one reply; an environment that takes longer is killed, with its worker."""
    process_gib: Annotated[float, above(0, "None sets no limit")] | None = 4.0
    """Memory limit of a worker and its child processes, beyond what loading took (on Linux)."""
    on_timeout: OnTimeout = "tell"
    """How a conversation is handled whose environment hit a limit or killed its worker twice.
    tell: the policy gets a message that says so, and continues.
    end: the conversation ends, with the reward so far. skip: it is not trained on."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_values(self, "environment.")
        require(
            self.name is not None or not self.arguments,
            f"environment.arguments are for an environment, got {list(self.arguments)} without "
            "environment.name",
        )

    @property
    def is_used(self) -> bool:
        """Whether there is an environment at all."""
        return self.name is not None

    @property
    def gives_rewards(self) -> bool:
        """Whether there is an environment that scores its conversations."""
        return self.is_used and self.reward == "environment"

    @property
    def described(self) -> dict[str, object]:
        """What a conversation depends on, for the record of an evaluation; empty without any."""
        if not self.is_used:
            return {}
        return {
            "environment": self.name,
            "environment_arguments": list(self.arguments),
            "environment_reward": self.reward,
            "max_turns": self.max_turns,
            "reply_seconds": self.reply_seconds,
            "on_timeout": self.on_timeout,
        }

    @property
    def num_workers(self) -> int:
        """Worker processes to start."""
        return self.processes or min(8, max(2, (os.cpu_count() or 2) // 2))
