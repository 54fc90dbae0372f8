"""Adapters for environments of other libraries, recognised by their methods; tools and their calls.

    open, reply, close        ours
    init, step, close         skyrl-gym: `init(messages)`, `step(text)` gives observations
    reset, step               gym style: `step(text)` gives (observation, reward, done, ...), or
                              an object with these names, as OpenEnv's clients do
    reset and tools           TRL's environment_factory: methods with docstrings are tools

Rewards of steps are summed, as in those libraries. An object may have `is_replayable = True`;
without it, only modes that never replay can be used.

Two formats of tool calls are read, those of the common chat templates:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>     Qwen, Hermes
    {"name": "add", "parameters": {"a": 1, "b": 2}}                           Llama 3.1

A message may hold several calls of the first kind. The second kind is a whole message, also after
`<|python_tag|>`. A malformed call is returned as such, so that the policy gets the error.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import (
    Any,
    Literal,
    Protocol,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from sortedrl.environments import Environment, Message, Opening, Reply, ToolSchema
from sortedrl.errors import ConfigError, unknown_name

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_SECTION = re.compile(r"^([A-Z][a-z]+):\s*$")
_ARGUMENTS = ("Args", "Arguments", "Parameters")
_ARGUMENT = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote; `error` describes a malformed one."""

    name: str = ""
    arguments: Mapping[str, object] | None = None
    error: str | None = None


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in a message, in order; empty for a message that calls nothing.

    >>> tool_calls('Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, error=None)]
    >>> tool_calls("The answer is 4.")
    []
    """
    blocks = _BLOCK.findall(text)
    if blocks:
        return [_parsed(block, "arguments") for block in blocks]
    is_tagged = _PYTHON_TAG in text
    content = text.rpartition(_PYTHON_TAG)[2].strip()
    if is_tagged or (content.startswith("{") and '"name"' in content):
        return [_parsed(content, "parameters")]
    return []


def _parsed(text: str, key: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is not valid JSON ({error}): {text.strip()[:_SHOWN]}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='a tool call must be an object with "name" and "arguments"')
    # Models mix the two keys up; both mean the same.
    arguments = call.get(key, call.get("arguments", call.get("parameters", {})))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name=call["name"], error='the "arguments" of a tool call must be an object')
    return ToolCall(name=call["name"], arguments=arguments)


def call_tool(tools: Mapping[str, Callable[..., object]], call: ToolCall) -> str:
    """The result of a call as text, or its error as text."""
    if call.error is not None:
        return f"Error: {call.error}"
    if call.name not in tools:
        return f"Error: {unknown_name('tool', call.name, tools)}"
    tool, arguments = tools[call.name], dict(call.arguments or {})
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        return f"Error: {call.name}{inspect.signature(tool)}: {error}"
    try:
        result = finished(tool(**arguments))
        return result if isinstance(result, str) else json.dumps(result, default=str)
    except ConfigError:
        raise  # this machine cannot run the tool at all; no other call would help
    except Exception as error:  # noqa: BLE001  the policy caused it and gets the error as its reply
        return f"Error: {type(error).__name__}: {error}"


def finished(value: Any) -> Any:  # noqa: ANN401
    """A value, or what a coroutine gives; all of them run on one loop and may share connections."""
    return _loop().run_until_complete(value) if inspect.isawaitable(value) else value


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def tools_of(subject: object, *, without: Sequence[str] = ()) -> dict[str, Callable[..., object]]:
    """The public methods of an object that have a docstring, by name."""
    found = {}
    for name, member in inspect.getmembers(type(subject), inspect.isroutine):
        if name.startswith("_") or name in without or not inspect.getdoc(member):
            continue
        found[name] = _bound(subject, name)
    return found


def _bound(subject: object, name: str) -> Callable[..., object]:
    method: Callable[..., object] = object.__getattribute__(subject, name)
    return method


def schema_of(tool: Callable[..., object]) -> ToolSchema:
    """The schema of a function: types from its annotations, descriptions from its docstring.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: The first one.
    ...     '''
    >>> schema_of(add)["function"]["parameters"]["properties"]["a"]
    {'type': 'integer', 'description': 'The first one.'}
    """
    name = getattr(tool, "__name__", type(tool).__name__)
    summary, described = _docstring(inspect.getdoc(tool) or "")
    try:
        hints = get_type_hints(tool)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"the annotations of the tool {name!r} cannot be read: {error}"
        ) from error
    properties: dict[str, dict[str, object]] = {}
    required = []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"the tool {name!r} must name its parameters, got *{parameter.name}; give each its "
                "own parameter"
            )
        properties[parameter.name] = _json_type(hints.get(parameter.name, str))
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, object] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The summary, and the descriptions of the arguments in a section `Args:`."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif not section:
            summary.append(line)
        elif section in _ARGUMENTS and (match := _ARGUMENT.match(line)):
            last = match[1]
            described[last] = match[2]
        elif section in _ARGUMENTS and last and line.strip():
            described[last] += f" {line.strip()}"  # a description over several lines
    return " ".join(" ".join(summary).split()), described


def _json_type(hint: Any) -> dict[str, object]:  # noqa: ANN401
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": _JSON_TYPES.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (list, tuple, Sequence) or hint is list:
        return {"type": "array", "items": _json_type(inner[0] if inner else str)}
    if origin in (Union, types.UnionType):
        kinds = [_json_type(one) for one in inner if one is not type(None)]
        kind: dict[str, object] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return {**kind, "nullable": True} if len(kinds) < len(inner) else kind
    if hint is Any:
        return {}
    if origin is dict and len(inner) == 2:
        return {"type": "object", "additionalProperties": _json_type(inner[1])}
    return {"type": _JSON_TYPES.get(origin or hint, "string")}


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
        opening = finished(self._subject.reset(**_taken(self._subject.reset, row)))
        if opening is not None:
            messages[-1]["content"] += opening
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
    """Refuse an observation that is neither text nor messages."""
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
    """Whether an object has `is_replayable = True`."""
    return isinstance(subject, _Declared) and bool(subject.is_replayable)


def _close(subject: object) -> None:
    if isinstance(subject, _Closable):
        subject.close()
