"""What a result was measured with: the machine, the libraries and the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_LIBRARIES = ("torch", "transformers", "triton", "trl", "vllm")


def machine(device: str) -> dict[str, str]:
    """The machine in words, and the versions of what the numbers depend on."""
    facts = {
        "device": _gpu() if device == "cuda" else _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def commit(root: Path) -> str:
    """The commit of the tree; `SORTEDRL_COMMIT` says it for a copy that has another history."""
    if told := os.environ.get("SORTEDRL_COMMIT"):
        return told
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
