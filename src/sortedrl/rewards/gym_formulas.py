"""Formulas in the answers of reasoning-gym tasks: parsed with an allow-list.

The library passes them to `eval` or to sympy, which also evaluates them, so an answer could run
code or take hours (`9**9**9`). Here a formula is a tree of known nodes and bounded size, and it is
judged by walking that tree: exactly for whole numbers and polynomials, at sample points for
integrals, by truth tables for logic.
"""

from __future__ import annotations

import ast
import cmath
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

Entry = Mapping[str, Any]
"""An entry of the library: question, answer, metadata."""

_LONGEST = 2_000
_MOST_NODES = 400
_MOST_DIGITS = 100
_MOST_SIGNS = 100


class RefusedError(ValueError):
    """The answer does not have the form of its task."""


def refuse_unless(holds: object) -> None:
    """Raise `RefusedError` unless the condition holds."""
    if not holds:
        raise RefusedError


_FORMULA = re.compile(
    r"(?:[-+*/()\s]|(?:\d++(?:\.\d*+)?|\.\d++)(?![\w.])|[A-Za-z]++(?![\w.]))*+", re.ASCII
)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd)
_NODES = (ast.BinOp, ast.UnaryOp, ast.Load, *_OPERATORS)
_Function = Callable[[complex], complex]
_FUNCTIONS: Mapping[str, tuple[_Function, _Function]] = MappingProxyType(
    {
        "sin": (cmath.sin, cmath.cos),
        "cos": (cmath.cos, lambda u: -cmath.sin(u)),
        "tan": (cmath.tan, lambda u: 1 / cmath.cos(u) ** 2),
        "sec": (lambda u: 1 / cmath.cos(u), lambda u: cmath.sin(u) / cmath.cos(u) ** 2),
        "csc": (lambda u: 1 / cmath.sin(u), lambda u: -cmath.cos(u) / cmath.sin(u) ** 2),
        "cot": (lambda u: 1 / cmath.tan(u), lambda u: -1 / cmath.sin(u) ** 2),
        "asin": (cmath.asin, lambda u: 1 / cmath.sqrt(1 - u * u)),
        "acos": (cmath.acos, lambda u: -1 / cmath.sqrt(1 - u * u)),
        "atan": (cmath.atan, lambda u: 1 / (1 + u * u)),
        "sinh": (cmath.sinh, cmath.cosh),
        "cosh": (cmath.cosh, cmath.sinh),
        "tanh": (cmath.tanh, lambda u: 1 / cmath.cosh(u) ** 2),
        "exp": (cmath.exp, cmath.exp),
        "log": (cmath.log, lambda u: 1 / u),
        "ln": (cmath.log, lambda u: 1 / u),
        "sqrt": (cmath.sqrt, lambda u: 0.5 / cmath.sqrt(u)),
        "abs": (abs, lambda u: u / abs(u)),
        "Abs": (abs, lambda u: u / abs(u)),
    }
)
"""The functions of a formula with their derivatives."""


def formula(text: str, *, names: frozenset[str] = frozenset()) -> ast.expr:
    """A formula of numbers, these names, + - * / ** and known functions, as a tree.

    Only ASCII reaches Python's parser, and nothing is compiled or run.
    """
    refuse_unless(len(text) <= _LONGEST and _FORMULA.fullmatch(text))
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedError from error
    refuse_unless(sum(1 for _ in ast.walk(tree)) <= _MOST_NODES)
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            refuse_unless(isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
            refuse_unless(len(node.args) == 1 and not node.keywords)
        elif isinstance(node, ast.Name):
            refuse_unless(node in called or node.id in names)
        elif isinstance(node, ast.Constant):
            refuse_unless(type(node.value) in (int, float) and len(str(node.value)) <= _MOST_DIGITS)
        else:
            refuse_unless(isinstance(node, _NODES))
    return tree


def _exact(node: ast.expr) -> Fraction:
    """The value of a formula of whole numbers and + - * /."""
    if isinstance(node, ast.Constant):
        refuse_unless(type(node.value) is int)
        return Fraction(int(str(node.value)))
    if isinstance(node, ast.UnaryOp):
        value = _exact(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    refuse_unless(isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow))
    assert isinstance(node, ast.BinOp)
    left, right = _exact(node.left), _exact(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    refuse_unless(right != 0)
    return left / right


def _makes(answer: str, *, target: int, numbers: list[int]) -> float:
    """Whether a formula uses each number exactly once, and nothing else, to make the target."""
    tree = formula(answer)
    used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    refuse_unless(used == Counter(numbers))
    return float(_exact(tree) == target)


def makes_target(answer: str, entry: Entry) -> float:
    """1 for a formula that makes the target of a countdown."""
    task = entry["metadata"]
    return _makes(answer, target=task["target"], numbers=task["numbers"])


def makes_24(answer: str, entry: Entry) -> float:
    """1 for a formula that makes 24."""
    return _makes(answer, target=24, numbers=entry["metadata"]["numbers"])


def _terms(node: ast.expr, sign: int = 1) -> Iterator[tuple[int, ast.expr]]:
    """The terms of a sum with their signs."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from _terms(node.left, sign)
        yield from _terms(node.right, sign if isinstance(node.op, ast.Add) else -sign)
    elif isinstance(node, ast.UnaryOp):
        yield from _terms(node.operand, -sign if isinstance(node.op, ast.USub) else sign)
    else:
        yield sign, node


def _factors(node: ast.expr) -> Iterator[tuple[str, Fraction]]:
    """Powers of variables, the number under the empty name, and signs under a minus."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        refuse_unless(isinstance(node.left, ast.Name) and isinstance(node.right, ast.Constant))
        assert isinstance(node.left, ast.Name)
        yield node.left.id, _exact(node.right)
    elif isinstance(node, ast.UnaryOp):
        yield "-", Fraction(-1 if isinstance(node.op, ast.USub) else 1)
        yield from _factors(node.operand)
    elif isinstance(node, ast.Name):
        yield node.id, Fraction(1)
    else:
        refuse_unless(isinstance(node, ast.Constant))
        yield "", _exact(node)


def _polynomial(text: str, names: frozenset[str]) -> dict[frozenset[tuple[str, Fraction]], Any]:
    """The coefficients of an expanded polynomial, in which each power stands once."""
    found: dict[frozenset[tuple[str, Fraction]], Fraction] = {}
    for sign, term in _terms(formula(text, names=names)):
        coefficient, powers = Fraction(sign), Counter[str]()
        factors = list(_factors(term))
        refuse_unless(sum(not name for name, _ in factors) <= 1)
        for name, value in factors:
            if name.isalpha():
                powers[name] += int(value)
            else:
                coefficient *= value
        key = frozenset((name, Fraction(power)) for name, power in powers.items() if power)
        refuse_unless(key not in found)
        found[key] = coefficient
    return {key: value for key, value in found.items() if value}


def is_product(answer: str, entry: Entry) -> float:
    """1 for the expanded polynomial of the gold; its factors again are no answer."""
    names = frozenset(entry["metadata"]["variables"])
    return float(_polynomial(answer, names) == _polynomial(entry["answer"], names))


_SIZES = (0.03, 0.11, 0.24, 0.37, 0.61, 0.89, 1.3, 1.9, 2.7, 3.3, 3.9, 4.6, 5.3, 6.1, 7.9, 9.7)
_POINTS = tuple(sign * size for size in _SIZES for sign in (1, -1))
_ENOUGH_POINTS = 4


def _slope(node: ast.expr, values: Mapping[str, tuple[complex, complex]]) -> tuple[complex, ...]:
    """The value of a formula and its derivative, from those of its names."""
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return complex(float(str(node.value))), 0j
    if isinstance(node, ast.UnaryOp):
        u, du = _slope(node.operand, values)
        return (-u, -du) if isinstance(node.op, ast.USub) else (u, du)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        function, derivative = _FUNCTIONS[node.func.id]
        u, du = _slope(node.args[0], values)
        return complex(function(u)), derivative(u) * du
    assert isinstance(node, ast.BinOp)
    u, du = _slope(node.left, values)
    v, dv = _slope(node.right, values)
    if isinstance(node.op, ast.Add):
        return u + v, du + dv
    if isinstance(node.op, ast.Sub):
        return u - v, du - dv
    if isinstance(node.op, ast.Mult):
        return u * v, du * v + u * dv
    if isinstance(node.op, ast.Div):
        return u / v, (du * v - u * dv) / (v * v)
    power = u**v
    inner = v * u ** (v - 1) * du if du else 0j
    return power, inner + (power * cmath.log(u) * dv if dv else 0j)


def is_antiderivative(answer: str, entry: Entry) -> float:
    """Whether the derivative is the integrand wherever the integrand is a real number."""
    name = entry["metadata"]["variable"]
    found = formula(answer, names=frozenset({name, "C", "E", "pi"}))
    integrand = formula(entry["metadata"]["integrand"], names=frozenset({name, "E", "pi"}))
    constants = {"C": (0.777 + 0j, 0j), "E": (math.e + 0j, 0j), "pi": (math.pi + 0j, 0j)}
    points = 0
    for point in _POINTS:
        values = {**constants, name: (complex(point), 1 + 0j)}
        try:
            wanted = _slope(integrand, values)[0]
        except (OverflowError, ZeroDivisionError, ValueError):
            continue
        if not cmath.isfinite(wanted) or abs(wanted.imag) > 1e-9 * abs(wanted):
            continue
        points += 1
        try:
            slope = _slope(found, values)[1]
        except (OverflowError, ZeroDivisionError, ValueError):
            return 0.0
        if not abs(slope - wanted) <= 1e-7 * abs(wanted) + 1e-9:
            return 0.0
    return float(points >= _ENOUGH_POINTS)


# Logic.

_OPERATIONS: Mapping[str, Callable[[bool, bool], bool]] = MappingProxyType(
    {
        "\u2194": lambda left, right: left == right,
        "\u2192": lambda left, right: not left or right,
        "\u2228": lambda left, right: left or right,
        "\u2227": lambda left, right: left and right,
    }
)
"""The operators between two formulas, from the loosest to the tightest."""
_LOGIC = "".join(_OPERATIONS)
_NOT = "\u00ac"
Truth = Callable[[Mapping[str, bool]], bool]


def _truth(text: str) -> Truth:
    """A formula of propositional logic as a function."""
    tokens = [char for char in text if not char.isspace()]
    refuse_unless(
        len(tokens) <= _MOST_SIGNS
        and all(char in "()" + _NOT + _LOGIC or "A" <= char <= "Z" for char in tokens)
    )
    tokens.append(")")
    place = 0

    def between(level: int) -> Truth:
        nonlocal place
        if level == len(_LOGIC):
            return single()
        left = between(level + 1)
        while tokens[place] == _LOGIC[level]:
            place += 1
            left = _joined(_OPERATIONS[_LOGIC[level]], left, between(level + 1))
        return left

    def single() -> Truth:
        nonlocal place
        token, place = tokens[place], place + 1
        if token == _NOT:
            inner = single()
            return lambda values: not inner(values)
        if token == "(":
            inner = between(0)
            refuse_unless(tokens[place] == ")" and place < len(tokens) - 1)
            place += 1
            return inner
        refuse_unless(token.isalpha())
        return lambda values: values[token]

    found = between(0)
    refuse_unless(place == len(tokens) - 1)
    return found


def _joined(operation: Callable[[bool, bool], bool], left: Truth, right: Truth) -> Truth:
    return lambda values: operation(left(values), right(values))


def _tables(entry: Entry) -> tuple[list[dict[str, bool]], list[list[bool]]]:
    """All assignments of the variables, and for each premise in which of them it holds."""
    names = entry["metadata"]["variables"]
    assignments = product((True, False), repeat=len(names))
    worlds = [dict(zip(names, values, strict=True)) for values in assignments]
    premises = [_truth(text) for text in entry["metadata"]["premises"]]
    return worlds, [[premise(world) for world in worlds] for premise in premises]


def _is_drawn(holds: list[bool], premises: list[list[bool]]) -> bool:
    """Whether premises that agree give a formula together, and none of them gives it alone."""
    possible = [all(column) for column in zip(*premises, strict=True)]
    return (
        any(possible)
        and any(holds)
        and _gives(possible, holds)
        and not any(_gives(premise, holds) for premise in premises)
    )


def _gives(premise: list[bool], holds: list[bool]) -> bool:
    return all(held for given, held in zip(premise, holds, strict=True) if given)


def is_conclusion(answer: str, entry: Entry) -> float:
    """1 for a formula that only follows from several premises together.

    Most premises give formulas such as `(P or Q)` alone, so that one answer would do for most rows.
    No variable may stand twice: a conclusion is no list of all that was said.
    """
    variables = list(filter(str.isalpha, answer))
    refuse_unless(set(variables) <= set(entry["metadata"]["variables"]))
    found = _truth(answer)
    worlds, premises = _tables(entry)
    is_short = 1 < len(variables) == len(set(variables))
    return float(is_short and _is_drawn([found(world) for world in worlds], premises))


def has_conclusion(entry: Entry) -> bool:
    """Whether two variables, or their negations, have a relation that is a conclusion."""
    worlds, premises = _tables(entry)
    literals = [f"{sign}{name}" for name in entry["metadata"]["variables"] for sign in ("", _NOT)]
    return any(
        _is_drawn([found(world) for world in worlds], premises)
        for left, right in combinations(literals, 2)
        if left[-1] != right[-1]
        for found in (_truth(f"{left}{operator}{right}") for operator in _LOGIC)
    )
