"""The files of a run that may be handed out: plain ones inside its folder, and nothing else.

Whatever a request asks for, and wherever links lead, a path that is given lies inside the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote


def decoded(part: str) -> str | None:
    """A part of a request's path between two slashes as text, if it is any."""
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        return None


def file_inside(folder: Path, parts: Sequence[str | None]) -> Path | None:
    """The plain file at these parts of a path under the folder, if there is one to hand out."""
    names = [part for part in parts if part is not None and _is_name(part)]
    if not names or len(names) < len(parts):
        return None
    try:
        root = folder.resolve(strict=True)
        found = root.joinpath(*names).resolve(strict=True)
    except (OSError, RuntimeError):  # not there, too long, or links that go in a circle
        return None
    if not found.is_relative_to(root) or not all(map(_is_name, found.relative_to(root).parts)):
        return None
    return found if found.is_file() else None


def _is_name(part: str) -> bool:
    """Whether this names something in a folder, and nothing hidden or elsewhere.

    >>> [_is_name(part) for part in ("events.jsonl", "..", ".env", "a/b", "C:", "")]
    [True, False, False, False, False, False]
    """
    return bool(part) and not part.startswith(".") and not any(sign in part for sign in "/\\:\0")
