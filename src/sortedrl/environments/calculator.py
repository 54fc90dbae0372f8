"""A calculator in plain text, for models without a chat template.

    prompt    47*86
    policy    47*86=          a message that ends in `=` is a question to the calculator
    reply     4042
    policy    4042            any other message is the answer

Deterministic and replayable. Expressions are read, never run: whole numbers, + - * and brackets.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from sortedrl.environments.adapters import prompt_messages
from sortedrl.environments.protocol import Message, Opening, Reply

_MOST_CHARACTERS = 200
_MOST_DIGITS = 40


class Calculator:
    """Answers expressions; the reward is 1 for the row's `answer`, and 0 otherwise."""

    is_replayable = True

    def __init__(self) -> None:
        """A calculator that nobody used yet."""
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
