"""What a number was measured with: command, commit, machine and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

from sortedrl.runs.folder import commit, device_name

_PACKAGES = ("torch", "transformers", "triton", "vllm")


def provenance(device: str) -> dict[str, object]:
    """What a reader needs to repeat a measurement on this device."""
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
