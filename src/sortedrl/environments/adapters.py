"""Environments of other libraries as ours, told apart by their methods.

    open, reply, close        ours
    init, step, close         skyrl-gym: `init(messages)`, `step(text)` gives observations
    reset, step               gym style: `step(text)` gives (observation, reward, done, ...), or
                              an object with these names, as OpenEnv's clients do
    reset and tools           TRL's environment_factory: methods with docstrings are tools

Rewards of steps are summed, as in those libraries. An object may say `is_replayable = True`;
without it nothing is assumed, and only modes that never replay can be used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from sortedrl.environments.protocol import Environment, Message, Opening, Reply
from sortedrl.environments.tool_calls import call_tool, finished, schema_of, tool_calls, tools_of
from sortedrl.errors import ConfigError

_NO_TOOLS = ("reset", "get_reward", "close")


@runtime_checkable
class _Conversing(Protocol):
    def open(self, row: Mapping[str, object]) -> Opening: ...
    def reply(self, message: Message) -> Reply: ...
    def close(self) -> None: ...


@runtime_checkable
class _Steps(Protocol):
    def init(self, prompt: Any) -> Any: ...  # noqa: ANN401
    def step(self, action: Any) -> Any: ...  # noqa: ANN401


@runtime_checkable
class _Gym(Protocol):
    def reset(self) -> Any: ...  # noqa: ANN401
    def step(self, action: Any) -> Any: ...  # noqa: ANN401


@runtime_checkable
class _Resettable(Protocol):
    def reset(self, **row: Any) -> str | None: ...  # noqa: ANN401


@runtime_checkable
class _StepResult(Protocol):
    """What `reset` and `step` of OpenEnv's clients return."""

    observation: Any
    reward: Any
    done: Any


@runtime_checkable
class _Rewarding(Protocol):
    def get_reward(self) -> float: ...


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


@runtime_checkable
class _Declared(Protocol):
    is_replayable: bool


def adapted(subject: object) -> Environment:
    """An environment over an object with the methods of one of the libraries."""
    if isinstance(subject, _Conversing):
        if not isinstance(subject, _Declared):
            raise ConfigError(
                f"the environment {type(subject).__name__} must say whether it is_replayable (a "
                "class attribute): whether the same messages give the same replies again"
            )
        return subject
    if isinstance(subject, _Steps):
        return StepEnvironment(subject)
    if isinstance(subject, _Gym):
        return GymEnvironment(subject)
    if isinstance(subject, _Resettable):
        return ToolEnvironment(subject)
    raise ConfigError(
        f"an environment must have the methods open, reply and close; or init and step; or reset "
        f"and step; or reset and tools, got {type(subject).__name__}; see "
        "docs/how-to/environments.md"
    )


def made(factory: Callable[..., object], row: Mapping[str, object]) -> Environment:
    """The environment of a factory: a class or function that takes nothing, or the row."""
    needed = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return adapted(factory(dict(row)) if needed else factory())


class ToolEnvironment:
    """TRL's form: one object per conversation, whose public methods are the tools."""

    def __init__(self, subject: _Resettable) -> None:
        """Wrap a fresh object."""
        self.is_replayable = is_declared_replayable(subject)
        self._subject = subject
        self._tools = tools_of(subject, without=_NO_TOOLS)
        if not self._tools:
            raise ConfigError(
                f"{type(subject).__name__} has no tools: give at least one public method a "
                "docstring"
            )

    def open(self, row: Mapping[str, object]) -> Opening:
        """Reset the object with the columns of the row; what it returns ends the last message."""
        messages = [dict(message) for message in prompt_messages(row)]
        said = finished(self._subject.reset(**_taken(self._subject.reset, row)))
        if said is not None:
            messages[-1]["content"] += said
        return Opening(messages, [schema_of(tool) for tool in self._tools.values()])

    def reply(self, message: Message) -> Reply:
        """Call the tools that the message calls; a message without calls ends the conversation."""
        calls = tool_calls(message["content"])
        results = [(call, call_tool(self._tools, call)) for call in calls]
        subject = self._subject
        return Reply(
            messages=[
                {"role": "tool", "name": call.name, "content": result} for call, result in results
            ],
            is_done=not calls,
            reward=float(finished(subject.get_reward()))
            if isinstance(subject, _Rewarding)
            else None,
        )

    def close(self) -> None:
        """Close the object, where it can be closed."""
        _close(self._subject)


class StepEnvironment:
    """skyrl-gym's form: observations are messages."""

    def __init__(self, subject: _Steps) -> None:
        """Wrap a fresh object."""
        self.is_replayable = is_declared_replayable(subject)
        self._subject = subject
        self._reward = 0.0

    def open(self, row: Mapping[str, object]) -> Opening:
        """Give it the messages of the prompt."""
        returned = self._subject.init([dict(message) for message in prompt_messages(row)])
        messages = returned[0] if isinstance(returned, tuple) else returned
        return Opening(_messages(messages))

    def reply(self, message: Message) -> Reply:
        """One step."""
        step = self._subject.step(message["content"])
        self._reward += float(step["reward"] or 0.0)
        return Reply(
            messages=_messages(step["observations"]),
            is_done=bool(step["done"]),
            reward=self._reward,
        )

    def close(self) -> None:
        """Close the object, where it can be closed."""
        _close(self._subject)


class GymEnvironment:
    """Gym style: observations are texts, and become messages of the user."""

    def __init__(self, subject: _Gym) -> None:
        """Wrap a fresh object."""
        self.is_replayable = is_declared_replayable(subject)
        self._subject = subject
        self._reward = 0.0

    def open(self, row: Mapping[str, object]) -> Opening:
        """Reset it; what it observes follows the prompt of the row."""
        returned = self._subject.reset()
        observed = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(returned, _StepResult):
            observed = returned.observation
        _refuse_object(observed, self._subject)
        messages = [dict(message) for message in prompt_messages(row)]
        if isinstance(observed, str) and observed:
            messages[-1]["content"] = "\n\n".join(
                part for part in (messages[-1]["content"], observed) if part
            )
        return Opening(messages)

    def reply(self, message: Message) -> Reply:
        """One step.

        It gives (observation, reward, done, ...), (observation, reward, ended, cut, info), or an
        object with observation, reward and done.
        """
        returned = self._subject.step(message["content"])
        if isinstance(returned, _StepResult):
            observed, reward, ends = returned.observation, returned.reward, [returned.done]
        else:
            observed, reward, *rest = returned
            ends = rest[:2] if len(rest) > 2 else rest[:1]
        _refuse_object(observed, self._subject)
        self._reward += float(reward or 0.0)
        return Reply(
            messages=_messages(observed), is_done=any(map(bool, ends)), reward=self._reward
        )

    def close(self) -> None:
        """Close the object, where it can be closed."""
        _close(self._subject)


def prompt_messages(row: Mapping[str, object]) -> Sequence[Message]:
    """The prompt of a row as messages."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    assert isinstance(prompt, list | tuple), "a prompt is text or a list of messages"
    return prompt


def _taken(function: Callable[..., object], row: Mapping[str, object]) -> dict[str, object]:
    """The columns of the row that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def _refuse_object(observed: object, subject: object) -> None:
    """Refuse an observation that is neither text nor messages: nobody knows what to say of it."""
    if observed is not None and not isinstance(observed, str | list | tuple):
        raise ConfigError(
            f"an observation of {type(subject).__name__} must be text or messages, got "
            f"{type(observed).__name__}; wrap it in a class whose reset() and step(text) return "
            "the text of the observation"
        )


def _messages(observed: object) -> list[Message]:
    if isinstance(observed, str):
        return [{"role": "user", "content": observed}] if observed else []
    if isinstance(observed, list | tuple):
        return [dict(message) for message in observed]
    return []


def is_declared_replayable(subject: object) -> bool:
    """Whether an object says `is_replayable = True`."""
    return isinstance(subject, _Declared) and bool(subject.is_replayable)


def _close(subject: object) -> None:
    if isinstance(subject, _Closable):
        subject.close()
