"""Checks shared by all settings, and bounds that a field declares in its type.

    every: PositiveInt = 50
    top_p: Annotated[float, within(0, 1, ends="(]")] = 1.0

`check_values` enforces the bounds; its errors say what must hold and what was given. A check over
several fields belongs in `__post_init__` of its settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from sortedrl.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def require(holds: bool, message: str) -> None:
    """Refuse a setting: `message` says what must hold, what was given and what to do."""
    if not holds:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The range of a number."""

    low: float
    high: float = math.inf
    has_low: bool = True
    has_high: bool = True
    advice: str = ""
    """What to do about a number outside, where it is not obvious."""

    def check(self, value: float, called: str) -> None:
        """Refuse a number outside, NaN included."""
        is_above = value >= self.low if self.has_low else value > self.low
        is_below = value <= self.high if self.has_high else value < self.high
        advice = f"; {self.advice}" if self.advice else ""
        require(is_above and is_below, f"{called} must {self._words}, got {value}{advice}")

    @property
    def _words(self) -> str:
        if self.high == math.inf:
            return f"be at least {self.low:g}" if self.has_low else f"be above {self.low:g}"
        if self.has_low and self.has_high:
            return f"lie in {self.low:g}..{self.high:g}"
        ends = "[" if self.has_low else "(", "]" if self.has_high else ")"
        return f"lie in {ends[0]}{self.low:g}, {self.high:g}{ends[1]}"


def at_least(low: float, advice: str = "") -> Bounds:
    """At least this number."""
    return Bounds(low=low, advice=advice)


def above(low: float, advice: str = "") -> Bounds:
    """More than this number."""
    return Bounds(low=low, has_low=False, advice=advice)


def within(low: float, high: float, *, ends: str = "[]", advice: str = "") -> Bounds:
    """Between two numbers; a round bracket in `ends` excludes that end."""
    return Bounds(
        low=low, high=high, has_low=ends[0] == "[", has_high=ends[1] == "]", advice=advice
    )


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, above(0)]
NonNegativeFloat = Annotated[float, at_least(0)]
Fraction = Annotated[float, within(0, 1)]
_COLDEST, _HOTTEST = 1e-4, 100.0
Temperature = Annotated[float, within(_COLDEST, _HOTTEST)]
"""Below, sampling is deterministic; above, it ignores the model."""


def require_temperature(setting: str, value: float) -> None:
    """Refuse a value that is neither 0 (greedy) nor a `Temperature`."""
    require(
        _COLDEST <= value <= _HOTTEST or value == 0,
        f"{setting} must be 0 (greedy) or lie in {_COLDEST}..{_HOTTEST:g}, got {value}",
    )


MOST: Mapping[str, int] = MappingProxyType(
    {
        "slots": 65_536,
        "max_tokens": 10_000_000,
        "group_prompts": 1_000_000,
        "group_sizes": 1_000_000,
        "samples_per_prompt": 100_000,
        "samples": 100_000,
        "lookahead": 10_000,
        "lookaheads": 10_000,
        "threads": 1_024,
        "workers": 256,
        "count": 1_000_000,
        "concurrency": 65_536,
        "batch": 65_536,
        "queue": 65_536,
        "rollout_workers": 4_096,
        "max_rollout_workers": 4_096,
        "trainer_ranks": 4_096,
        "restarts": 1_000,
        "rank": 65_536,
        "port": 65_535,
        "learning_rate": 10**38,
    }
)
"""Upper limits by name of the setting, in any section: larger values are typing errors that would
exhaust the machine before they failed."""
_MOST_OTHER = 10**9
_MOST_SECONDS = 1_000_000
_MOST_SEED = 2**63 - 1
_MAY_BE_INFINITE = ("tolerance",)
_MAY_BE_EMPTY = ("instruction",)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_NATIVE = ("torch", "transformers", "safetensors", "numpy")


def check_values(settings: DataclassInstance, section: str = "") -> None:
    """Refuse values that violate the types and bounds of their fields, in all sections.

    Text must be one of the literals of its field, and a number within its bounds; no setting may
    be NaN, contain a NUL character or exceed `MOST`.
    """
    rules = _rules(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        rule = rules[field.name]
        require(
            not rule.kinds or type(value) in rule.kinds,
            f"{section}{field.name} must be {rule.words}, got {value!r:.80}",
        )
        if rule.names and (value is not None or not rule.is_optional):
            known = value in rule.names
            require(known, unknown_name(section + field.name, value, rule.names))
        if rule.bounds is not None and value is not None:
            rule.bounds.check(value, section + field.name)
        if is_dataclass(value) and not isinstance(value, type):
            # A command's settings are its top level.
            inner = section if field.name == "settings" else f"{section}{field.name}."
            check_values(value, inner)
        else:
            require(
                field.default == "" or field.name in _MAY_BE_EMPTY or not _is_blank(value),
                f"{section}{field.name} must not be empty; leave it out, or give a value",
            )
            _check_value(value, section + field.name, name=field.name)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the type of a field allows."""

    names: tuple[str, ...] = ()
    bounds: Bounds | None = None
    is_optional: bool = False
    kinds: frozenset[type] = frozenset()
    """The plain types it may have; empty if it is not a plain value."""

    @property
    def words(self) -> str:
        return " or ".join(sorted(_KIND_WORDS[kind] for kind in self.kinds))


_KIND_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "left out",
}


@cache
def _rules(kind: type) -> Mapping[str, _Rule]:
    return {name: _rule(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _rule(hint: Any) -> _Rule:  # noqa: ANN401
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_optional = type(None) in kinds
    bounds, plain = None, set()
    for kind in kinds:
        if get_origin(kind) is Literal:
            return _Rule(names=get_args(kind), is_optional=is_optional)
        for mark in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
            bounds = mark if isinstance(mark, Bounds) else bounds
        plain.add(get_args(kind)[0] if get_origin(kind) is Annotated else kind)
    is_plain = all(kind in _KIND_WORDS for kind in plain)
    plain |= {int} if float in plain else set()
    return _Rule(
        bounds=bounds, is_optional=is_optional, kinds=frozenset(plain) if is_plain else frozenset()
    )


def _is_blank(value: object) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(part, str) and not part.strip() for part in parts)


def _check_value(value: object, called: str, *, name: str) -> None:
    if isinstance(value, tuple):
        for part in value:
            _check_value(part, called, name=name)
    elif isinstance(value, str | Path):
        check_text(str(value), called)
    elif name == "seed" and isinstance(value, int):
        require(0 <= value <= _MOST_SEED, f"{called} must lie in 0..{_MOST_SEED:,}, got {value:,}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_size(value, called, name=name)


def is_utf8(text: str) -> bool:
    """Whether the text can be encoded: a lone surrogate has no UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def check_text(text: str, called: str) -> None:
    """Refuse text that cannot be written to a file or used in a path."""
    require("\0" not in text, f"{called} must not hold a NUL character, got {text!r}")
    require(
        is_utf8(text),
        f"{called} must be valid UTF-8 text, got {text!r}",
    )


def _check_size(value: float, called: str, *, name: str) -> None:
    if name in _MAY_BE_INFINITE and value == math.inf:
        return
    most = MOST.get(name, _MOST_SECONDS if name.endswith("seconds") else _MOST_OTHER)
    is_finite = isinstance(value, int) or math.isfinite(value)
    require(is_finite, f"{called} must be a finite number, got {value}")
    require(abs(value) <= most, f"{called} must be at most {most:,}, got {value:,}")


def check_device(device: str | None) -> None:
    """Refuse a malformed device name; whether the device exists is checked later."""
    require(
        device is None or _DEVICE.fullmatch(device) is not None,
        f"device must be cpu, cuda or a GPU by its number such as cuda:1, got {device!r}; "
        "leave it out for the GPU if there is one",
    )


def require_native(what: str) -> None:
    """Refuse work on a model if the native packages are missing, without importing them."""
    missing = [name for name in _NATIVE if find_spec(name) is None]
    require(
        not missing,
        f"{what} needs {', '.join(missing)}, not installed; pip install 'sortedrl[native]'",
    )


def is_installed(module: str) -> bool:
    """Whether the module can be imported; a plain folder of that name (W&B) does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
