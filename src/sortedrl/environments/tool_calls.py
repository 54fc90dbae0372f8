"""Tools: their schemas from Python functions, and the calls that a policy writes.

Two formats are read, those of the common chat templates:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>     Qwen, Hermes
    {"name": "add", "parameters": {"a": 1, "b": 2}}                           Llama 3.1

A message may hold several calls of the first kind. The second kind is a whole message, also after
`<|python_tag|>`. A malformed call is returned as such, so that the policy can be told.
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
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sortedrl.environments.protocol import ToolSchema
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
    """A call that the policy wrote; `error` says what is wrong with a malformed one."""

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
    """The result of a call as text; what is wrong with the call comes back as an error text."""
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
            described[last] += f" {line.strip()}"  # a description that goes on
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
