"""Checks that all settings share: what holds for a value whatever section it stands in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sortedrl.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def require(holds: bool, message: str) -> None:
    """Refuse a setting: `message` says what must hold, what was given and what to do."""
    if not holds:
        raise ConfigError(message)


_COLDEST, _HOTTEST = 1e-4, 100.0


def require_temperature(setting: str, value: float, *, is_greedy_allowed: bool) -> None:
    """Refuse a temperature at which every draw is the same, or the model does not matter."""
    zero = "be 0 (greedy) or " if is_greedy_allowed else ""
    require(
        _COLDEST <= value <= _HOTTEST or (is_greedy_allowed and value == 0),
        f"{setting} must {zero}lie in {_COLDEST}..{_HOTTEST:g}, got {value}",
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
"""The most that a setting of this name may be, in whichever section: what lies beyond is a slip,
and would take the machine down before it failed."""
_MOST_OTHER = 10**9
_MOST_SECONDS = 1_000_000
_MOST_SEED = 2**63 - 1
_MAY_BE_INFINITE = ("tolerance",)
_MAY_BE_EMPTY = ("instruction",)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_NATIVE = ("torch", "transformers", "safetensors", "numpy")


def check_values(settings: DataclassInstance, section: str = "") -> None:
    """Refuse values that no setting can mean, in all sections: NaN, a NUL, a billion slots.

    What a single setting must hold beyond that is checked where it is defined.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            # A command's own settings stand at its top.
            inner = section if field.name == "settings" else f"{section}{field.name}."
            check_values(value, inner)
        else:
            require(
                field.default == "" or field.name in _MAY_BE_EMPTY or not _is_blank(value),
                f"{section}{field.name} must not be empty; leave it out, or give a value",
            )
            _check_value(value, section + field.name, name=field.name)


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
    """Whether a file can hold the text: half a surrogate pair has no UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def check_text(text: str, called: str) -> None:
    """Refuse text that no file and no path can hold."""
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
    """Refuse a device that is no device to train or write on; whether it is here shows later."""
    require(
        device is None or _DEVICE.fullmatch(device) is not None,
        f"device must be cpu, cuda or a GPU by its number such as cuda:1, got {device!r}; "
        "leave it out for the GPU if there is one",
    )


def require_native(what: str) -> None:
    """Refuse work on a model where the packages for it are not installed; nothing is loaded."""
    missing = [name for name in _NATIVE if find_spec(name) is None]
    require(
        not missing,
        f"{what} needs {', '.join(missing)}, not installed; pip install 'sortedrl[native]'",
    )


def is_installed(module: str) -> bool:
    """Whether it can be imported; a mere folder of that name, such as W&B leaves, is not it."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
