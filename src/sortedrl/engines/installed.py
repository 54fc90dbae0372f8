"""Which rollout engines this Python has, in which versions, and on which devices they would write.

Nothing heavy is imported to find out; only the devices ask torch, where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

Kind = Literal["native", "vllm", "sglang"]
"""The engines that run in this process or in children of it."""

KINDS: tuple[Kind, ...] = ("native", "vllm", "sglang")
NATIVE: Mapping[str, str] = {
    "torch": ">=2.11",
    "transformers": ">=5.12",
    "safetensors": ">=0.5",
    "numpy": ">=1.26",
}
"""What the extra `native` asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package that an engine needs."""

    name: str
    version: str | None
    """`None` if it is not installed."""
    tested: str
    """The versions that were tried, as pip writes them."""

    @property
    def is_tested(self) -> bool:
        """Whether the version is one of those; a package that is missing is not."""
        if self.version is None:
            return False
        # Not a dependency of the bare package, but of every engine.
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            return Version(self.version) in SpecifierSet(self.tested, prereleases=True)
        except InvalidVersion:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What is there of an engine."""

    kind: Kind
    packages: tuple[Package, ...]
    """The first one is what the engine is known by."""

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package.name for package in self.packages if package.version is None]

    @property
    def untested(self) -> list[Package]:
        """The packages that are installed in versions which were not tried."""
        return [p for p in self.packages if p.version is not None and not p.is_tested]

    @property
    def remedy(self) -> str:
        """The command that installs the engine."""
        return f"pip install 'sortedrl[{self.kind}]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where answers can be written."""

    name: str
    """As torch calls it: cpu, cuda:0."""
    cores: int | None = None
    """Of a CPU."""
    card: str | None = None
    """What a GPU is called by its maker."""
    free_bytes: int | None = None
    total_bytes: int | None = None


def installation(kind: Kind) -> Installation:
    """What this Python has of an engine."""
    if kind == "native":
        packages = tuple(
            Package(name=name, version=_version(name), tested=tested)
            for name, tested in NATIVE.items()
        )
    elif _version("packaging") is None:
        # The outside engines depend on it, so without it none of them is there.
        packages = (Package(name=kind, version=None, tested=""),)
    elif kind == "vllm":
        from sortedrl.engines.vllm import versions as vllm

        packages = (Package(name=kind, version=vllm.installed_version(), tested=vllm.TESTED),)
    else:
        from sortedrl.engines.sglang import versions as sglang

        packages = (Package(name=kind, version=sglang.installed_version(), tested=sglang.TESTED),)
    return Installation(kind=kind, packages=packages)


def devices() -> list[Device]:
    """The CPU, and every GPU that torch sees."""
    cpu = Device(name="cpu", cores=os.cpu_count() or 1)
    if _version("torch") is None:
        return [cpu]
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        card = torch.cuda.get_device_name(index)
        gpus.append(Device(name=f"cuda:{index}", card=card, free_bytes=free, total_bytes=total))
    return [cpu, *gpus]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
