"""A worker process of the environment pool: has live environments, and answers one call at a time.

    parent -> worker    Setup, then Call after Call, and Close
    worker -> parent    Ready or Refused, then Answered or Failed for each Call, and Idle after
                        each Call and Close

A call has every turn of its conversation. If the live environment has seen exactly the turns before
the last one, it answers that one. Otherwise the conversation is replayed in a new environment:
after turns were rejected, in a resumed run, or in place of a worker that was killed.

The answer is sent before the environment is closed, so one that hangs there loses nothing.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from sortedrl.environments import Environment, Message, Opening, Reply
from sortedrl.environments.adapters import made
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.rewards.functions import RewardSource, load_module
from sortedrl.rewards.pool.process import served
from sortedrl.types import LARGEST_REWARD, Key

Turn = str | None
"""The message of the policy; `None` for a turn that the environment failed to answer."""
Fault = Literal["raised", "invalid", "lost"]
"""The code raised; it gave no valid reply; the environment is gone and cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment's module is loaded."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The last call is done, and its environment closed if it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A conversation to be answered; without turns, only to be opened."""

    ticket: int
    key: Key
    row: Mapping[str, object]
    turns: tuple[Turn, ...] = ()
    is_last: bool = False
    """Whether the conversation ends with this call, so that its environment is closed."""
    is_answered: bool = False
    """Whether the last turn was answered before, and only the reward is missing."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the environment of a conversation."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The replies to all turns that were new to the environment; the last is the answer."""

    ticket: int
    opening: Opening
    replies: tuple[Reply, ...]
    reward: float | None
    """That of the conversation so far."""
    is_replayable: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The environment gave no answer."""

    ticket: int
    fault: Fault
    message: str


class InvalidReplyError(ValueError):
    """An environment returned an invalid opening or reply."""


@dataclass(slots=True)
class _Live:
    environment: Environment
    opening: Opening
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None


class Host:
    """The live environments of a worker, by conversation."""

    def __init__(self, factory: Callable[..., object]) -> None:
        """None yet."""
        self._factory = factory
        self._live: dict[Key, _Live] = {}

    def answer(self, call: Call) -> Answered | Failed:
        """Answer the last turn of a call, after a replay if the environment needs one."""
        began = time.perf_counter()
        live = self._live.get(call.key)
        known = call.turns if call.is_answered else call.turns[:-1]
        if live is None or tuple(live.turns) != known:
            self.close(call.key)
            live = self._opened(call)
            if known and not live.environment.is_replayable:
                self.close(call.key)
                return Failed(call.ticket, "lost", "the environment is gone and not replayable")
        replies = [self._replied(live, turn) for turn in call.turns[len(live.turns) :]]
        return Answered(
            ticket=call.ticket,
            opening=live.opening,
            replies=tuple(replies),
            reward=live.reward,
            is_replayable=bool(live.environment.is_replayable),
            seconds=time.perf_counter() - began,
        )

    def close(self, key: Key) -> None:
        """Close an environment, ignoring its exceptions."""
        live = self._live.pop(key, None)
        if live is not None:
            with suppress(Exception):
                live.environment.close()

    def _opened(self, call: Call) -> _Live:
        environment = made(self._factory, call.row)
        live = _Live(environment, _checked_opening(environment.open(call.row)))
        self._live[call.key] = live
        return live

    def _replied(self, live: _Live, turn: Turn) -> Reply:
        live.turns.append(turn)
        if turn is None:
            return Reply()
        reply = _checked_reply(live.environment.reply({"role": "assistant", "content": turn}))
        live.reward = reply.reward if reply.reward is not None else live.reward
        return reply


def main(descriptor: int) -> None:
    """Serve the parent at the other end of the socket until it closes."""
    worker = served(descriptor, load)
    if worker is None:
        return
    worker.connection.send(Ready())
    host = Host(worker.loaded)
    while True:
        work: Call | Close = worker.works.get()
        is_over = isinstance(work, Close)
        if not isinstance(work, Close):
            found = _answered(host, work)
            worker.connection.send(found)
            is_over = isinstance(found, Answered) and (
                work.is_last or any(reply.is_done for reply in found.replies[-1:])
            )
        if is_over:
            host.close(work.key)
        worker.connection.send(Idle())


def load(source: RewardSource) -> Callable[..., object]:
    """The class or function that makes environments, with its options bound."""
    what = f"environment {source.function!r}"
    module = load_module(source.place, called=what, suffix="environment")
    known = {name: value for name, value in vars(module).items() if callable(value)}
    if source.name not in known:
        raise ConfigError(
            f"{what}: {unknown_name('class or function', source.name, known)} (in {source.place})"
        )
    factory: Callable[..., object] = known[source.name]
    if not source.options:
        return factory
    return lambda: factory(**source.options)


def _answered(host: Host, call: Call) -> Answered | Failed:
    try:
        return host.answer(call)
    except InvalidReplyError as error:
        return Failed(call.ticket, "invalid", str(error))
    except ConfigError as error:
        return Failed(call.ticket, "invalid", str(error))
    except Exception:  # noqa: BLE001  the user's own; the parent shows it
        return Failed(call.ticket, "raised", traceback.format_exc())


def _checked_opening(opening: object) -> Opening:
    if not isinstance(opening, Opening):
        raise InvalidReplyError(f"open() must return an Opening, got {opening!r:.100}")
    messages = _checked_messages(opening.messages)
    if not messages:
        raise InvalidReplyError("an Opening must have at least one message, got none")
    return Opening(messages, [dict(tool) for tool in opening.tools])


def _checked_reply(reply: object) -> Reply:
    if not isinstance(reply, Reply):
        raise InvalidReplyError(f"reply() must return a Reply, got {reply!r:.100}")
    messages = _checked_messages(reply.messages)
    if not messages and not reply.is_done:
        raise InvalidReplyError("a Reply that does not end the conversation needs a message")
    reward = None if reply.reward is None else float(reply.reward)
    if reward is not None and not abs(reward) <= LARGEST_REWARD:
        raise InvalidReplyError(
            f"a reward must be a number within +-{LARGEST_REWARD:g}, got {reward}"
        )
    metrics = {str(name): float(value) for name, value in reply.metrics.items()}
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise InvalidReplyError(f"the metric {name!r} must be a finite number, got {value}")
    return Reply(messages=messages, is_done=bool(reply.is_done), reward=reward, metrics=metrics)


def _checked_messages(messages: Sequence[Message]) -> list[Message]:
    for message in messages:
        if not {"role", "content"} <= set(message):
            raise InvalidReplyError(f"a message needs role and content, got {message!r:.100}")
        for name, value in message.items():
            if not isinstance(value, str):
                raise InvalidReplyError(
                    f"the {name} of a message must be text, got {type(value).__name__}"
                )
    return [dict(message) for message in messages]
