"""What a number was measured with: command, commit, machine and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

_PACKAGES = ("torch", "transformers", "triton", "vllm")


def provenance(device: str) -> dict[str, object]:
    """What a reader needs to repeat a measurement on this device."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    changes = _git("status", "--short")
    return {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": None if changes is None else changes.splitlines(),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "gpu": _gpu() if device.startswith("cuda") else None,
        },
        "versions": versions,
    }


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _processor() -> str:
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()
