"""What a result was measured with: the machine and the libraries."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from sortedrl.runs.folder import device_name

_LIBRARIES = ("torch", "transformers", "triton", "trl", "vllm")


def machine(device: str) -> dict[str, str]:
    """The machine by name, and the versions of what the numbers depend on."""
    facts = {
        "device": device_name(device),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts
