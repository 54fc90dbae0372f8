"""Simulated conversations: turns, tool times and replies.

A conversation alternates turns of the simulated engine with replies of its environment. Lengths of
turns come from `LengthSettings`; the number of turns, tool times and reply tokens are sampled with
the seed of the conversation, or replayed from a log, so every schedule gets the same conversations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sortedrl.config.checks import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_values,
    require,
)
from sortedrl.core.clock import VirtualClock
from sortedrl.core.files import read_lines
from sortedrl.core.randomness import mix, normal
from sortedrl.errors import DataError, os_errors
from sortedrl.simulate.lengths import Divergence, Lengths
from sortedrl.types import Key, Trajectory

_TURNS_KEY = 0x7475726E73
_SECONDS_KEY = 0x746F6F6C73
_GIVEN_KEY = 0x676976656E
_MOST_TURNS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSettings:
    """The environments of a simulated run; by default there are none."""

    turns: float = 0.0
    """Median number of turns of a conversation; 0 for single answers without an environment."""
    turns_sigma: NonNegativeFloat = 0.5
    """Spread of the number of turns (lognormal)."""
    tool_seconds: NonNegativeFloat = 1.0
    """Median seconds of a reply."""
    tool_sigma: NonNegativeFloat = 1.0
    """Spread of the seconds of a reply (lognormal)."""
    given_tokens: NonNegativeFloat = 100.0
    """Median tokens of a reply."""
    given_sigma: NonNegativeFloat = 0.7
    """Spread of the tokens of a reply (lognormal)."""
    log: Path | None = None
    """Observed conversations instead of distributions: JSON lines with a list `turns`, each with
    `tokens` generated, `seconds` outside after it, and `given` tokens of the reply."""
    max_turns: PositiveInt | None = None
    """Turns after which a conversation is cut off."""
    max_tool_seconds: PositiveFloat | None = None
    """Timeout of a reply: no tool takes longer."""
    max_open: PositiveInt | None = None
    """Maximum number of concurrent conversations; by default engine.slots times
    (writing + outside) / writing."""
    is_lock_step: bool = False
    """Lock step: every turn waits until all conversations and all tools have finished."""
    has_serial_tools: bool = False
    """Lock step only: tools run one at a time."""

    def __post_init__(self) -> None:
        check_values(self, "conversations.")
        require(
            self.turns == 0 or 1 <= self.turns <= _MOST_TURNS,
            f"conversations.turns must be 0 (no environment) or lie in 1..{_MOST_TURNS}, got "
            f"{self.turns}",
        )
        require(
            self.is_lock_step or not self.has_serial_tools,
            "conversations.has_serial_tools needs conversations.is_lock_step",
        )

    @property
    def is_used(self) -> bool:
        """Whether there is an environment."""
        return self.turns > 0 or self.log is not None

    @property
    def mean_tool_seconds(self) -> float:
        """Mean of the lognormal distribution of tool times."""
        return self.tool_seconds * math.exp(min(self.tool_sigma**2 / 2, 50.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTurn:
    """A turn of a logged conversation and the reply to it."""

    tokens: int
    seconds: float
    given: int


def read_conversations(path: Path) -> list[tuple[ObservedTurn, ...]]:
    """The conversations of a log; `DataError` names an invalid line."""
    found = []
    with os_errors(path, "cannot be read", advice="; check the path"):
        for number, line in read_lines(path):
            try:
                found.append(_observed(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    path,
                    "a conversation is an object with a list 'turns' of objects with tokens, "
                    f"seconds and given ({error})",
                    line=number,
                ) from error
    if not found:
        raise DataError(path, "has no conversation; give at least one line")
    return found


def _observed(row: Mapping[str, Any]) -> tuple[ObservedTurn, ...]:
    turns = tuple(
        ObservedTurn(
            tokens=int(turn["tokens"]), seconds=float(turn["seconds"]), given=int(turn["given"])
        )
        for turn in row["turns"]
    )
    if not turns or any(
        turn.tokens < 1 or not 0 <= turn.seconds < math.inf or turn.given < 0 for turn in turns
    ):
        raise ValueError("at least one turn, tokens of 1 or more, seconds and given of 0 or more")
    return turns


class Conversations:
    """Samples the turns and replies of a run; the same key gives the same ones.

    It replaces `Lengths` for the simulated engine: the length of a conversation is the end of its
    current turn.
    """

    def __init__(self, settings: ConversationSettings, *, lengths: Lengths) -> None:
        """Read the log, if there is one."""
        self.turns = settings
        self.settings = lengths.settings
        self.max_tokens = lengths.max_tokens
        self._lengths = lengths
        self._log = None if settings.log is None else read_conversations(settings.log)

    def length(
        self, trajectory: Trajectory, *, version: int, divergence: Divergence | None = None
    ) -> int:
        """Tokens of the conversation at the end of its current turn."""
        before, number = _before_turn(trajectory), trajectory.num_turns
        observed = self._observed(trajectory)
        if observed is not None:
            own = observed[min(number, len(observed)) - 1].tokens
            own = own if divergence is None else max(divergence.kept - before + 1, own)
            return min(self.max_tokens, before + own)
        own_divergence = None
        if divergence is not None and divergence.kept >= before:
            own_divergence = Divergence(divergence.version, divergence.kept - before)
        turn = replace(trajectory, seed=mix(trajectory.seed, number))
        return min(
            self.max_tokens,
            before + self._lengths.length(turn, version=version, divergence=own_divergence),
        )

    def num_turns(self, trajectory: Trajectory) -> int:
        """Total number of turns of the conversation."""
        settings, observed = self.turns, self._observed(trajectory)
        if observed is not None:
            turns = len(observed)
        else:
            key = (trajectory.seed, trajectory.attempt, _TURNS_KEY)
            turns = max(1, round(_lognormal(settings.turns, settings.turns_sigma, *key)))
        return turns if settings.max_turns is None else min(turns, settings.max_turns)

    def seconds_outside(self, trajectory: Trajectory) -> float:
        """Seconds of the reply to its last turn."""
        settings, observed = self.turns, self._observed(trajectory)
        if observed is not None:
            seconds = observed[min(trajectory.num_turns, len(observed)) - 1].seconds
        else:
            key = _turn_key(trajectory, _SECONDS_KEY)
            seconds = _lognormal(settings.tool_seconds, settings.tool_sigma, *key)
        most = settings.max_tool_seconds
        return seconds if most is None else min(seconds, most)

    def num_given(self, trajectory: Trajectory) -> int:
        """Tokens of the reply to its last turn; a reply has at least one."""
        observed = self._observed(trajectory)
        if observed is not None:
            return max(1, observed[min(trajectory.num_turns, len(observed)) - 1].given)
        settings, key = self.turns, _turn_key(trajectory, _GIVEN_KEY)
        return max(1, round(_lognormal(settings.given_tokens, settings.given_sigma, *key)))

    def _observed(self, trajectory: Trajectory) -> tuple[ObservedTurn, ...] | None:
        if self._log is None:
            return None
        return self._log[mix(trajectory.seed, trajectory.attempt) % len(self._log)]


def _turn_key(trajectory: Trajectory, purpose: int) -> tuple[int, ...]:
    return (trajectory.seed, trajectory.attempt, purpose, trajectory.num_turns)


def _lognormal(median: float, sigma: float, *key: int) -> float:
    return median * math.exp(min(sigma * normal(*key), 50.0))


def _before_turn(trajectory: Trajectory) -> int:
    """Tokens generated before the current turn."""
    if trajectory.given:
        return trajectory.num_tokens
    in_turn = 0
    for segment in reversed(trajectory.segments):
        in_turn += len(segment.tokens)
        if segment.given:
            return trajectory.num_tokens - in_turn
    return 0


class SimulatedEnvironments:
    """Environments on a virtual clock."""

    def __init__(
        self, conversations: Conversations, *, limit: int | None, clock: VirtualClock
    ) -> None:
        self.limit = limit
        self.conversations = conversations
        self._clock = clock
        self._outside: dict[Key, tuple[float, Trajectory]] = {}

    @property
    def next_reply(self) -> float | None:
        """When the next reply is due; `None` if none is, or in lock step before it is awaited."""
        if self.conversations.turns.is_lock_step:
            return None
        return min((at for at, _ in self._outside.values()), default=None)

    def submit(self, trajectory: Trajectory) -> None:
        """Start a reply; after its last turn a conversation is complete at once."""
        is_last = trajectory.num_turns >= self.conversations.num_turns(trajectory)
        seconds = 0.0 if is_last else self.conversations.seconds_outside(trajectory)
        now = self._clock.seconds()
        if self.conversations.turns.has_serial_tools:
            now = max([now, *(at for at, _ in self._outside.values())])
        self._outside[trajectory.key] = (now + seconds, trajectory)

    def cancel(self, trajectory: Trajectory) -> None:
        """Forget a conversation."""
        self._outside.pop(trajectory.key, None)

    def collect(self, *, wait: bool) -> Sequence[Trajectory]:
        """Replies that are due; in lock step all of them, once they are awaited."""
        times = [at for at, _ in self._outside.values()]
        is_lock_step = self.conversations.turns.is_lock_step
        if is_lock_step and not wait:
            return ()
        if wait and times:
            until = max(times) if is_lock_step else min(times)
            self._clock.advance(max(0.0, until - self._clock.seconds()))
        now = self._clock.seconds()
        ready = sorted((at, key) for key, (at, _) in self._outside.items() if at <= now)
        return [self._replied(self._outside.pop(key)[1]) for _, key in ready]

    def _replied(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.num_turns >= self.conversations.num_turns(trajectory):
            return replace(trajectory, finish_reason="stop")
        return replace(trajectory, given=range(self.conversations.num_given(trajectory)))
