"""The versions of SGLang that were tried, and what is said to any other.

Nothing here imports SGLang: that takes seconds.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sortedrl.errors import EngineError

TESTED = ">=0.5.21,<0.5.22"


def installed_version() -> str | None:
    """The version of SGLang in this Python, or `None`."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def check_installed() -> str:
    """The installed version; refuses a missing package and a version that was not tried."""
    found = installed_version()
    if found is None:
        raise EngineError(
            "the SGLang engine needs the package sglang, which is not installed; "
            "install it with: pip install 'sortedrl[sglang]'"
        )
    check_version(found, place="this Python", remedy="pip install 'sortedrl[sglang]'")
    return found


def check_version(found: str, *, place: str, remedy: str) -> None:
    """Refuse a version outside of those that were tried."""
    try:
        is_tested = Version(found) in SpecifierSet(TESTED, prereleases=True)
    except InvalidVersion:
        is_tested = False
    if not is_tested:
        raise EngineError(
            f"SGLang must be of a version {TESTED}, which were tried; {place} has {found}; "
            f"do: {remedy}"
        )
