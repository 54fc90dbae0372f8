"""The exceptions a user can meet.

    SortedRLError
    ├── ConfigError        a setting, or a combination of settings, that cannot work
    ├── DataError          a file whose content cannot be used: names file, line and reason
    ├── ModelError         a model that the engine cannot write with
    ├── RequestError       a trajectory that the engine cannot take on
    ├── EngineError        an outside engine that cannot be used as it is
    │   └── EngineLost     an engine that stopped answering in the middle of its work
    ├── TrainingError      updates that go wrong again and again
    ├── RewardError        a reward function that raised, or gave something that is no reward
    ├── EnvironmentFailed  an environment that raised, or gave something that is no reply
    ├── BufferStateError   a trajectory was moved along a path the buffer does not have
    ├── BufferFileError    a saved buffer that is truncated, damaged or not one of ours
    └── CheckpointError    a checkpoint that cannot be written, or is damaged or not one of ours

Each message says what must hold, what was given and what to do.
The command line prints the message without a traceback and exits with code 2.
"""

from __future__ import annotations

from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_SHOWN_NAMES = 60
_SHOWN_LETTERS = 80


class SortedRLError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(SortedRLError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(SortedRLError, ValueError):
    """A file whose content cannot be used."""

    def __init__(self, path: Path | str, reason: str, *, line: int | None = None) -> None:
        """Name the place as editors do: `file:line: reason`."""
        place = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{place}: {reason}")


@contextmanager
def os_errors(path: Path | str, what: str, *, advice: str = "") -> Iterator[None]:
    """Raise an error of the operating system as a `DataError`: `what` cannot be done, and why."""
    try:
        yield
    except OSError as error:
        raise DataError(path, f"{what} ({error.strerror or error}){advice}") from error


class ModelError(SortedRLError, ValueError):
    """A model that the engine cannot write with."""


class RequestError(SortedRLError, ValueError):
    """A trajectory that the engine cannot take on; those submitted with it are not taken either."""


class EngineError(SortedRLError):
    """An outside engine that cannot be used as it is: missing, out of reach, the wrong one."""


class EngineLost(EngineError):
    """An engine that stopped answering; `interrupt` still gives back what it was writing."""


class TrainingError(SortedRLError):
    """Updates that go wrong again and again."""


class TrainerLost(TrainingError):
    """The trainer's processes are gone; the run can go on from its last checkpoint."""


class RewardError(SortedRLError):
    """A reward function that raised, or gave something that is no reward."""

    def __init__(
        self, message: str, *, prompt_id: int | None = None, response: str | None = None
    ) -> None:
        """Keep the answer it happened with."""
        super().__init__(message)
        self.prompt_id = prompt_id
        self.response = response


class EnvironmentFailed(SortedRLError):
    """An environment that raised, or gave something that is no reply."""


class BufferStateError(SortedRLError):
    """A trajectory was moved along a path the buffer does not have."""


class BufferFileError(SortedRLError):
    """A saved buffer that is truncated, damaged or not one of ours."""


class CheckpointError(SortedRLError):
    """A checkpoint that cannot be written, or is damaged or not one of ours."""


def unknown_name(what: str, given: object, known: Iterable[str]) -> str:
    """A message for a misspelt name, with the nearest valid one."""
    names = list(known)
    text = str(given)
    shown = text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."
    lower = {name.lower(): name for name in names}
    nearest = get_close_matches(shown.lower(), lower, n=1, cutoff=0.5)
    hint = f"did you mean {lower[nearest[0]]!r}? " if nearest else ""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"unknown {what} {shown!r}; {hint}known: {', '.join(names[:_SHOWN_NAMES])}{more}"
