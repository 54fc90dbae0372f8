"""The built-in environments, and the sources of all environments: a name here, or an address.

All three are deterministic and replayable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from types import MappingProxyType

from sortedrl.config.data import EnvironmentSettings
from sortedrl.config.parsing import options_from
from sortedrl.data.knights_puzzle import Assignment, parse_puzzle, solutions
from sortedrl.data.knights_wording import PEOPLE, compact_answer
from sortedrl.environments import Message, Opening, Reply
from sortedrl.environments.adapters import prompt_messages
from sortedrl.errors import ConfigError, unknown_name
from sortedrl.rewards.code import SandboxLimits, run_python
from sortedrl.rewards.functions import RewardSource

ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "calculator": f"{__name__}:Calculator",
        "python": f"{__name__}:PythonTool",
        "questions": f"{__name__}:Questions",
    }
)
_SHOWN_CHARACTERS = 2000
_MOST_CHARACTERS = 200
_MOST_DIGITS = 40
_QUESTION = re.compile(r"([A-H])\?([A-H])")
_RULES = "write A?B to ask A whether B is a knight, or decide: {example}\n"


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


class PythonTool:
    """One tool, `python`: the policy's code runs in a sandbox, and its output is the reply.

    Each call is a separate program; nothing is kept between two calls. `rewards.code` documents
    what the sandbox prevents. The form is that of TRL's environments, and the reward is
    the task's own.
    """

    is_replayable = True

    def __init__(
        self, *, seconds: float = 5.0, memory_mib: int = 512, allow_weak: bool = False
    ) -> None:
        """Limits of a program; `allow_weak` runs it on machines without a full sandbox too."""
        self._limits = SandboxLimits(
            seconds=float(seconds), memory_mib=int(memory_mib), allow_weak=bool(allow_weak)
        )

    def reset(self, **row: object) -> None:
        """Begin a conversation."""

    def python(self, code: str) -> str:
        """Run a Python program and get what it prints. Nothing is kept between two calls.

        Args:
            code: The program; print the results that you need.
        """
        result = run_python(code, self._limits)
        if result.ending == "timeout":
            return f"Error: the program took more than {self._limits.seconds:g} seconds"
        if result.ending == "failed":
            last = result.errors.strip().rpartition("\n")[2]
            return f"{result.output[:_SHOWN_CHARACTERS]}Error: {last[:_SHOWN_CHARACTERS]}"
        return result.output[:_SHOWN_CHARACTERS] or "(no output; use print)"


class Calculator:
    """A calculator in plain text, for models without a chat template.

        prompt    47*86
        policy    47*86=          a message that ends in `=` is a question to the calculator
        reply     4042
        policy    4042            any other message is the answer

    The reward is 1 for the row's `answer`, and 0 otherwise. Expressions are read, never run: whole
    numbers, + - * and brackets.
    """

    is_replayable = True

    def __init__(self) -> None:
        """A calculator without calls."""
        self._answer = ""
        self._calls = 0

    def open(self, row: Mapping[str, object]) -> Opening:
        """The prompt as it is."""
        self._answer = str(row["answer"])
        return Opening(prompt_messages(row))

    def reply(self, message: Message) -> Reply:
        """The value of an expression, or the end."""
        text = message["content"].strip()
        if text.endswith("="):
            self._calls += 1
            return Reply(messages=[{"role": "user", "content": f"{value_of(text[:-1])}\n"}])
        return Reply(
            is_done=True,
            reward=float(text == self._answer),
            metrics={"correct": float(text == self._answer), "calls": float(self._calls)},
        )

    def close(self) -> None:
        """Nothing is held."""


def value_of(expression: str) -> str:
    """The value of an expression, or `?` if it has none.

    >>> value_of("47*(80+6)"), value_of("2**9"), value_of("a+1")
    ('4042', '?', '?')
    """
    if len(expression) > _MOST_CHARACTERS:
        return "?"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return "?"
    return str(value) if abs(value) < 10**_MOST_DIGITS else "?"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            if abs(number) < 10**_MOST_DIGITS:
                return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case _:
            pass
    raise ValueError("not an expression of a calculator")


class Questions:
    """Knights and Knaves by questions: ask people about each other, then decide.

        prompt    the puzzle, from any row of the task knights_knaves
        policy    A?B             ask A whether B is a knight
        reply     yes             a knight tells the truth, a knave lies
        policy    aBC             the decision: a capital is a knight, a small letter a knave

    People are the letters A to H in the order in which they are introduced. A message that is
    neither is answered with these rules. The reward is 1 for the right decision less the cost of
    the questions, and 0 for others.
    """

    is_replayable = True

    def __init__(self, *, questions: int = 4, cost: float = 0.0) -> None:
        """At most so many questions; each costs so much of the reward of a right decision."""
        self._most = int(questions)
        self._cost = float(cost)
        self._roles: Assignment = ()
        self._asked = 0

    def open(self, row: Mapping[str, object]) -> Opening:
        """The puzzle, with the rules."""
        (self._roles,) = solutions(parse_puzzle(str(row["statements"])))
        messages = [dict(message) for message in prompt_messages(row)]
        if not isinstance(row["prompt"], str):  # the compact form has no sentences
            messages[-1]["content"] += "\n\nPeople are A, B, ... in this order; " + self._rules
        return Opening(messages)

    def reply(self, message: Message) -> Reply:
        """An answer to a question, or the end."""
        text = message["content"].strip()
        people = PEOPLE[: len(self._roles)]
        if text.upper() == people or self._asked >= self._most:
            return self._decided(text)
        self._asked += 1
        match = _QUESTION.fullmatch(text)
        if match is None or match[1] not in people or match[2] not in people:
            return Reply(messages=[{"role": "user", "content": self._rules}])
        speaker, subject = (self._roles[people.index(person)] for person in match.groups())
        answer = "yes\n" if speaker == subject else "no\n"
        return Reply(messages=[{"role": "user", "content": answer}])

    def close(self) -> None:
        """Nothing is held."""

    @property
    def _rules(self) -> str:
        return _RULES.format(example=PEOPLE[: len(self._roles)].lower())

    def _decided(self, text: str) -> Reply:
        is_right = text == compact_answer(self._roles)
        return Reply(
            is_done=True,
            reward=max(0.0, 1.0 - self._cost * self._asked) if is_right else 0.0,
            metrics={"correct": float(is_right), "questions": float(self._asked)},
        )
