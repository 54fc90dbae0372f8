"""Command, commit, machine and versions of a measurement; Markdown tables."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sortedrl.runs.folder import commit, device_name

_PACKAGES = ("torch", "transformers", "triton", "vllm")


def provenance(device: str) -> dict[str, object]:
    """Everything needed to repeat a measurement on this device."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(Path(__file__).parent),
        "machine": {
            "system": platform.platform(),
            "processor": device_name("cpu"),
            "cores": os.cpu_count(),
            "gpu": device_name(device) if device.startswith("cuda") else None,
        },
        "versions": versions,
    }


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(("a", "b"), [("1", "2")]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *rest])
